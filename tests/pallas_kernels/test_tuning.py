"""Tables of block sizes: what is read is what was written by hand, kernels take it, and nothing malformed passes."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

from jdlite.errors import ConfigError
from pallas_kernels import tuning
from pallas_kernels.commit_cache import mosaic_tpu as commit_on_tpu
from pallas_kernels.low_rank_head import mosaic_gpu as head_on_gpu
from pallas_kernels.low_rank_head import mosaic_tpu as head_on_tpu
from pallas_kernels.tree_attention import mosaic_gpu as attention_on_gpu
from pallas_kernels.tree_attention import mosaic_tpu as attention_on_tpu
from pallas_kernels.tuning import Entry, Question, choose, lookup
from pallas_kernels.verify_head import mosaic_gpu as verify_on_gpu
from pallas_kernels.verify_head import mosaic_tpu as verify_on_tpu
from tests.pallas_kernels import test_commit_cache as commit
from tests.pallas_kernels import test_low_rank_head as head
from tests.pallas_kernels import test_tree_attention as attention
from tests.pallas_kernels import test_verify_head as verify

KIND = "Some TPU v9 (lite)"
SLUG = "some-tpu-v9-lite.json"


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """An empty folder for tables, and a device of `KIND`."""
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(tuning, "device_kind", lambda: KIND)
    tuning.read.cache_clear()
    yield tmp_path
    tuning.read.cache_clear()


def entry(backend="mosaic_tpu", dtypes=("float32",), shape=None, blocks=None, **fields):
    return {
        "backend": backend,
        "dtypes": list(dtypes),
        "shape": {"size": 8} if shape is None else shape,
        "blocks": {"block": 256} if blocks is None else blocks,
        "microseconds": 12.5,
        "jax": "0.12.0",
        **fields,
    }


def write(folder, operation, /, *entries, **fields):
    """A table by hand, at the place where the documents say it is."""
    table = {"version": 1, "operation": operation, "device_kind": KIND, "entries": list(entries), **fields}
    path = folder / operation / "tuning" / SLUG
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table))
    tuning.read.cache_clear()
    return path


def question(size=8, heuristic=512, **fields):
    limits = {"block": range(128, 2049, 128)}
    return Question("op", "mosaic_tpu", (jnp.float32,), {"size": size}, limits, {"block": heuristic}, **fields)


class TestLookup:
    def test_an_entry_is_found_by_backend_dtypes_and_shape(self, tables):
        two = entry(dtypes=["bfloat16", "int8"], shape={"a": 1, "b": 2}, blocks={"x": 3, "y": 4})
        write(tables, "op", entry(), two)
        assert lookup("op", "mosaic_tpu", {"size": 8}, [jnp.float32]) == {"block": 256}
        assert lookup("op", "mosaic_tpu", {"b": 2, "a": 1}, [jnp.dtype("bfloat16"), jnp.int8]) == {"x": 3, "y": 4}
        for other in (
            ("op", "mosaic_gpu", {"size": 8}, [jnp.float32]),
            ("op", "mosaic_tpu", {"size": 9}, [jnp.float32]),
            ("op", "mosaic_tpu", {"size": 8}, [jnp.bfloat16]),
            ("other", "mosaic_tpu", {"size": 8}, [jnp.float32]),
        ):
            assert lookup(*other) == {}

    def test_a_cpu_has_no_tables(self, tables, monkeypatch):
        monkeypatch.undo()
        assert tuning.device_kind() is None
        monkeypatch.setattr(tuning, "FOLDER", tables)
        write(tables, "op", entry())
        assert lookup("op", "mosaic_tpu", {"size": 8}, [jnp.float32]) == {}

    def test_powers_of_two(self):
        assert [tuning.power_of_two(n) for n in (0, 1, 2, 3, 8, 9, 4097)] == [1, 1, 2, 4, 8, 16, 8192]


class TestChoose:
    def test_what_the_caller_names_then_the_table_then_the_heuristic(self, tables):
        assert choose(question(), block=None) == {"block": 512}
        write(tables, "op", entry())
        assert choose(question(), block=None) == {"block": 256}
        assert choose(question(size=9), block=None) == {"block": 512}
        assert choose(question(), block=384) == {"block": 384}

    @pytest.mark.parametrize("block", [100, 200, 2176])
    def test_what_the_kernel_cannot_take_is_not_used(self, tables, block):
        write(tables, "op", entry(blocks={"block": block}))
        assert choose(question(), block=None) == {"block": 512}

    def test_what_does_not_go_together_is_not_used(self, tables):
        write(tables, "op", entry())
        assert choose(question(fits=lambda block: block > 256), block=None) == {"block": 512}

    def test_a_block_size_that_the_kernel_lacks_is_an_error(self, tables):
        write(tables, "op", entry(blocks={"blok": 256}))
        with pytest.raises(ConfigError, match="op has the block sizes block, and the tuning table names blok"):
            choose(question(), block=None)


class TestKernels:
    """A table changes the blocks of each kernel."""

    @staticmethod
    def grid(function, *args):
        jaxpr = jax.make_jaxpr(lambda *args: function(*args))(*args)
        (call,) = (equation for equation in jaxpr.eqns if equation.primitive.name == "pallas_call")
        return call.params["grid_mapping"].grid

    def test_low_rank_head(self, tables):
        args = head.make(V=600, R=24, B=3, K=4)
        assert self.grid(head_on_tpu.low_rank_head, *args) == (4, 1)
        shape = {"rows": 8, "vocab": 600, "rank": 24, "sampled": 0}
        write(tables, "low_rank_head", entry(dtypes=["float32"] * 2, shape=shape))
        assert self.grid(head_on_tpu.low_rank_head, *args) == (4, 3)
        assert self.grid(lambda *args: head_on_tpu.low_rank_head(*args, block=128), *args) == (4, 5)
        drawn = {"keys": head.draw_keys(3, 4), "temperature": jnp.ones(3)}
        assert self.grid(lambda *args: head_on_tpu.low_rank_head(*args, **drawn), *args) == (4, 1)

    def test_tree_attention(self, tables):
        args = attention.make([3, 290], G=4, repeats=2)
        assert self.grid(attention_on_tpu.tree_attention, *args)[:2] == (2, 1)
        shape = {"rows": 2, "kv_heads": 4, "queries": 32, "capacity": 512, "head_dim": 64}
        table = entry(dtypes=["float32"] * 2, shape=shape, blocks={"heads": 2, "block": 128})
        write(tables, "tree_attention", table)
        assert self.grid(attention_on_tpu.tree_attention, *args)[:2] == (2, 2)
        # Three heads of four cannot be.
        write(tables, "tree_attention", table | {"blocks": {"heads": 3, "block": 128}})
        assert self.grid(attention_on_tpu.tree_attention, *args)[:2] == (2, 1)

    def test_commit_cache(self, tables):
        args = commit.make([3, 0], [20, 17], S=64, P=20, N=24)
        assert self.grid(commit_on_tpu.commit_cache, *args) == (2, 2, 4)
        table = entry(shape={"kv_heads": 2, "head_dim": 8, "nodes": 32, "path": 32}, blocks={"block": 16})
        write(tables, "commit_cache", table)
        assert self.grid(commit_on_tpu.commit_cache, *args) == (2, 2, 3)
        # No divisor of the capacity.
        write(tables, "commit_cache", table | {"blocks": {"block": 24}})
        assert self.grid(commit_on_tpu.commit_cache, *args) == (2, 2, 4)

    def test_verify_head(self, tables):
        case = verify.make(V=300)
        call = lambda: verify_on_tpu.verify_head(*case.args, 0, 5)  # noqa: E731
        assert self.grid(call) == (1, 1)
        shape = {"nodes": 32, "vocab": 300, "width": 24, "row_major": 0, "sampled": 0, "listed": 0}
        write(tables, "verify_head", entry(shape=shape, blocks={"block": 128}))
        assert self.grid(call) == (1, 3)

    def test_low_rank_head_on_hopper(self, tables, monkeypatch):
        given = []

        def sweep(u, output, scale, words, heat, *, blocks, **options):
            given.append(blocks)
            raise NotImplementedError("seen")

        monkeypatch.setattr(head_on_gpu, "require_mosaic_gpu", lambda: None)
        monkeypatch.setattr(head_on_gpu, "_sweep", sweep)
        args = head.make(R=64, dtype=jnp.bfloat16)
        shape = {"rows": 8, "vocab": 300, "rank": 64, "sampled": 0}
        for table in (None, entry("mosaic_gpu", ["bfloat16"] * 2, shape, {"blocks": 66})):
            if table:
                write(tables, "low_rank_head", table)
            with pytest.raises(NotImplementedError, match="seen"):
                head_on_gpu.low_rank_head(*args)
        assert given == [132, 66]

    def test_verify_head_on_hopper(self, tables, monkeypatch):
        given = []

        def sweep(hidden, weight, words, heat, *, parts, **options):
            given.append(parts)
            raise NotImplementedError("seen")

        monkeypatch.setattr(verify_on_gpu, "require_mosaic_gpu", lambda: None)
        monkeypatch.setattr(verify_on_gpu, "_sweep", sweep)
        case = verify.make(V=1000, D=64, B=3, N=7, dtype=jnp.bfloat16)
        shape = {"nodes": 32, "vocab": 1000, "width": 64, "sampled": 0, "listed": 0}
        for parts in (None, 3, 9):  # 8 tiles of 128 ids cannot be shared by 9
            if parts:
                table = entry("mosaic_gpu", ["bfloat16"], shape, {"parts": parts})
                write(tables, "verify_head", table)
            with pytest.raises(NotImplementedError, match="seen"):
                verify_on_gpu.verify_head(*case.args, 0, 7)
        assert given == [8, 3, 8]

    def test_tree_attention_on_hopper(self, tables, monkeypatch):
        given = []

        def kernel(body, out_type, **options):
            given.append(out_type[0].shape[2])
            raise NotImplementedError("seen")

        monkeypatch.setattr(attention_on_gpu, "require_mosaic_gpu", lambda: None)
        monkeypatch.setattr(attention_on_gpu.plgpu, "kernel", kernel)
        args = attention.make([300], S=1024)
        shape = {"rows": 1, "kv_heads": 2, "queries": 16, "capacity": 1024, "head_dim": 64}
        for splits in (None, 7, 17):  # 16 tiles of 64 slots cannot be shared by 17
            if splits:
                table = entry("mosaic_gpu", ["float32"] * 2, shape, {"splits": splits})
                write(tables, "tree_attention", table)
            with pytest.raises(NotImplementedError, match="seen"):
                attention_on_gpu.tree_attention(*args)
        assert given == [4, 7, 4]


class TestFiles:
    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("{", "Expecting property name"),
            ("[]", "the file is no object"),
            ('{"version": 1}', "the file has the fields version and not device_kind, entries, operation, version"),
        ],
    )
    def test_no_table(self, tables, text, reason):
        path = write(tables, "op")
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"{SLUG} is malformed: {reason}.*pallas_kernels.op.bench --tune"):
            choose(question(), block=None)

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"version": 2}, "version is 2 and not 1"),
            ({"version": True}, "version is True and not 1"),
            ({"operation": "other"}, "operation is 'other' and not 'op'"),
            ({"device_kind": "Some TPU v9 lite"}, "device_kind is 'Some TPU v9 lite' and not"),
            ({"entries": {}}, "entries is no list"),
            ({"entries": [3]}, "entry 0 is no object"),
            ({"entries": [entry(), entry()]}, "two entries are for the same"),
            ({"entries": [entry(more=1)]}, "entry 0 has the fields .*more"),
            ({"entries": [entry(backend="")]}, "backend of entry 0 is no name: ''"),
            ({"entries": [entry(jax=12)]}, "jax of entry 0 is no name: 12"),
            ({"entries": [entry(dtypes=())]}, "dtypes of entry 0 are no list of names"),
            ({"entries": [entry(shape={"size": -1})]}, "shape of entry 0 are no whole numbers from 0"),
            ({"entries": [entry(shape={"size": True})]}, "shape of entry 0 are no whole numbers from 0"),
            ({"entries": [entry(blocks={})]}, "blocks of entry 0 are no whole numbers from 1"),
            ({"entries": [entry(blocks={"block": 128.0})]}, "blocks of entry 0 are no whole numbers from 1"),
            ({"entries": [entry(blocks={"block": 0})]}, "blocks of entry 0 are no whole numbers from 1"),
            ({"entries": [entry(microseconds=0)]}, "microseconds of entry 0 are no positive number: 0"),
            ({"entries": [entry(microseconds=float("nan"))]}, "microseconds of entry 0 are no positive number: nan"),
        ],
    )
    def test_malformed(self, tables, fields, reason):
        write(tables, "op", **fields)
        with pytest.raises(ConfigError, match=f"malformed: {reason}"):
            lookup("op", "mosaic_tpu", {"size": 8}, [jnp.float32])

    def test_what_is_recorded_is_found_and_the_rest_stays(self, tables):
        path = write(tables, "op", entry(), entry(shape={"size": 9}))
        new = Entry("mosaic_tpu", ("float32",), {"size": 9}, {"block": 1024}, 3.5, "0.12.1")
        assert tuning.record("op", KIND, [new]) == path
        assert lookup("op", "mosaic_tpu", {"size": 8}, [jnp.float32]) == {"block": 256}
        assert lookup("op", "mosaic_tpu", {"size": 9}, [jnp.float32]) == {"block": 1024}
        written = entry(shape={"size": 9}, blocks={"block": 1024}, microseconds=3.5, jax="0.12.1")
        assert json.loads(path.read_text())["entries"] == [entry(), written]
        assert [file.name for file in path.parent.iterdir()] == [SLUG]

    def test_a_malformed_table_is_left_alone(self, tables):
        path = write(tables, "op", version=3)
        before = path.read_text()
        with pytest.raises(ConfigError, match="malformed"):
            tuning.record("op", KIND, [Entry("mosaic_tpu", ("float32",), {"size": 9}, {"block": 128}, 1.0, "0.12")])
        assert path.read_text() == before

    def test_a_wrong_entry_is_not_recorded(self, tables):
        with pytest.raises(ConfigError, match=r"cannot be recorded in .*: microseconds of entry 0"):
            tuning.record("op", KIND, [Entry("mosaic_tpu", ("float32",), {"size": 9}, {"block": 128}, 0.0, "0.12")])
        assert not list(tables.rglob("*.json"))

    def test_those_that_are_shipped_are_well_formed(self):
        for path in tuning.FOLDER.glob("*/tuning/*.json"):
            table = json.loads(path.read_text(encoding="utf-8"))
            assert tuning.table_path(table["operation"], table["device_kind"]) == path
            assert tuning.read(path, table["operation"], table["device_kind"])
