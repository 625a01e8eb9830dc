"""A complete tiny target in a folder like any checkpoint: random weights, a byte-level tokenizer, a chat template."""

from __future__ import annotations

from pathlib import Path

from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jdlite.checkpoints.huggingface import save_huggingface
from jdlite.models.config import DecoderConfig
from jdlite.models.decoder import Decoder

START, END = 0, 1
CHAT = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# Forgets what the assistant said before the newest message, as templates of thinking models forget thoughts.
REWRITING_CHAT = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_tokenizer(chat: str | None = CHAT) -> PreTrainedTokenizerFast:
    """Every byte is a token, so most characters beyond ASCII are several; ids 0 and 1 are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|start|>": START, "<|end|>": END} | {piece: i for i, piece in enumerate(alphabet, start=2)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = chat
    return fast


def tiny_model() -> Decoder:
    """Two layers over 258 tokens."""
    config = DecoderConfig.tiny(vocab_size=258, num_layers=2, hidden_size=16, intermediate_size=16, head_dim=8)
    return Decoder(config, rngs=nnx.Rngs(3))


def save_tiny_target(folder: Path, chat: str | None = CHAT, model: Decoder | None = None) -> Path:
    """A folder that `load_target` loads."""
    return save_huggingface(model or tiny_model(), folder, byte_tokenizer(chat), generation={"eos_token_id": END})
