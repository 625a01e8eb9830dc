"""The byte-level BPE tokenizer inside a GGUF file, rebuilt as a transformers fast tokenizer."""

from __future__ import annotations

from typing import Any

from jdlite.errors import CheckpointError

# Token types of GGUF metadata.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# Splits of the GPT-4 family: contractions, letters with one leading mark, digit groups, punctuation, white space.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = ("smollm", "qwen2", "llama-bpe")


def _pre_tokenizer(kind: str):
    from tokenizers import Regex, pre_tokenizers

    if kind == "smollm":
        # Every digit is a piece of its own; the rest is split as GPT-2 does.
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    digits = {"qwen2": r"\p{N}", "llama-bpe": r"\p{N}{1,3}"}[kind]
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT.format(digits=digits)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def tokenizer_from_gguf(file: Any):
    """Build the tokenizer of a `GGUFFile`, with its special tokens and chat template.

    Returns:
        A `transformers.PreTrainedTokenizerFast`.

    Raises:
        CheckpointError: the tokenizer is no byte-level BPE, or its splitting rule is not known here.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    model, kind = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise CheckpointError(f"the tokenizer of {file.path.name} must be byte-level BPE (gpt2): got {model!r}.")
    if kind not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"the pre-tokenizer {kind!r} of {file.path.name} is not supported: use a file with one of "
            f"{', '.join(PRE_TOKENIZERS)}, or the Hugging Face checkpoint."
        )
    tokens = file.get("tokenizer.ggml.tokens")
    types = file.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges") or ()]
    bpe = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=kind == "llama-bpe"
    )
    tokenizer = Tokenizer(bpe)
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    for token, of_type in zip(tokens, types, strict=True):
        if of_type in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif of_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])

    def token_of(name: str) -> str | None:
        index = file.get(f"tokenizer.ggml.{name}_token_id")
        return None if index is None else tokens[int(index)]

    bos = token_of("bos")
    byte_level = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    tokenizer.post_processor = byte_level
    if bos is not None and file.get("tokenizer.ggml.add_bos_token", kind == "llama-bpe"):
        start = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        tokenizer.post_processor = processors.Sequence([byte_level, start])
    special = {"bos_token": bos, "eos_token": token_of("eos"), "unk_token": token_of("unknown")}
    special["pad_token"] = token_of("padding")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=file.get("tokenizer.chat_template"),
        model_max_length=int(file.get("{arch}.context_length")),
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in special.items() if token is not None},
    )
