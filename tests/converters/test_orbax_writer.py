"""Orbax folders that stock Orbax and recurrentgemma load, written within bounded memory."""

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

from griffin_eval.converters.containers.orbax.reader import open_orbax
from griffin_eval.converters.containers.orbax.writer import OrbaxWriter

RNG = np.random.default_rng(0)
ARRAYS = {
    "embedder/input_embedding": RNG.standard_normal((300, 7)).astype(ml_dtypes.bfloat16),
    "blocks.0/mlp/w": RNG.standard_normal((2, 5, 6)).astype(np.float32),
    "blocks.0/mlp/b": RNG.standard_normal((2, 1, 1, 6)).astype(np.float16),
    "layers/0/scale": RNG.standard_normal(9),
    "layers/10/scale": np.zeros(9, np.float32),  # zeros, with which Orbax fills absent chunks
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
    """Assert that the nested dict holds exactly these arrays, bit for bit."""
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
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "x")
        assert same(restored) and list(restored["layers"]) == ["0", "10"]
        assert restored.keys() == {name.split("/")[0] for name in ARRAYS}
        with jax.enable_x64(True):  # restored to JAX arrays on a device
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


@settings(max_examples=examples(15))
@given(
    shape=st.lists(st.integers(1, 9), max_size=4).map(tuple),
    limit=st.integers(1, 300),
    cuts=st.lists(st.integers(1, 60), max_size=12),
    order=st.sampled_from("CF"),
)
def test_any_chunks_fill_any_grid(tmp_path_factory, shape, limit, cuts, order):
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    array = np.asarray(array, order=order)
    pieces = np.split(array.reshape(-1), [c for c in np.cumsum(cuts) if c < 10**4])
    arrays = {"whole": [array], "rows": list(array) if shape else [array], "flat": pieces}
    folder = tmp_path_factory.mktemp("grid") / "x"
    with OrbaxWriter(folder, dict.fromkeys(arrays, (shape, "float32")), chunk=limit) as writer:
        for name, chunks in arrays.items():
            writer.write(name, chunks)
    with open_orbax(folder) as reader:
        for name in arrays:
            np.testing.assert_array_equal(reader.tensors[name].numpy(), array)
            assert math.prod(reader.tensors[name].grid or ()) * 4 <= max(limit, 4)


def test_wrong_use_is_refused(tmp_path):
    def fails(match, given_specs, folder="x"):
        with pytest.raises(ValueError, match=match):
            OrbaxWriter(tmp_path / folder, given_specs)

    fails(
        "'a.b/c' and 'a/b.c' under one name",
        {"a.b/c": ((1,), "float32")} | {"a/b.c": ((1,), "float32")},
    )
    fails("'a' is an array and holds others", {n: ((1,), "float32") for n in ("a", "a/b/c")})
    fails("joined by '/', found 'a//b'", {"a//b": ((1,), "float32")})
    fails("without elements: 'a'", {"a": ((3, 0), "float32")})
    write(tmp_path / "there", {"a": np.ones(2)})
    fails("holds an Orbax checkpoint already", {"a": ((2,), "float64")}, "there")


def test_a_full_disk_is_one_sentence(tmp_path):
    """A limit on the size of files simulates a full disk."""
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
elif job == "read":
    with open_orbax(folder) as reader:
        assert sum(len(piece) for piece in reader.tensors["a"].pieces()) == rows
else:
    with OrbaxWriter(folder, {"a": ((rows, 2560), "bfloat16")}) as writer:
        writer.write("a", (block for _ in range(32)))
print(peak[0] - base)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_an_embedding_of_1_3_gb(tmp_path):
    """Writing and reading an array of 1,250 MiB takes much less anonymous memory."""

    def measure(folder, job):
        run = subprocess.run(
            [sys.executable, "-c", MEASURE, str(tmp_path / folder), job],
            capture_output=True,
            text=True,
            check=True,
        )
        return float(run.stdout.splitlines()[-1])

    assert measure("ours", "written") < 400 and measure("stock", "stock") > 1250
    for folder in ("ours", "stock"):
        assert measure(folder, "read") < 500  # about 250 without other load
