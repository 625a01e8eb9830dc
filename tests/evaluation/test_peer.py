"""The transformers peer against transformers called the ordinary way."""

import builtins
import warnings

import pytest

from jdlite.errors import CheckpointError, ConfigError
from jdlite.evaluation.peer import LOOKUP, PLAIN, TransformersPeer
from tests.tiny_target import END, save_tiny_target

PROMPT, MORE, NEW = [5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 5, 6], 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_target(tmp_path_factory.mktemp("peer") / "target")


def generate(folder, tokens, **options):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = model.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=END,
        pad_token_id=END,
        **options,
    )
    return out[0, len(tokens) :].tolist()


def test_cached_generation_equals_the_ordinary_one_over_two_turns(folder):
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = TransformersPeer(folder, [END])
        known = []
        for tokens in (PROMPT, MORE):
            peer.append(tokens, chunk=3)
            known += tokens
            want = generate(folder, known)
            for kind in (LOOKUP, PLAIN, LOOKUP):
                run = peer.decode(kind, NEW)
                assert run.tokens == want
                assert run.seconds > 0
                # Prefill is not counted: plain takes one forward per token, lookup no more than that.
                assert run.forwards == len(want) if kind == PLAIN else run.forwards <= len(want)


def test_missing_torch_is_one_sentence(folder, monkeypatch):
    real = builtins.__import__

    def without_torch(name, *args, **kwargs):
        if name == "torch":
            raise ImportError("no torch here")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(ConfigError, match="needs torch, which is not installed"):
        TransformersPeer(folder, [END])


def test_gguf_and_absent_weights_are_refused(tmp_path):
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match="--peer-weights"):
        TransformersPeer("model.gguf", [END])
    with pytest.raises(CheckpointError, match="cannot load"):
        TransformersPeer(tmp_path, [END])
