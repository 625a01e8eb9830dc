"""What no kernel of the verify head has."""

from __future__ import annotations

from jdlite.decoding.sampling import SamplingArrays


def require_plain_sampling(sampling: SamplingArrays) -> None:
    """Refuse steps of sampling other than greedy choice and temperature.

    Raises:
        NotImplementedError: some row uses another step.
    """
    steps = {
        "top-k": sampling.uses_top_k,
        "top-p": sampling.uses_top_p,
        "min-p": sampling.uses_min_p,
        "penalties": sampling.penalises,
        "banned ids": sampling.bans,
        "a minimum of new tokens": sampling.min_new,
    }
    refused = [name for name, used in steps.items() if used]
    if refused:
        raise NotImplementedError(
            f"The kernel has greedy choice and temperature: the sampling uses {', '.join(refused)}."
        )
