"""`python -m jdlite.generate`: a prompt, a file of prompts or a chat, decoded speculatively and streamed."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from jdlite import cli
from jdlite.errors import CapacityError, CheckpointError, ConfigError, JdliteError, PromptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jdlite.checkpoints.target import Target
    from jdlite.conversation import Conversation
    from jdlite.decoding.sampling import Sampling
    from jdlite.decoding.session import Session
    from jdlite.decoding.stats import Stats
    from jdlite.drafters.base import Drafter

_DTYPES = Literal["float32", "bfloat16", "float16"]
# Rounds between two pieces of streamed text; the host looks at the device this often.
_ROUNDS = 2
_CHAT_CAPACITY = 4096
_CHAT_HELP = "/stats shows counters, /undo forgets the last turn, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Decode text with a target model and a drafter: the same tokens as plain decoding, in fewer forwards.

    Give one of --prompt, --prompts and --chat. Text goes to stdout, progress and notes to stderr.

    Attributes:
        target: Hugging Face folder, hub id or .gguf file; "demo" fetches SmolLM2-135M-Instruct.
        drafter: plain, pld, pld_plus, adapld, token_recycling, suffix or logit_spec, with options as in
            "pld:num_drafts=5,ngram_max=2"; "dlite:FOLDER" for a trained drafter, "hybrid:FOLDER" for AdaPLD and it
            together, with options after the folder as in "hybrid:FOLDER,num_nodes=16".
        prompt: one prompt, streamed. A chat model gets it as a user message, unless --raw.
        prompts: JSONL file; each line has one of "prompt" (a text), "messages" (a chat) and "tokens" (a list of ids),
            and may have an "id".
        chat: talk with the model; the cache is kept from turn to turn.
        system: system message, for --chat and for prompts that are texts.
        raw: continue prompts as they stand, without the chat template.
        out: with --prompts, the JSONL file of results (default: stdout). Rows that it has already are not decoded
            again.
        batch: with --prompts, rows decoded at once.
        max_new_tokens: most new tokens of an answer.
        stop: text that ends an answer and is not shown; may be given several times.
        ignore_eos: go on after the model's end-of-text tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the most likely tokens that together reach this probability; 1 is off.
        min_p: keep tokens at least this likely relative to the likeliest; 0 is off.
        repetition_penalty: makes tokens of prompt and answer less likely; 1 is off.
        presence_penalty: subtracted from the logit of every token of the answer; 0 is off.
        frequency_penalty: subtracted as often as a token is in the answer; 0 is off.
        min_new_tokens: no end-of-text token before this many tokens.
        seed: of the sampling noise. Row i of --prompts uses seed + i, whatever the batch.
        dtype: of weights and activations.
        cache_dtype: of keys and values (default: as --dtype).
        capacity: tokens that a row can hold, prompt and answer together (default: what is needed; 4096 for --chat).
        budget: how many drafted nodes to verify: "auto" weighs them by what forwards cost on this machine, measured
            once; "full" verifies all.
        stats: print forwards, tau and the sources of accepted tokens to stderr.
        cache_dir: folder for compiled programs, cost tables and the demo target (default: the user's cache folder).
    """

    target: str
    drafter: str = "adapld"
    prompt: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    prompts: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    chat: bool = False
    system: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    raw: bool = False
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    batch: int = 1
    max_new_tokens: int = 256
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    ignore_eos: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    seed: int = 0
    dtype: _DTYPES = "float32"
    cache_dtype: _DTYPES | None = None
    capacity: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    budget: Literal["auto", "full"] = "auto"
    stats: bool = False
    cache_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None

    def check(self) -> None:
        """Refuse options that do not go together.

        Raises:
            ConfigError: says which.
        """
        modes = {"--prompt": self.prompt is not None, "--prompts": self.prompts is not None, "--chat": self.chat}
        given = [name for name, used in modes.items() if used]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise ConfigError(f"give exactly one of --prompt, --prompts and --chat: got {got}.")
        mode = given[0]
        if mode != "--prompts":
            for name, used in {"--out": self.out is not None, "--batch": self.batch != 1}.items():
                if used:
                    raise ConfigError(f"{name} is for --prompts: got it with {mode}; leave it out.")
        if self.raw and (self.chat or self.system is not None):
            other = "--chat" if self.chat else "--system"
            raise ConfigError(f"--raw continues a text without the chat template, so it does not go with {other}.")
        if self.prompt is not None and not self.prompt:
            raise PromptError("--prompt is empty; give at least one character.")
        if any(not text for text in self.stop):
            raise ConfigError("--stop is empty; leave it out or give at least one character.")
        for name, least in {"batch": 1, "max_new_tokens": 0, "capacity": 2}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}: got {value}.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    return cli.run(_generate, Options, arguments, prog="python -m jdlite.generate")


def _generate(options: Options) -> int | None:
    """All that can be wrong is looked at before the target is loaded."""
    options.check()
    from jdlite import batch_file

    rows = None if options.prompts is None else batch_file.read_prompts(options.prompts)
    if options.out is not None:
        batch_file.check_output(options.out)
    from jdlite.drafters.registry import check_drafter, make_drafter

    check_drafter(options.drafter)
    sampling = _sampling(options)
    folder = cli.cache_folder(options.cache_dir)
    cli.use_compile_cache(folder)
    target = cli.load_target(options.target, options.dtype, folder)
    drafter = make_drafter(options.drafter, options.dtype, target).fit(target.model)
    if rows is not None:
        return batch_file.run(options, target, drafter, sampling, folder, rows)
    target.need_tokenizer()
    if options.chat:
        return _chat(options, target, drafter, sampling, folder)
    return _one(options, target, drafter, sampling, folder)


def _sampling(options: Options) -> Sampling:
    from jdlite.decoding.sampling import Sampling

    names = {field.name for field in dataclasses.fields(Sampling)} & {f.name for f in dataclasses.fields(Options)}
    return Sampling(**{name: getattr(options, name) for name in names})


def encode_text(options: Options, target: Target, text: str) -> list[int]:
    """Ids of a prompt that is a text: a user message where the target has a chat template, unless `--raw`.

    Raises:
        ConfigError: there is a system message but no chat template.
    """
    if options.raw or not getattr(target.need_tokenizer(), "chat_template", None):
        if options.system is not None:
            raise ConfigError("--system needs a target with a chat template; put the instruction into the prompt.")
        return target.encode(text)
    return target.encode_chat([*_system(options), {"role": "user", "content": text}])


def _system(options: Options) -> list[dict[str, str]]:
    return [] if options.system is None else [{"role": "system", "content": options.system}]


def make_session(
    options: Options, target: Target, drafter: Drafter, folder: Path, capacity: int, batch: int = 1
) -> Session:
    """A session as the options ask for; measures the machine where `--budget auto` needs it."""
    from jdlite.decoding.session import Session

    costs = cli.load_costs(target, drafter, options.budget, batch, folder)
    return Session(target.model, drafter, batch=batch, capacity=capacity, cache_dtype=options.cache_dtype, costs=costs)


def fit_capacity(options: Options, target: Target, drafter: Drafter, longest: int) -> int:
    """Capacity for prompts of up to `longest` tokens.

    Raises:
        CapacityError: they do not fit the model's context or `--capacity`.
    """
    from jdlite.api import bucket

    limit = target.config.max_position if options.capacity is None else options.capacity
    if longest >= limit:
        kind = "the model's context" if options.capacity is None else "--capacity"
        raise CapacityError(
            f"a prompt has {longest} tokens but {kind} is {limit}; use a larger one or a shorter prompt."
        )
    if options.capacity is not None:
        return options.capacity
    return bucket(max(longest + options.max_new_tokens, drafter.max_depth + 1), limit)


def _one(options: Options, target: Target, drafter: Drafter, sampling: Sampling, folder: Path) -> None:
    from jdlite.conversation import Reply

    ids = encode_text(options, target, options.prompt or "")
    if not ids:
        raise PromptError("the prompt has no tokens; give at least one character.")
    session = make_session(options, target, drafter, folder, fit_capacity(options, target, drafter, len(ids)))
    with cli.stage("Compiling and reading the prompt"):
        session.append([ids])
        reply = Reply(target, session, **_decode_options(options, sampling))
        pieces = iter(reply)
        first = next(pieces, "")
    _print_pieces(itertools.chain([first], pieces))
    _report(options, drafter, reply.result, sum(map(len, session.tokens)) - len(ids))
    check_numbers(reply.result.finish_reasons if reply.result else [])


def _decode_options(options: Options, sampling: Sampling) -> dict[str, Any]:
    return {
        "stop": options.stop,
        "use_eos": not options.ignore_eos,
        "sampling": sampling,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "rounds_per_yield": _ROUNDS,
    }


def _print_pieces(pieces: Iterable[str]) -> None:
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def check_numbers(finish_reasons: Sequence[str]) -> None:
    """Refuse results of a target whose logits are not numbers.

    Raises:
        CheckpointError: a row ended for that reason.
    """
    if "error" in finish_reasons:
        raise CheckpointError(
            "the target's logits are not numbers (NaN), so decoding stopped; check the weights, or use --dtype float32."
        )


def describe(stats: Stats, name: str, drafter: Drafter) -> str:
    """Counters of a decode call in a few words.

    Example: `adapld: 80 tokens in 12 forwards, tau 6.67; accepted: lexical 61, branch 7; by nodes: 1x2, 39x10`.
    """
    from jdlite.decoding.policy import variants
    from jdlite.drafters.base import SOURCES

    emitted, rounds = int(stats.emitted.sum()), int(stats.rounds.sum())
    sources = stats.accepted_from.sum(axis=0)
    accepted = ", ".join(f"{name} {n}" for name, n in zip(SOURCES, sources, strict=True) if n) or "none"
    counts = variants(drafter.max_nodes)
    uses = ", ".join(f"{n}x{used}" for n, used in zip(counts, stats.uses, strict=True) if used) or "none"
    return (
        f"{name}: {emitted} tokens in {int(stats.forwards)} forwards, tau {emitted / max(rounds, 1):.2f}; "
        f"accepted: {accepted}; by nodes: {uses}"
    )


def _report(options: Options, drafter: Drafter, result, tokens: int) -> None:
    """Notes after an answer, to stderr."""
    if result is None:
        notes = [f"{tokens} tokens, ended by a stop text in other tokens"] if options.stats else []
    else:
        notes = [describe(result.stats, options.drafter, drafter)] if options.stats else []
        if result.finish_reasons[0] == "capacity":
            notes.append("the capacity is used up; give a larger --capacity")
    for note in notes:
        print(note, file=sys.stderr)


def _chat(options: Options, target: Target, drafter: Drafter, sampling: Sampling, folder: Path) -> None:
    from jdlite.conversation import Conversation

    if not getattr(target.tokenizer, "chat_template", None):
        raise PromptError(f"{options.target} has no chat template; use --prompt with --raw, or a chat model.")
    capacity = options.capacity or min(_CHAT_CAPACITY, target.config.max_position)
    chat = Conversation(target, make_session(options, target, drafter, folder, capacity))
    chat.messages = list(_system(options))
    print(_CHAT_HELP, file=sys.stderr)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if text == "/exit":
            return
        if text == "/stats":
            _print_stats(options, chat)
        elif text == "/undo":
            print("forgotten" if chat.undo() else "there is nothing to undo", file=sys.stderr)
        elif text.startswith("/"):
            print(f"there is no command {text.split()[0]}; {_CHAT_HELP}", file=sys.stderr)
        elif text:
            _turn(options, chat, text, sampling)


def _turn(options: Options, chat: Conversation, text: str, sampling: Sampling) -> None:
    """One question and its answer. What can go wrong here ends the turn, not the conversation."""
    try:
        sync = chat.add({"role": "user", "content": text})
        _print_pieces(chat.reply(**_decode_options(options, sampling)))
    except KeyboardInterrupt:
        print("\n(stopped)", file=sys.stderr)
        return
    except JdliteError as error:
        cli.fail(error)
        return
    result = chat.last.result if chat.last else None
    _report(options, chat.session.drafter, result, 0)
    if options.stats:
        print(f"cache: {sync.kept} tokens kept, {sync.dropped} rolled back, {sync.appended} added", file=sys.stderr)
    check_numbers(result.finish_reasons if result else [])


def _print_stats(options: Options, chat: Conversation) -> None:
    length, capacity = chat.session.lengths[0], chat.session.capacity
    print(f"{len(chat.messages)} messages, {length} of {capacity} tokens", file=sys.stderr)
    if chat.last is not None and chat.last.result is not None:
        print(
            f"last answer: {describe(chat.last.result.stats, options.drafter, chat.session.drafter)}", file=sys.stderr
        )


if __name__ == "__main__":
    sys.exit(main())
