"""Operations that decide what a round of speculative decoding costs, as Pallas kernels.

One folder per operation: `reference.py` (plain `jax.numpy`, the definition), one module per backend and `api.py`, which
is all that the rest of the library imports. `docs/kernels.md` has the formulas, the floors and the tilings.
"""
