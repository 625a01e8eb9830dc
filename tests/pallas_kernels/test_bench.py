"""The benches of the operations: they run, see a wrong result, and record the best block sizes that are right."""

from __future__ import annotations

import importlib
import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import benchmark, tuning
from pallas_kernels.benchmark import Case, Operation, Setting, block_sizes_to_try, measure, tune
from pallas_kernels.tuning import Question, choose

NAMES = ("commit_cache", "low_rank_head", "tree_attention", "verify_head")
SETTING = Setting("float32", {}, (1,), (1,), (1,), repeats=1, loops=1, copy=8)


def bench(name: str) -> Operation:
    return importlib.import_module(f"pallas_kernels.{name}.bench").BENCH


@pytest.mark.parametrize("name", NAMES)
def test_smoke(name, tmp_path, capsys):
    """Every case of the tiny setting, the reference and the TPU kernel in the interpreter."""
    assert benchmark.main(bench(name), ["--smoke", "--json", str(tmp_path / "out.json")]) == 0
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["environment"] == {"device": "cpu", "platform": "cpu", "jax": jax.__version__, "smoke": True}
    copy, *rows = saved["rows"]
    assert copy["what"] == "copy"
    assert {row["backend"] for row in rows} == {"reference", "mosaic_tpu"}
    assert not [row for row in rows if "note" in row]
    assert all(row["ms"] > 0 and row["bytes"] > 0 and row["model"] == "tiny" for row in rows)
    assert all(row["off"] <= 1 for row in rows if row["backend"] == "mosaic_tpu")
    printed = capsys.readouterr().out
    assert all(row["what"] in printed for row in rows)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_near_float64(name):
    operation = bench(name)
    assert operation.error(operation.backends["reference"], "float32") < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_result_that_is_wrong_is_seen(name):
    """Each array of a result that is altered alone makes it wrong, by a number or by NaN."""
    operation = bench(name)
    case = list(operation.cases(benchmark.smoke()))[-1]
    args = case.make()
    right = operation.backends["reference"](*args)
    assert operation.off(right, right, args) == 0 or operation.off(right, right, args) < 1e-2
    leaves, tree = jax.tree.flatten(right)
    skipped = {"verify_head": len(leaves) - 1}.get(name)  # `fused` is no part of the result
    for i, leaf in enumerate(leaves):
        if i == skipped:
            continue
        altered = [~leaf] if leaf.dtype == bool else [leaf.at[(0,) * leaf.ndim].add(1)]
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            altered.append(leaf.at[(0,) * leaf.ndim].set(jnp.nan))
        for other in altered:
            wrong = jax.tree.unflatten(tree, [*leaves[:i], other, *leaves[i + 1 :]])
            assert not operation.off(wrong, right, args) <= 1, (i, leaf.shape)


@pytest.mark.parametrize("name", NAMES)
def test_floors_of_qwen3_4b(name):
    """Bytes by hand: V = 151,936, D = 2,560, R = 320, K = 7, 36 layers, 8 heads of 128, two bytes each (or int8)."""
    floors = {
        "low_rank_head": {7 * 151_936 * 320 * 2, 7 * 151_936 * (320 + 4)},
        "verify_head": {151_936 * 2560 * 2},
        "tree_attention": {2 * 8 * 128 * 2 * cached for cached in (1024, 8192, 32_768)},
        "commit_cache": {2 * 2 * 36 * 8 * 128 * 2 * path for path in (8, 16)},
    }
    cases = [case for case in bench(name).cases(benchmark.full()) if case.where["model"] == "Qwen3-4B"]
    assert {case.floor for case in cases if case.where["batch"] == 1} == floors[name]


# A toy operation: x + 1, whose kernel is wrong with blocks of 128 and cannot be compiled with those of 1,024.


def toy_kernel(x, *, block=None):
    limits, heuristic = {"block": range(128, 1025, 128)}, {"block": 512}
    block = choose(Question("toy", "mosaic_tpu", (x.dtype,), {"size": 8}, limits, heuristic), block=block)["block"]
    if block == 1024:
        raise ValueError("It does not fit.")
    return x + (2 if block == 128 else 1)


def toy(kernel=toy_kernel) -> Operation:
    return Operation(
        "toy",
        {"reference": lambda x: x + 1, "mosaic_tpu": kernel},
        lambda setting: iter([Case("", {"model": "none", "batch": 1}, 64, lambda: (jnp.arange(8.0),))]),
        lambda got, wanted, args: float(jnp.max(jnp.abs(got - wanted)) * 1e3),
        lambda call, dtype: 0.0,
    )


class TestTune:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tuning, "FOLDER", tmp_path)
        tuning.read.cache_clear()
        yield tmp_path
        tuning.read.cache_clear()

    def test_candidates(self):
        limits = {"a": range(128, 10_000, 128), "b": (1, 2, 3)}
        question = Question("toy", "x", (), {}, limits, {"a": 384, "b": 1}, lambda a, b: a * b < 2000)
        tried = block_sizes_to_try(question)
        assert tried[0] == {"a": 384, "b": 1}
        assert {t["a"] for t in tried if t["b"] == 1} == {128, 256, 384, 512, 768, 1024, 1536}
        assert {t["a"] for t in tried if t["b"] == 3} == {128, 256, 384, 512}
        assert len(tried) == len({tuple(t.items()) for t in tried})

    def test_the_quickest_that_is_right_is_recorded(self, folder):
        def timer(programs, repeats, loops):
            # The smaller the quicker: the wrong one would win.
            return {i: blocks[i] * 1e-6 for i in programs}

        blocks = [x["block"] for x in block_sizes_to_try(benchmark.question_of(toy_kernel, (jnp.arange(8.0),)))]
        assert blocks == [512, 128, 256, 1024]
        rows = {row["blocks"]["block"]: row for row in tune(toy(), SETTING, ["mosaic_tpu"], "Kind", timer)}
        assert rows[128]["note"].startswith("failed: its result is wrong")
        assert "ms" not in rows[128]
        assert rows[1024]["note"] == "cannot be taken: It does not fit."
        assert rows[256]["note"] == "best, recorded"
        (entry,) = json.loads((folder / "toy" / "tuning" / "kind.json").read_text())["entries"]
        assert entry == {
            "backend": "mosaic_tpu",
            "dtypes": ["float32"],
            "shape": {"size": 8},
            "blocks": {"block": 256},
            "microseconds": 256.0,
            "jax": jax.__version__,
        }

    def test_nothing_is_recorded_where_all_are_wrong(self, folder):
        rows = list(tune(toy(lambda x, *, block=None: toy_kernel(x, block=block) + 1), SETTING, ["mosaic_tpu"], "Kind"))
        assert all("ms" not in row for row in rows)
        assert not list(folder.rglob("*.json"))

    def test_without_a_kind_nothing_is_written(self, folder):
        rows = list(tune(toy(), SETTING, ["mosaic_tpu"], None))
        assert [row["note"] for row in rows if row.get("note", "").startswith("best")] == ["best"]
        assert not list(folder.rglob("*.json"))

    def test_a_kernel_without_block_sizes(self, folder):
        (row,) = tune(toy(lambda x: x + 1), SETTING, ["mosaic_tpu"], "Kind")
        assert row["note"] == "it has no block sizes to tune"
        assert not list(folder.rglob("*.json"))

    def test_a_cpu_is_refused(self, capsys):
        with pytest.raises(SystemExit):
            benchmark.main(toy(), ["--tune"])
        assert "nothing to tune on a CPU" in capsys.readouterr().err

    @pytest.mark.slow
    def test_smoke_of_tuning(self, folder):
        """Candidates of a real kernel are tried in the interpreter, and nothing is written."""
        arguments = ["--smoke", "--tune", "--backend", "mosaic_tpu"]
        assert benchmark.main(bench("commit_cache"), arguments) == 0
        assert not list(folder.rglob("*.json"))


class TestMeasure:
    def test_a_wrong_kernel_gets_no_time(self):
        rows = {row["backend"]: row for row in measure(toy(lambda x: x), SETTING, ["reference", "mosaic_tpu"])}
        assert rows["reference"]["ms"] > 0
        assert rows["mosaic_tpu"]["off"] == 1000
        assert rows["mosaic_tpu"]["note"].startswith("failed: its result is wrong")
        assert "ms" not in rows["mosaic_tpu"]
        assert benchmark.finish(list(rows.values()), {}) == 1

    def test_nan_is_wrong_and_leaves_the_file_json(self):
        (row,) = measure(toy(lambda x: x + jnp.nan), SETTING, ["mosaic_tpu"])
        assert row["note"].startswith("failed: its result is wrong")
        json.dumps(row, allow_nan=False)

    def test_a_refusal_is_no_failure(self):
        def refuse(x):
            raise NotImplementedError("Too wide.")

        rows = list(measure(toy(refuse), SETTING, ["reference", "mosaic_tpu", "mosaic_gpu"]))
        assert [row.get("note") for row in rows] == [None, "Too wide.", "there is none"]
        assert benchmark.finish(rows, {}) == 0

    def test_each_run_comes_after_the_one_before(self):
        """A program of n runs runs n times, with the arguments of each."""
        x = jnp.zeros(3)
        case = Case("", {}, 1, lambda: (x, jnp.float32(2)), at=lambda args, i: (args[0], args[1] + i), fed=1)
        program = benchmark.repeated(lambda x, y: (x + y,), case, case.make())
        assert program(1)[0].tolist() == [2, 2, 2]
        assert program(4)[0].tolist() == [14, 14, 14]  # 2 + 3 + 4 + 5
        assert program(1)[0].tolist() == [2, 2, 2]

    def test_the_time_of_a_run_is_what_more_runs_add(self, monkeypatch):
        medians = {("a", 1): 10.0, ("a", 5): 18.0, ("b", 1): 3.0, ("b", 5): 2.5}
        monkeypatch.setattr(
            benchmark, "medians_in_turn", lambda calls, repeats: {name: medians[name] for name in calls}
        )
        assert benchmark.seconds_per_run({"a": print, "b": print}, 3, 4) == {"a": 2.0, "b": 0.5}
