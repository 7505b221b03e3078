"""What is written is a checkpoint to stock Orbax and to recurrentgemma, within bounded memory."""

import math
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import examples

from griffin_eval.converters.containers.orbax import writer
from griffin_eval.converters.containers.orbax.reader import open_orbax
from griffin_eval.converters.containers.orbax.writer import OrbaxWriter
from griffin_eval.converters.tensors import chunk_shape
from griffin_eval.errors import BadInput, MissingExtraError

RNG = np.random.default_rng(0)
ARRAYS = {
    "embedder/input_embedding": RNG.standard_normal((300, 7)).astype(ml_dtypes.bfloat16),
    "blocks.0/mlp/w": RNG.standard_normal((2, 5, 6)).astype(np.float32),
    "blocks.0/mlp/b": RNG.standard_normal((2, 1, 1, 6)).astype(np.float16),
    "layers/0/scale": RNG.standard_normal(9),
    "layers/10/scale": np.zeros(9, np.float32),  # equal to what fills absent chunks
    "odd": np.array(0x7FC1, np.uint16).view(ml_dtypes.bfloat16),  # no dimensions; NaN with payload
    "infinite": np.array([np.inf, -0.0, 5e-324]),
}


def specs(arrays):
    return {name: (array.shape, array.dtype.name) for name, array in arrays.items()}


def write(folder, arrays, prefix=""):
    arrays = {prefix + name: array for name, array in arrays.items()}
    with OrbaxWriter(folder, specs(arrays)) as writer:
        for name, array in arrays.items():
            writer.write(name, [array])
    return writer


def same(tree, arrays=ARRAYS):
    """Whether the nested dict is exactly these arrays, bit for bit."""
    for name, array in arrays.items():
        found = tree
        for key in name.split("/"):
            found = found[key]
        found = np.asarray(found)
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
        assert found.tobytes() == array.tobytes()
    return True


def test_stock_orbax_restores_it(tmp_path):
    import jax
    import orbax.checkpoint as ocp
    from orbax.checkpoint.experimental import v1

    write(tmp_path / "x", ARRAYS)
    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "x")
    assert same(restored)
    assert restored.keys() == {name.split("/")[0] for name in ARRAYS}
    assert list(restored["layers"]) == ["0", "10"]
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        assert same(checkpointer.restore(tmp_path / "x"))
    with ocp.StandardCheckpointer() as checkpointer:
        assert same(checkpointer.restore(tmp_path / "x"))
        with jax.enable_x64(True):  # as arrays of jax, on a device
            device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            target = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device), restored
            )
            on_device = checkpointer.restore(tmp_path / "x", target)
            assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(on_device))
            assert same(on_device)
    if hasattr(v1, "load"):  # from Orbax 0.12 on
        assert same(v1.load(tmp_path / "x"))


def test_it_is_an_item_of_a_step(tmp_path):
    import orbax.checkpoint as ocp

    write(tmp_path / "run" / "12000" / "default", ARRAYS, "params/")
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.latest_step() == 12000
        restored = manager.restore(12000, args=ocp.args.StandardRestore())
    assert same(restored["params"])


def test_our_reader_reads_it(tmp_path):
    write(tmp_path / "x", ARRAYS, "params/")
    with open_orbax(tmp_path / "x") as reader:
        assert reader.layout == "OCDBT, zarr, params root"
        assert reader.tensors.keys() == ARRAYS.keys() and not reader.left_out
        for name, array in ARRAYS.items():
            assert reader.tensors[name].numpy().tobytes() == array.tobytes()


@pytest.mark.slow
def test_recurrentgemma_both_ways(tmp_path, relaxed_jax):
    """Its own parameters, saved by it, read, written again, and restored by it."""
    import jax
    import orbax.checkpoint as ocp
    from flax.traverse_util import flatten_dict
    from recurrentgemma import common
    from recurrentgemma.jax import griffin, utils

    config = common.GriffinConfig(
        vocab_size=32,
        width=16,
        mlp_expanded_width=48,
        num_heads=2,
        lru_width=16,
        block_types=(
            common.TemporalBlockType.RECURRENT,
            common.TemporalBlockType.RECURRENT,
            common.TemporalBlockType.ATTENTION,
        ),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=8,
        logits_soft_cap=30.0,
    )
    model = griffin.Griffin(config, dtype=jax.numpy.float32)
    tokens = jax.numpy.arange(12)[None]
    with relaxed_jax():
        shapes = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)["params"]
    params = jax.tree.map(lambda s: 0.1 * RNG.standard_normal(s.shape).astype(s.dtype), shapes)
    utils.save_parameters(str(tmp_path / "theirs"), params)
    for prefix in ("", "params/"):
        folder = tmp_path / f"ours-{bool(prefix)}"
        with open_orbax(tmp_path / "theirs") as reader:
            shapes = {prefix + t.name: (t.shape, t.dtype) for t in reader.tensors.values()}
            with OrbaxWriter(folder, shapes) as writer:
                for name in reader.tensors:
                    writer.write(prefix + name, reader.tensors[name].pieces())
        restored = ocp.PyTreeCheckpointer().restore(folder)
        restored = restored["params"] if prefix else restored
        assert flatten_dict(restored).keys() == flatten_dict(params).keys()
        with relaxed_jax():
            apply = jax.jit(lambda p: model.apply({"params": p}, tokens, tokens)[0])
            logits = [np.asarray(apply(p)) for p in (params, restored)]
        np.testing.assert_array_equal(*logits)


@settings(max_examples=examples(30))
@given(
    shape=st.lists(st.integers(1, 9), max_size=4).map(tuple),
    limit=st.integers(1, 300),
    cuts=st.lists(st.integers(1, 60), max_size=12),
    order=st.sampled_from("CF"),
)
def test_any_chunks_fill_any_grid(tmp_path_factory, shape, limit, cuts, order):
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    array = np.asarray(array, order=order)
    grid = chunk_shape(shape, 4, limit)
    assert math.prod(grid) * 4 <= max(limit, 4)
    flat = array.reshape(-1)
    pieces = [piece.copy() for piece in np.split(flat, [c for c in np.cumsum(cuts) if c < 10**4])]
    for given_pieces in ([array], pieces, list(array) if shape else [array]):
        found = np.full(shape, np.nan, np.float32)
        for region, piece in writer._refilled(given_pieces, shape, grid, array.dtype):
            assert all(n <= c for n, c in zip(piece.shape, grid, strict=True))
            found[region] = piece
        np.testing.assert_array_equal(found, array)


def test_memory_of_chunks_may_be_used_again(tmp_path):
    array = RNG.standard_normal((1000, 3)).astype(np.float32)

    def pieces():
        buffer = np.empty((100, 3), np.float32)
        for start in range(0, 1000, 100):
            buffer[:] = array[start : start + 100]
            yield buffer
        buffer[:] = np.nan

    with OrbaxWriter(tmp_path, specs({"a": array}), chunk=64) as writer:
        writer.write("a", pieces())
    with open_orbax(tmp_path) as reader:
        assert reader.tensors["a"].numpy().tobytes() == array.tobytes()
        assert reader.tensors["a"].grid[0] < 10


def test_wrong_use_is_refused(tmp_path):
    def fails(match, given_specs):
        with pytest.raises(ValueError, match=match):
            OrbaxWriter(tmp_path / "x", given_specs)

    fails("no tensors to write", {})
    fails("expected dtypes bfloat16, .*'a' is int8", {"a": ((1,), "int8")})
    fails(
        "'a.b/c' and 'a/b.c' under one name",
        {"a.b/c": ((1,), "float32")} | {"a/b.c": ((1,), "float32")},
    )
    fails("'a' is an array and holds others", {n: ((1,), "float32") for n in ("a", "a/b/c")})
    fails("joined by '/', found 'a//b'", {"a//b": ((1,), "float32")})
    fails("without elements: 'a'", {"a": ((3, 0), "float32")})
    two = {"a": ((2, 3), "float32"), "b": ((4,), "float64")}
    ones = np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="1 tensors were never written: 'b'"):
        with OrbaxWriter(tmp_path / "missing", two) as writer:
            writer.write("a", [ones])
            with pytest.raises(ValueError, match="'a' was written before"):
                writer.write("a", [ones])
            with pytest.raises(ValueError, match="'c' is not among"):
                writer.write("c", [ones])
            with pytest.raises(ValueError, match="'b' was given chunks of float32"):
                writer.write("b", [ones])
            with pytest.raises(ValueError, match="'b' was given more elements than"):
                writer.write("b", [np.ones(3), np.ones(2)])
            with pytest.raises(ValueError, match="'b' was given fewer elements than"):
                writer.write("b", [np.ones(3)])
    assert not (tmp_path / "missing" / "_METADATA").exists()
    write(tmp_path / "there", {"a": ones})
    with pytest.raises(ValueError, match="holds an Orbax checkpoint already"):
        OrbaxWriter(tmp_path / "there", two)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="file.* cannot be written: "):
        OrbaxWriter(tmp_path / "file" / "x", two)


def test_an_exception_leaves_no_checkpoint(tmp_path):
    with pytest.raises(RuntimeError), OrbaxWriter(tmp_path, specs(ARRAYS)) as writer:
        writer.write("odd", [ARRAYS["odd"]])
        raise RuntimeError
    assert not (tmp_path / "_METADATA").exists()


def test_a_full_disk_is_one_sentence(tmp_path):
    """A limit on the size of files stands for the disk."""
    program = f"""
    import resource, signal, numpy as np
    from griffin_eval.converters.containers.orbax.writer import OrbaxWriter
    from griffin_eval.errors import BadInput
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    a = np.random.default_rng(0).integers(0, 255, 1 << 22).astype(np.float32)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        with OrbaxWriter({str(tmp_path)!r}, {{"a": (a.shape, "float32")}}) as writer:
            writer.write("a", [a])
    except BadInput as error:
        assert "cannot be written: " in str(error) and "\\n" not in str(error), error
    else:
        raise SystemExit("not refused")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)


def test_tensorstore_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'griffin-eval\[jax\]'"):
        OrbaxWriter(tmp_path, specs(ARRAYS))


MEASURE = """
import sys, threading, time
import ml_dtypes, numpy as np
from pathlib import Path

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024

def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.003)

folder, job, rows = sys.argv[1], sys.argv[2], 256000
block = (np.random.default_rng(0).standard_normal((8000, 2560)) * 0.02).astype(ml_dtypes.bfloat16)
if job == "whole":
    block = np.concatenate([block] * 32)
import tensorstore
from griffin_eval.converters.containers.orbax.reader import open_orbax
from griffin_eval.converters.containers.orbax.writer import OrbaxWriter
if job == "stock":
    import orbax.checkpoint as ocp
    tree = {"a": np.concatenate([block] * 32)}
    checkpointer = ocp.PyTreeCheckpointer()
base, peak = anonymous(), [0.0]
threading.Thread(target=watch, daemon=True).start()
if job == "stock":
    checkpointer.save(folder, tree)
elif job in ("pieces", "numpy"):
    with open_orbax(folder) as reader:
        if job == "pieces":
            assert sum(len(piece) for piece in reader.tensors["a"].pieces()) == rows
        else:
            assert reader.tensors["a"].numpy().shape == (rows, 2560)
else:
    with OrbaxWriter(folder, {"a": ((rows, 2560), "bfloat16")}) as writer:
        writer.write("a", [block] if job == "whole" else (block for _ in range(32)))
print(peak[0] - base)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_an_embedding_of_1_3_gb(tmp_path):
    """Anonymous memory above the start, in MiB; the array itself has 1250."""

    def measure(folder, job):
        run = subprocess.run(
            [sys.executable, "-c", MEASURE, str(tmp_path / folder), job],
            capture_output=True,
            text=True,
            check=True,
        )
        return float(run.stdout.splitlines()[-1])

    assert measure("streamed", "streamed") < 400 and measure("whole", "whole") < 340
    assert measure("stock", "stock") > 1250
    for folder in ("streamed", "stock"):
        assert measure(folder, "pieces") < 500  # 250 on a quiet machine
        assert measure(folder, "numpy") < 1250 + 340
