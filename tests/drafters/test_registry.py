"""Drafters by name: trained ones from folders, on the command lines and in `decode`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flax import nnx

import jdlite
from jdlite import bench, cli, generate
from jdlite.checkpoints.dlite import save_dlite
from jdlite.checkpoints.dlite_orbax import save_dlite_orbax
from jdlite.checkpoints.target import load_target
from jdlite.drafters.adapld import AdaPLD
from jdlite.drafters.dlite import DLiteDrafter
from jdlite.drafters.hybrid import Hybrid
from jdlite.drafters.registry import check_drafter, make_drafter
from jdlite.errors import CheckpointError, ConfigError, JdliteError, JdliteWarning
from jdlite.models.decoder import Decoder
from jdlite.models.dlite_config import DLiteConfig
from tests.models.dlite_models import parameters, random_model
from tests.tiny_target import save_tiny_target, tiny_model

PROMPT = [[40, 41, 42, 40, 41, 42, 40, 41]]


def network(**overrides):
    config = DLiteConfig.for_target(
        tiny_model().config, mask_token_id=257, num_taps=2, rank=4, num_layers=1, block_size=4
    )
    return random_model(DLiteConfig.from_dict({**config.to_dict(), **overrides}))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A target, and drafters in all layouts; some are of other targets."""
    home = tmp_path_factory.mktemp("home")
    save_tiny_target(home / "target")
    save_dlite(network(), home / "official")
    save_dlite_orbax(network(), home / "orbax@1")
    save_dlite(network(head_output="lm_head"), home / "lm_head")
    save_dlite(network(hidden_size=24), home / "wide")
    (home / "empty").mkdir()
    return home


@pytest.fixture(scope="module")
def target(home):
    return load_target(home / "target")


@pytest.mark.parametrize("layout", ["official", "orbax@1"])
def test_dlite_from_a_folder(home, layout):
    drafter = make_drafter(f"dlite:{home / layout},gain=constant,prior=0.5,mode=match")
    assert isinstance(drafter, DLiteDrafter)
    assert (drafter.gain, drafter.prior, drafter.mode) == ("constant", 0.5, "match")
    right = parameters(network())
    assert parameters(drafter.model).keys() == right.keys()
    for name, value in parameters(drafter.model).items():
        np.testing.assert_array_equal(value, right[name])
    assert drafter.model.dtype == np.float32
    half = make_drafter(f"dlite:{home / layout},mode=rejection", "bfloat16")
    assert isinstance(half, DLiteDrafter)
    assert half.mode == "rejection"
    assert half.model.dtype.name == "bfloat16"
    tree = make_drafter(f"dlite:{home / layout},beam=3,num_nodes=8")
    assert isinstance(tree, DLiteDrafter)
    assert (tree.beam, tree.num_nodes, tree.max_nodes) == (3, 8, 8)


def test_hybrid_from_a_folder(home):
    """Options go to whom they belong."""
    drafter = make_drafter(f"hybrid:{home / 'official'},num_nodes=16,copy_length=7,successors=never,prior=0.6,beam=3")
    assert isinstance(drafter, Hybrid)
    assert drafter.first == AdaPLD(copy_length=7, successors="never")
    assert isinstance(drafter.second, DLiteDrafter)
    assert (drafter.second.prior, drafter.second.beam, drafter.second.num_nodes) == (0.6, 3, None)
    assert drafter.max_nodes == 16
    assert make_drafter(f"hybrid:{home / 'official'}").max_nodes == 40


@pytest.mark.parametrize(
    ("kind", "folder"),
    [
        ("hybrid", "orbax@1"),
        pytest.param("dlite", "official", marks=pytest.mark.slow),
        pytest.param("dlite", "lm_head", marks=pytest.mark.slow),
        pytest.param("hybrid", "lm_head", marks=pytest.mark.slow),
    ],
)
def test_decode_by_name_gives_the_plain_text(home, target, kind, folder):
    options = {"max_new_tokens": 12, "budget": "full", "use_eos": False}
    few = ",num_nodes=4,copy_length=3,num_branches=2" if kind == "hybrid" else ""
    plain = jdlite.decode(target, PROMPT, drafter="plain", **options)
    got = jdlite.decode(target, PROMPT, drafter=f"{kind}:{home / folder}{few}", **options)
    assert got.tokens == plain.tokens
    assert got.stats.drafted.sum() > 0


BAD = {
    "no folder": ("dlite", ConfigError, "needs the folder of a saved DLite drafter; write dlite:FOLDER"),
    "options only": ("hybrid:num_nodes=3", ConfigError, "write hybrid:FOLDER, options after it"),
    "absent": ("dlite:{}/nowhere", CheckpointError, "there is no drafter folder .*nowhere"),
    "empty": ("hybrid:{}/empty", CheckpointError, "empty holds no DLite drafter: neither config.json"),
    "unknown option": ("dlite:{}/official,nodes=3", ConfigError, "does not understand 'nodes=3'; its options"),
    "misspelt": ("dlight:{}/official", ConfigError, "there is no drafter 'dlight'; did you mean 'dlite'"),
}
LATE = {
    "a target": ("dlite:{}/target", ConfigError, "config.json of a DLite drafter lacks block_size"),
    "tree of a chain": ("dlite:{}/official,num_nodes=3", ConfigError, "got 3 with a beam of 1; leave it out or give a"),
    "bad value": ("dlite:{}/official,prior=2", ConfigError, "prior must be a probability"),
    "rejection": ("hybrid:{}/official,mode=rejection", ConfigError, "exact for deterministic drafts only"),
    "adapld's value": ("hybrid:{}/empty/../official,copy_length=0", ConfigError, "copy_length of at least 1"),
    "nodes": ("hybrid:{}/official,num_nodes=many", JdliteError, "num_nodes|cannot be made"),
}


@pytest.mark.parametrize("name", [*BAD, *LATE])
def test_bad_names_are_refused_in_one_sentence(home, name):
    spec, kind, sentence = (BAD | LATE)[name]
    spec = spec.format(home)
    with pytest.raises(kind, match=sentence) as caught:
        make_drafter(spec)
    assert "\n" not in str(caught.value)
    if name in BAD:  # without reading any weights
        with pytest.raises(kind, match=sentence):
            check_drafter(spec)
    else:
        check_drafter(spec)


@pytest.mark.parametrize("kind", ["dlite", "hybrid"])
def test_drafter_of_another_target(home, target, kind):
    with pytest.raises(ConfigError, match="made for another target: hidden_size 24 against the target's 16; use the"):
        jdlite.decode(target, PROMPT, drafter=f"{kind}:{home / 'wide'}", max_new_tokens=2)


@pytest.fixture
def call(home, tmp_path, monkeypatch, capsys):
    """Runs the generate command line; returns (status, stdout, stderr)."""
    monkeypatch.setattr(cli, "use_compile_cache", lambda folder: None)

    def call(*words):
        base = ["--target", str(home / "target"), "--cache-dir", str(tmp_path), "--max-new-tokens", "8", "--raw"]
        base += ["--budget", "full", "--prompt", "la la la la"]
        return generate.main([*base, *words]), *capsys.readouterr()

    return call


def test_generate(home, call):
    _, plain, _ = call("--drafter", "plain")
    name = f"dlite:{home / 'orbax@1'},gain=constant"
    status, out, err = call("--drafter", name, "--stats")
    assert (status, out) == (0, plain)
    assert f"{name}: 8 tokens in " in err


def test_generate_refuses(home, call):
    for folder, sentence in (("nowhere", "there is no drafter folder"), ("wide", "made for another target")):
        status, out, err = call("--drafter", f"dlite:{home / folder}")
        assert (status, out) == (2, "")
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert sentence in errors[0]


@pytest.mark.slow
def test_bench(home, tmp_path):
    """Trained drafters beside others, with a path that has an @ in it."""
    rows = tmp_path / "toy.jsonl"
    rows.write_text(json.dumps({"id": "a", "tokens": PROMPT[0]}) + "\n")
    specs = f"pld,dlite:{home / 'orbax@1'}@full,hybrid:{home / 'orbax@1'},num_nodes=9"
    words = f"--target {home / 'target'} --tasks {rows} --max-new-tokens 6 --repeats 1 --budget full"
    words += f" --cache-dir {tmp_path} --json {tmp_path / 'out.json'}"
    assert bench.main([*words.split(), "--drafters", specs]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    found = result["records"][0]["points"][0]["drafters"]
    assert list(found) == ["plain", "pld", f"dlite:{home / 'orbax@1'}@full", f"hybrid:{home / 'orbax@1'},num_nodes=9"]
    assert all(each["differs_at"] == [None] for name, each in found.items() if name != "plain")
    assert bench.main([*words.split(), "--drafters", f"dlite:{home / 'wide'}"]) == 2


def test_a_drafter_of_other_weights_is_a_warning(home, target, tmp_path, recwarn, monkeypatch, capsys):
    monkeypatch.setattr(cli, "use_compile_cache", lambda folder: None)
    for name, fingerprint in (("own", target.fingerprint), ("other", "0" * 64), ("old", None)):
        info = {"target": "some/model"} | ({} if fingerprint is None else {"target_fingerprint": fingerprint})
        save_dlite_orbax(network(), tmp_path / name, info=info)
    recwarn.clear()
    for name in ("own", "old"):
        make_drafter(f"dlite:{tmp_path / name}", "float32", target)
    assert not recwarn
    with pytest.warns(JdliteWarning, match="was trained for some/model, and .* has other weights; the text will be"):
        jdlite.decode(target, PROMPT, drafter=f"hybrid:{tmp_path / 'other'}", max_new_tokens=2, budget="full")
    options = ["--target", str(home / "target"), "--drafter", f"dlite:{tmp_path / 'other'}", "--prompt", "Hi", "--raw"]
    assert generate.main([*options, "--max-new-tokens", "2", "--budget", "full", "--cache-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line.startswith("warning: the drafter in ")]
    assert not [line for line in said if ".py" in line]


def test_a_fingerprint_does_not_depend_on_the_dtype(home, target):
    half = load_target(home / "target", dtype="bfloat16")
    assert half.weights_hash != target.weights_hash
    assert half.fingerprint == target.fingerprint
    assert load_target(home / "target").fingerprint == target.fingerprint
    save_tiny_target(home / "sibling", model=Decoder(tiny_model().config, rngs=nnx.Rngs(4)))
    assert load_target(home / "sibling").fingerprint != target.fingerprint


def test_a_saved_drafter_says_nothing_of_where_it_was_saved(tmp_path):
    place = tmp_path / "somewhere"
    save_dlite_orbax(network(), place, info={"target": "some/model"})
    files = [path for path in place.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert not [path for path in files if str(tmp_path).encode() in path.read_bytes()]
