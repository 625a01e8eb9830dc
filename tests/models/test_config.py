"""Every configuration field is live; presets have the published shapes; bad values are refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jdlite.checkpoints.assemble import abstract_decoder, parameter_paths
from jdlite.checkpoints.hf_config import config_to_hf
from jdlite.errors import ConfigError
from jdlite.models.config import DecoderConfig, RopeConfig
from jdlite.models.decoder import Decoder
from jdlite.models.layers import rope_frequencies

# One field changed at a time, from a base on which the field matters.
_LLAMA3 = RopeConfig(kind="llama3", factor=8.0, original_max_position=64)
_YARN = RopeConfig(kind="yarn", factor=4.0, original_max_position=1024)
ROPE_CHANGES = {
    "theta": (RopeConfig(), 5000.0),
    "kind": (RopeConfig(factor=2.0), "linear"),
    "factor": (_YARN, 8.0),
    "original_max_position": (_YARN, 32),
    "low_freq_factor": (_LLAMA3, 2.0),
    "high_freq_factor": (_LLAMA3, 8.0),
    "beta_fast": (_YARN, 8.0),
    "beta_slow": (_YARN, 4.0),
    "attention_factor": (_YARN, 1.5),
    "truncate": (_YARN, False),
}
SHAPE_CHANGES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_layers": 3,
    "num_heads": 2,
    "num_kv_heads": 4,
    "head_dim": 8,
    "qk_norm": False,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "tie_embeddings": False,
}


@pytest.mark.parametrize("name", ROPE_CHANGES)
def test_every_rope_field_changes_the_rotation(name):
    base, value = ROPE_CHANGES[name]
    before = rope_frequencies(base, 32, 4096)
    after = rope_frequencies(dataclasses.replace(base, **{name: value}), 32, 4096)
    assert before[1] != after[1] or not np.array_equal(before[0], after[0])


@pytest.mark.parametrize("name", SHAPE_CHANGES)
def test_every_shape_field_changes_the_parameters(name):
    def shapes(config):
        return {
            path: leaf.get_value().shape for path, leaf in parameter_paths(abstract_decoder(config, "float32")).items()
        }

    base = DecoderConfig.tiny()
    assert shapes(base) != shapes(dataclasses.replace(base, **{name: SHAPE_CHANGES[name]}))


def _forward(config):
    model = Decoder(config, rngs=nnx.Rngs(0))
    tokens = jnp.arange(6)[None]
    mask = jnp.tril(jnp.ones((1, 6, 6), bool))
    graph, state = nnx.split(model)
    cache = model.init_cache(1, 0)
    return np.asarray(jax.jit(lambda state: nnx.merge(graph, state)(tokens, tokens, mask, cache).hidden)(state))


def test_norm_eps_and_rope_change_the_output():
    base = DecoderConfig.tiny(num_layers=1)
    out = _forward(base)
    for change in ({"norm_eps": 1e-2}, {"rope": RopeConfig(theta=100.0)}):
        assert np.abs(out - _forward(dataclasses.replace(base, **change))).max() > 1e-5


def test_max_position_is_the_default_of_the_context_before_extension():
    rope = RopeConfig(kind="yarn", factor=4.0)
    assert not np.array_equal(rope_frequencies(rope, 32, 64)[0], rope_frequencies(rope, 32, 4096)[0])


def test_family_and_max_position_change_the_export():
    base = DecoderConfig.tiny(family="llama", qk_norm=False)
    for change in ({"max_position": 128}, {"family": "qwen2", "qkv_bias": True}):
        assert config_to_hf(base) != config_to_hf(dataclasses.replace(base, **change))


def test_no_field_is_left_out_of_these_tests():
    assert {f.name for f in dataclasses.fields(RopeConfig)} == set(ROPE_CHANGES)
    others = {"norm_eps", "rope", "family", "max_position"}
    assert {f.name for f in dataclasses.fields(DecoderConfig)} == set(SHAPE_CHANGES) | others


# Parameter counts from the model cards' shapes, in closed form and independent of the code.
@pytest.mark.parametrize(
    ("preset", "layers", "width", "feed_forward", "heads", "kv", "head", "vocab", "tied", "billions"),
    [
        ("qwen3_0_6b", 28, 1024, 3072, 16, 8, 128, 151_936, True, 0.6),
        ("qwen3_1_7b", 28, 2048, 6144, 16, 8, 128, 151_936, True, 1.7),
        ("qwen3_4b", 36, 2560, 9728, 32, 8, 128, 151_936, True, 4.0),
        ("qwen3_8b", 36, 4096, 12_288, 32, 8, 128, 151_936, False, 8.2),
        ("qwen3_14b", 40, 5120, 17_408, 40, 8, 128, 151_936, False, 14.8),
        ("qwen3_32b", 64, 5120, 25_600, 64, 8, 128, 151_936, False, 32.8),
        ("smollm2_135m", 30, 576, 1536, 9, 3, 64, 49_152, True, 0.1345),
    ],
)
def test_presets(preset, layers, width, feed_forward, heads, kv, head, vocab, tied, billions):
    config = getattr(DecoderConfig, preset)()
    norms = 2 * width + (2 * head if config.qk_norm else 0)
    block = width * head * 2 * (heads + kv) + 3 * width * feed_forward + norms
    total = layers * block + width + vocab * width * (1 if tied else 2)
    assert abs(total / 1e9 - billions) < 0.05 * billions
    one = parameter_paths(abstract_decoder(dataclasses.replace(config, num_layers=1), "bfloat16"))
    sizes = {path: int(np.prod(leaf.get_value().shape)) for path, leaf in one.items()}
    assert sum(n for path, n in sizes.items() if path.startswith("layers")) == block
    assert (config.num_layers, config.tie_embeddings) == (layers, tied)
    json.dumps(config_to_hf(config))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DecoderConfig.tiny(num_kv_heads=3), "num_kv_heads must divide num_heads: got 3 and 4"),
        (lambda: DecoderConfig.tiny(head_dim=7), "head_dim must be even"),
        (lambda: DecoderConfig.tiny(num_layers=0), "num_layers must be a positive integer: got 0"),
        (lambda: DecoderConfig.tiny(vocab_size=-9), "vocab_size must be a positive integer: got -9"),
        (lambda: DecoderConfig.tiny(norm_eps=0.0), "norm_eps must be positive"),
        (lambda: DecoderConfig.tiny(family="gpt2"), "family must be one of qwen3, qwen2, llama: got 'gpt2'"),
        (lambda: RopeConfig(theta=-1.0), "rope theta must be above 1"),
        (lambda: RopeConfig(factor=0.5), "rope factor must be at least 1"),
        (lambda: RopeConfig(original_max_position=-1), "must not be negative"),
        (lambda: RopeConfig(low_freq_factor=4.0), "below high_freq_factor"),
        (lambda: RopeConfig(beta_slow=64.0), "at most beta_fast"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_unknown_rope_kind_is_refused():
    rope = RopeConfig()
    # Set from outside, because a run with type checks refuses it before the config does.
    object.__setattr__(rope, "kind", "ntk")
    with pytest.raises(ConfigError, match="rope kind must be one of default, linear, llama3, yarn: got 'ntk'"):
        rope.__post_init__()
