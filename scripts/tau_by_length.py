"""How many tokens a drafter gets accepted per forward, by the length of the conversation before the same questions.

python scripts/tau_by_length.py --target demo --drafter dlite:trained/dlite-smollm2-135m --history chats.jsonl \
    --questions questions.jsonl

The conversation is what the transcripts of `--history` say, one after another, cut between turns. It is run through the
target once; each length is a prefix of it, and the questions are asked in forks of that session. All drafts are
verified, greedily. The answers differ from length to length, since the target reads what was said before.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import jdlite
from jdlite import cli
from jdlite.checkpoints.target import Target
from jdlite.drafters.registry import make_drafter
from jdlite.errors import JdliteError, PromptError
from jdlite.evaluation.tasks import Message, Row, read_tasks


def turns(rows: Sequence[Row]) -> list[list[Message]]:
    """Pairs of a question and its answer, in order; what is not answered at once is left out."""
    pairs = []
    for row in rows:
        for ask, answer in zip(row.messages, row.messages[1:], strict=False):
            if (ask["role"], answer["role"]) == ("user", "assistant"):
                pairs.append([ask, answer])
    return pairs


def encode(target: Target, messages: Sequence[Message], ask: bool = False) -> list[int]:
    """Tokens of a conversation; with `ask` the assistant is to speak next."""
    return target.encode_chat(messages, add_generation_prompt=ask) if messages else []


def conversations(target: Target, pairs: Sequence[list[Message]], lengths: Sequence[int]) -> list[list[Message]]:
    """The longest beginnings of the history of at most each of `lengths` tokens.

    Raises:
        PromptError: the history is shorter than the longest of them.
    """
    cuts, said, done = [], [], 0
    for wanted in lengths:
        while done < len(pairs) and len(encode(target, [*said, *pairs[done]])) <= wanted:
            said, done = [*said, *pairs[done]], done + 1
        if done == len(pairs):
            raise PromptError(f"the history ends before {wanted} tokens; give longer ones, or a shorter length.")
        cuts.append(said)
    return cuts


def measure(
    target: Target, drafter: str, history: Sequence[Row], asked: Sequence[Row], lengths: Sequence[int], new: int
) -> Iterator[tuple[int, float, list[float]]]:
    """Tokens of the conversation, tau, and shares of rounds with at least 1, 2, ... drafts accepted, per length."""
    cuts = conversations(target, turns(history), lengths)
    questions = [dict(row.messages[0]) for row in asked]
    longest = max(len(encode(target, [*cuts[-1], question], True)) for question in questions)
    talk = jdlite.Session(target.model, make_drafter(drafter, target=target), capacity=longest + new)
    for said in cuts:
        prompts = [encode(target, [*said, question], True) for question in questions]
        shared = next(i for i, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1)
        talk.append([prompts[0][talk.lengths[0] : shared]])
        twins = talk.fork([0] * len(prompts))
        twins.append([prompt[shared:] for prompt in prompts])
        stats = twins.decode(max_new_tokens=new, stop_ids=[list(target.eos_ids)] * len(prompts)).stats
        rounds = float(stats.rounds.sum())
        accepted = (stats.accepted_at.sum(axis=0) / rounds).tolist()
        yield shared, float(stats.emitted.sum()) / rounds, accepted


def main() -> None:
    """Print a line per length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo", help="Hugging Face folder, hub id, .gguf file, or demo")
    parser.add_argument("--drafter", required=True, help="as in jdlite.bench")
    parser.add_argument("--history", required=True, help="file of transcripts")
    parser.add_argument("--questions", required=True, help="file whose rows' first messages are asked")
    parser.add_argument("--rows", type=int, default=12, help="questions, asked side by side")
    parser.add_argument("--lengths", type=int, nargs="+", default=[0, 1024, 2048, 4096, 7680], help="tokens before")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="of each answer")
    options = parser.parse_args()
    try:
        target = cli.load_target(options.target, "float32", cli.cache_folder(None))
        history, asked = read_tasks([options.history]), read_tasks([options.questions])[: options.rows]
        lengths, new = sorted(options.lengths), options.max_new_tokens
        for tokens, tau, accepted in measure(target, options.drafter, history, asked, lengths, new):
            shares = ", ".join(f"{share:.0%}" for share in accepted)
            print(
                f"{tokens:6d} tokens before: tau {tau:.2f}; rounds with at least 1, 2, ... accepted: {shares}",
                flush=True,
            )
    except JdliteError as error:
        cli.fail(error)


if __name__ == "__main__":
    main()
