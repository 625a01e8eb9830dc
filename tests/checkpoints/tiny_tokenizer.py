"""A byte-level BPE tokenizer of 61 tokens in GGUF metadata, enough for the tiny models."""

_PIECES = [
    "<|start|>",
    "<|end|>",
    *"abcdefghijklmnopqrstuvwxyz",
    *"0123456789",
    "Ġ",
    "Ċ",
    ".",
    ",",
    "'",
    "!",
    "<",
    ">",
    "|",
]
_MERGES = ["a b", "Ġ a", "1 2", "12 3", "t h", "th e", "Ġ the", "' s", "o n"]
TOKENS = _PIECES + [merge.replace(" ", "") for merge in _MERGES]
TOKENS += [f"unused{i}" for i in range(61 - len(TOKENS))]
CHAT = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)

TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3] + [1] * 59,
    "tokenizer.ggml.merges": _MERGES,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.padding_token_id": 1,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": CHAT,
}
