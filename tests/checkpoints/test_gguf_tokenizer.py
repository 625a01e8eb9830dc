"""The tokenizer of a GGUF file against a byte-level BPE in plain Python."""

import itertools
import re

import pytest

from jdlite.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from jdlite.errors import CheckpointError
from tests.checkpoints.tiny_tokenizer import CHAT, TOKENIZER

# ASCII forms of the published splitting rules.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nA-Za-z0-9]?[A-Za-z]+"
_MARKS = r" ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {"qwen2": f"{_WORDS}|[0-9]|{_MARKS}", "llama-bpe": f"{_WORDS}|[0-9]{{1,3}}|{_MARKS}"}
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"


def pieces(text: str, pre: str) -> list[str]:
    if pre != "smollm":
        return re.findall(SPLITS[pre], text)
    # Digits are cut out one by one first; GPT-2's rule then sees the rest.
    return [piece for part in re.findall(r"[0-9]|[^0-9]+", text) for piece in re.findall(_GPT2, part)]


def byte_symbols() -> dict[int, str]:
    """GPT-2's printable symbol for each byte: itself where printable, else 256, 257, ... in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols, extra = {b: chr(b) for b in printable}, 256
    for byte in range(256):
        if byte not in symbols:
            symbols[byte] = chr(extra)
            extra += 1
    return symbols


SYMBOLS = byte_symbols()


def bpe(piece: str, merges: list[str], vocab: dict[str, int], ignore_merges: bool) -> list[int]:
    parts = [SYMBOLS[byte] for byte in piece.encode()]
    if ignore_merges and "".join(parts) in vocab:
        return [vocab["".join(parts)]]
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    while len(parts) > 1:
        best = min(itertools.pairwise(parts), key=lambda pair: rank.get(pair, len(rank)))
        if best not in rank:
            break
        merged, i = [], 0
        while i < len(parts):
            if tuple(parts[i : i + 2]) == best:
                merged.append(parts[i] + parts[i + 1])
                i += 2
            else:
                merged.append(parts[i])
                i += 1
        parts = merged
    return [vocab[part] for part in parts]


class FakeFile:
    """Stands for an open GGUF file."""

    class path:
        name = "fake.gguf"

    def __init__(self, **changes):
        tokens = ["<|start|>", "<|end|>", "<tool>", *SYMBOLS.values()]
        merges = ["a b", "Ġ a", "1 2", "12 3", "t h", "th e", "Ġ the", "' s", "o n", "i s", "Ġ Ġ", "Ċ Ċ"]
        tokens += [merge.replace(" ", "") for merge in merges] + ["Ġword"]  # the last has no merge that makes it
        self.values = TOKENIZER | {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(tokens) - 3),
            "tokenizer.ggml.merges": merges,
            "{arch}.context_length": 64,
        }
        self.values |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}

    def get(self, key, default=None):
        return self.values.get(key, default)


TEXTS = [
    "the ab's  one\n\nis 123 and 1234567",
    "x1y22z333 12.5, it's THE'S don't",
    " leading and trailing  ",
    "tabs\tand\r\nlines\n  indented\n",
    "a word in (brackets), 3,000.50!",
]


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
@pytest.mark.parametrize("text", TEXTS)
def test_equals_plain_python(pre, text):
    file = FakeFile(pre=pre)
    tokenizer = tokenizer_from_gguf(file)
    vocab = {token: i for i, token in enumerate(file.get("tokenizer.ggml.tokens"))}
    merges = file.get("tokenizer.ggml.merges")
    assert "".join(pieces(text, pre)) == text
    right = [i for piece in pieces(text, pre) for i in bpe(piece, merges, vocab, pre == "llama-bpe")]
    assert tokenizer(text)["input_ids"] == right
    assert tokenizer.decode(right) == text


def test_digits_are_split_as_each_family_does():
    def spans(pre):
        return [p for p, _ in tokenizer_from_gguf(FakeFile(pre=pre))._tokenizer.pre_tokenizer.pre_tokenize_str("12345")]

    assert spans("smollm") == spans("qwen2") == ["1", "2", "3", "4", "5"]
    assert spans("llama-bpe") == ["123", "45"]


def test_special_tokens_are_not_split_and_others_decode():
    tokenizer = tokenizer_from_gguf(FakeFile())
    ids = tokenizer("the<|end|><tool>ab")["input_ids"]
    assert ids[1:3] == [1, 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the<tool>ab"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 1)


def test_start_token_is_added_when_the_file_says_so():
    assert tokenizer_from_gguf(FakeFile(add_bos_token=True))("ab")["input_ids"][0] == 0
    assert tokenizer_from_gguf(FakeFile(add_bos_token=False))("ab")["input_ids"][0] != 0


def test_characters_of_many_bytes_survive():
    for pre in ("smollm", "qwen2", "llama-bpe"):
        tokenizer = tokenizer_from_gguf(FakeFile(pre=pre))
        text = "naïve 日本 🙂 Ω½"
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_is_kept():
    tokenizer = tokenizer_from_gguf(FakeFile())
    assert tokenizer.chat_template == CHAT
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|start|>user\nab<|end|><|start|>"


def test_unknown_pre_tokenizer_is_refused():
    with pytest.raises(CheckpointError, match=r"pre-tokenizer 'viking' of fake\.gguf is not supported"):
        tokenizer_from_gguf(FakeFile(pre="viking"))


def test_other_tokenizer_models_are_refused():
    with pytest.raises(CheckpointError, match=r"must be byte-level BPE \(gpt2\): got 'llama'"):
        tokenizer_from_gguf(FakeFile(model="llama"))
