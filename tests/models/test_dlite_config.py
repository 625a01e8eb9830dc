"""DLiteConfig: the layer rule, presets, ablation files and refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml
from jaxtyping import TypeCheckError

from jdlite.errors import ConfigError
from jdlite.models.config import DecoderConfig
from jdlite.models.dlite_config import PRESETS, DLiteConfig, target_layer_ids

ABLATIONS = sorted((Path(__file__).parents[2] / "configs" / "ablations").glob("*.yaml"))


@pytest.mark.parametrize(
    ("layers", "taps", "ids"),
    [
        (36, 12, (0, 1, 5, 8, 12, 16, 19, 23, 27, 30, 34, 35)),
        (36, 14, (0, 1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 34, 35)),
        (40, 14, (0, 1, 4, 8, 11, 14, 18, 21, 25, 28, 31, 35, 38, 39)),
        (28, 12, (0, 1, 4, 7, 9, 12, 15, 18, 20, 23, 26, 27)),
        (32, 12, (0, 1, 4, 7, 11, 14, 17, 20, 24, 27, 30, 31)),
        (36, 36, tuple(range(36))),
        (9, 5, (0, 1, 4, 7, 8)),
        # The middle of 1..12 and of 1..6 is a half, which goes to the even step: 1 + 6 and 1 + 2.
        (14, 5, (0, 1, 7, 12, 13)),
        (8, 5, (0, 1, 3, 6, 7)),
        (7, 3, (0, 3, 6)),
        (5, 2, (0, 4)),
        (2, 2, (0, 1)),
    ],
)
def test_layer_rule(layers, taps, ids):
    assert target_layer_ids(layers, taps) == ids


@pytest.mark.parametrize("layers", range(2, 41))
def test_layer_rule_gives_distinct_rising_ids(layers):
    for taps in range(2, layers + 1):
        ids = target_layer_ids(layers, taps)
        assert len(ids) == taps
        assert list(ids) == sorted(set(ids))
        assert (ids[0], ids[-1]) == (0, layers - 1)


@pytest.mark.parametrize("taps", [-1, 0, 1, 6])
def test_layer_rule_refuses(taps):
    with pytest.raises(ConfigError, match=f"between 2 and the target's 5 layers: got {taps}"):
        target_layer_ids(5, taps)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_their_targets(name):
    config = getattr(DLiteConfig, name)()
    target = getattr(DecoderConfig, name)()
    config.check_target(target)
    made = DLiteConfig.for_target(
        target,
        mask_token_id=config.mask_token_id,
        **{field: getattr(config, field) for field in ("num_layers", "num_taps", "rank")},
    )
    assert made == config
    assert (config.block_size, config.num_drafts, config.anchor_group_size) == (8, 7, 1)


def test_derived_layers():
    config = DLiteConfig.qwen3_8b()
    assert config.history_taps == ()
    assert config.captured_layers == config.taps
    teacher = dataclasses.replace(config, draft_history=128)
    assert teacher.history_taps == (0, 18, 35)
    assert teacher.captured_layers == (*config.taps, 18)  # layer 18 is not among the rule's 14
    assert DLiteConfig.tiny(tap_layers=(3, 1, 0)).taps == (3, 1, 0)


def test_dict_round_trip():
    config = DLiteConfig.tiny(tap_layers=(3, 1, 0), draft_history=8, history_layers=(0, 3))
    assert DLiteConfig.from_dict(config.to_dict()) == config
    assert isinstance(DLiteConfig.from_dict(config.to_dict()).tap_layers, tuple)
    assert hash(config) == hash(DLiteConfig.from_dict(config.to_dict()))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_taps": 5}, "num_taps must be between 2 and the target's 4 layers: got 5"),
        ({"tap_layers": (0, 1)}, "tap_layers must list num_taps layers: got 2 and 3"),
        ({"tap_layers": (0, 1, 4)}, "tap_layers must be distinct layers 0..3"),
        ({"tap_layers": (0, 1, 1)}, "tap_layers must be distinct layers 0..3"),
        ({"tap_layers": (0, "1", 2)}, "tap_layers must be a tuple of layer numbers"),
        ({"draft_history": 8, "history_layers": (0, 9)}, "history_layers must be distinct layers"),
        ({"history_layers": (0, 3)}, "history_layers are only read with a draft_history"),
        ({"draft_history": 1}, "draft_history must be 0"),
        ({"draft_history": -2}, "draft_history must be 0"),
        ({"mask_token_id": 97}, "mask_token_id must be a row of the target's embedding: got 97 of 97"),
        ({"mask_token_id": -1}, "mask_token_id must be a row"),
        ({"block_size": 1}, "block_size counts the anchor and at least one draft: got 1"),
        ({"anchor_group_size": 0}, "anchor_group_size must be at least 1: got 0"),
        ({"rank": 0}, "rank must be at least 1: got 0"),
        ({"rank": 8.0}, "rank must be a whole number: got 8.0"),
        ({"rank": True}, "rank must be a whole number: got True"),
        ({"norm_eps": "1e-6"}, "norm_eps must be a number: got '1e-6'"),
        ({"norm_eps": 0.0}, "norm_eps must be positive"),
        ({"qk_norm": 1}, "qk_norm must be true or false: got 1"),
        ({"context_mode": "cross"}, "context_mode must be one of kv, stream: got 'cross'"),
        ({"feature_concat": "sum"}, "feature_concat must be one of sequence, feature"),
        ({"head_output": "tied"}, "head_output must be one of low_rank, lm_head"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads: got 3 and 4"),
        ({"head_dim": 15}, "head_dim must be even"),
    ],
)
def test_refusals(change, sentence):
    # Where jaxtyping's import hook is on, it refuses ill-typed values first.
    with pytest.raises((ConfigError, TypeCheckError)) as caught:
        DLiteConfig.tiny(**change)
    if isinstance(caught.value, ConfigError):
        assert sentence in str(caught.value)


def test_from_dict_refusals():
    with pytest.raises(ConfigError, match="unknown: depth, width; known are vocab_size"):
        DLiteConfig.from_dict({"preset": "tiny", "width": 1, "depth": 2})
    with pytest.raises(ConfigError, match="missing: vocab_size, hidden_size"):
        DLiteConfig.from_dict({"rank": 8})
    with pytest.raises(ConfigError, match=r"preset must be one of .*: got 'qwen9'"):
        DLiteConfig.from_dict({"preset": "qwen9"})


def test_other_target_is_refused_with_all_differences():
    with pytest.raises(ConfigError) as caught:
        DLiteConfig.qwen3_4b().check_target(DecoderConfig.smollm2_135m())
    for part in ("vocab_size 151936 against the target's 49152", "hidden_size 2560 ", "layers 36 "):
        assert part in str(caught.value)


# What each ablation file changes against the paper's drafter of Qwen3-8B.
CHANGES = {
    "table5-taps-14": {},
    "table5-taps-20": {"num_taps": 20},
    "table5-taps-36": {"num_taps": 36},
    "table5-concat-feature": {"feature_concat": "feature"},
    "table5-rank-4096": {"rank": 4096},
    "head-lm-head": {"head_output": "lm_head"},
    "fig5b-history-128": {"draft_history": 128},
    "fig5b-history-512": {"draft_history": 512},
    "context-stream": {"context_mode": "stream"},
    "anchor-group-2": {"anchor_group_size": 2},
    "anchor-group-6": {"anchor_group_size": 6},
}


def test_ablation_files_are_all_listed():
    assert {path.stem for path in ABLATIONS} == set(CHANGES)


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
def test_ablation_files(path):
    section = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(section) == {"dlite"}
    assert DLiteConfig.from_dict(section["dlite"]) == DLiteConfig.qwen3_8b(**CHANGES[path.stem])
