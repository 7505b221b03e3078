"""Orbax chunks on the grid of a mesh, with which each device reads only its own bytes."""

import dataclasses
import json
import math
import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
from commands import griffin_eval
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import BASE
from slow import examples
from tiny_checkpoints import write_griffin

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.containers.orbax.remote import tensorstore
from griffin_eval.converters.containers.orbax.writer import OrbaxWriter
from griffin_eval.converters.tensors import part_chunks
from griffin_eval.errors import BadInput
from griffin_eval.layout import param_specs
from griffin_eval.sharding.split import split_over

# Local attention only, and as many gate blocks as heads: every format can store this model.
CONFIG = dataclasses.replace(BASE, vocab_size=64, num_heads=4, gate_blocks=4)
WIDE = dataclasses.replace(CONFIG, vocab_size=8192, width=512, lru_width=512, mlp_width=2048)


@settings(max_examples=examples(30))
@given(st.data(), st.integers(1, 4), st.sampled_from([2, 4]))
def test_no_chunk_lies_in_two_parts_and_what_is_written_at_once_is_small(data, rank, item_size):
    parts = tuple(data.draw(st.integers(1, 4)) for _ in range(rank))
    shape = tuple(count * data.draw(st.integers(1, 12)) for count in parts)
    limit = data.draw(st.integers(item_size, 4000))
    chunk = part_chunks(shape, parts, item_size, limit)
    for size, n, count in zip(chunk, shape, parts, strict=True):
        assert (n // count) % size == 0
    first = next((axis for axis, size in enumerate(chunk) if size > 1), 0)
    beside = chunk[first] * math.prod(shape[first + 1 :]) * item_size
    assert beside <= limit or chunk[first] == 1


def database(folder):
    base = {"driver": "file", "path": f"{folder}/"}
    return tensorstore().KvStore.open({"driver": "ocdbt", "base": base}).result()


def chunks_of(folder, name: str) -> tuple[int, ...]:
    metadata = database(folder)[f"{name.replace('/', '.')}/.zarray"]
    return tuple(json.loads(metadata)["chunks"])


@pytest.mark.parametrize("limit", [100, 1 << 20])
def test_arrays_are_written_whole(tmp_path, limit):
    arrays = {
        "columns": (np.arange(24 * 16, dtype=np.float32).reshape(24, 16), (1, 4)),
        "rows": (np.arange(24 * 16, dtype=np.float32).reshape(24, 16), (4, 1)),
        "both": (np.arange(2 * 6 * 8, dtype=np.float32).reshape(2, 6, 8), (2, 3, 2)),
        "plain": (np.arange(5, dtype=np.float32), (1,)),
    }
    specs = {name: (a.shape, "float32") for name, (a, _) in arrays.items()}
    parts = {name: counts for name, (_, counts) in arrays.items()}
    with OrbaxWriter(tmp_path / "out", specs, chunk=limit, parts=parts) as writer:
        for name, (a, _) in arrays.items():
            writer.write(name, np.array_split(a, 3))
    import orbax.checkpoint as ocp

    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "out")
    for name, (a, counts) in arrays.items():
        np.testing.assert_array_equal(restored[name], a)
        for size, n, count in zip(chunks_of(tmp_path / "out", name), a.shape, counts, strict=True):
            assert (n // count) % size == 0


@pytest.fixture
def source(tmp_path):
    return write_griffin(tmp_path / "source", CONFIG)


# Stock Orbax in one of two processes with two devices each. `rchar` counts the bytes that system
# calls read; nearly all of them come from the files of the arrays.
SHARED = """
import re, sys
import jax, numpy as np, orbax.checkpoint as ocp
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.layout import param_specs
from griffin_eval.sharding.mesh_jax import make_mesh, param_sharding
from griffin_eval.sharding.split import split_over

folder, port, rank = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("127.0.0.1:" + port, 2, int(rank))
config = Checkpoint(folder).config
mesh, split, tree = make_mesh(jax.devices()), split_over(config, 4), {}
for name, spec in param_specs(config).items():
    at = tree
    *path, last = name.split(".")
    for key in path:
        at = at.setdefault(key, {})
    where = param_sharding(mesh, split, spec)
    at[last] = jax.ShapeDtypeStruct(spec.shape, np.float32, sharding=where)

def read():
    return int(re.search(r"rchar: (\\d+)", open("/proc/self/io").read())[1])

restore = ocp.args.PyTreeRestore(
    item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree)
)
checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
before = read()
found = jax.block_until_ready(checkpointer.restore(folder, args=restore))
nbytes = read() - before
print(f"read {nbytes} bytes")
for name in param_specs(config):
    at = found
    for key in name.split("."):
        at = at[key]
    for shard in at.addressable_shards:
        np.testing.assert_array_equal(shard.data, Checkpoint(folder).numpy(name)[shard.index])
"""


def stored_bytes(folder, ranks) -> int:
    """Return the stored bytes of all chunks that overlap the parts of these ranks (of four)."""
    store, split, total = database(folder), split_over(WIDE, 4), 0
    for name, spec in param_specs(WIDE).items():
        chunk = chunks_of(folder, name)
        held = np.zeros([-(-n // size) for n, size in zip(spec.shape, chunk, strict=True)], bool)
        for rank in ranks:
            part = (
                cut.indices(n) for cut, n in zip(split.part(spec, rank), spec.shape, strict=True)
            )
            held[
                tuple(slice(a // n, -(-b // n)) for (a, b, _), n in zip(part, chunk, strict=True))
            ] = True
        for index in np.argwhere(held):
            total += len(store[f"{name}/{'.'.join(map(str, index))}"])
    return total


def read_by_processes(folder) -> list[int]:
    """Return how many bytes each of two processes reads to restore its two devices' parts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARED, folder, port, rank],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"XLA_FLAGS": flags},
        )
        for rank in ("0", "1")
    ]
    said = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [int(re.findall(r"read (\d+) bytes", words)[0]) for words in said]  # gloo prints, too


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hosts_read_their_own_bytes_and_no_more(tmp_path):
    """Without chunks on the mesh's grid, each host reads nearly the whole checkpoint."""
    write_griffin(tmp_path / "source", WIDE)
    read = {}
    for name, options in (("rows", ()), ("grid", ("--chunks", "model=4"))):
        convert = "convert", tmp_path / "source", tmp_path / name, "--to", "griffin-orbax"
        done = griffin_eval(*convert, *options)
        assert done.returncode == 0, done.stderr
        read[name] = read_by_processes(tmp_path / name)
    own = [stored_bytes(tmp_path / "grid", ranks) for ranks in ((0, 1), (2, 3))]
    amplified = {name: np.divide(found, own) for name, found in read.items()}
    assert (amplified["grid"] >= 1).all() and (amplified["grid"] <= 1.05).all()
    assert (amplified["rows"] > 1.9).all()


@pytest.mark.parametrize("target", ["deepmind-flax", "griffin-orbax"])
def test_each_device_reads_its_own_chunks(source, tmp_path, target):
    out = tmp_path / "out"
    done = griffin_eval("convert", source, out, "--to", target, "--chunks", "model=4,data=2")
    assert done.returncode == 0, done.stderr
    done = griffin_eval("verify", source, out)
    assert done.returncode == 0, done.stdout + done.stderr
    split, axes = split_over(CONFIG, 4), {"model": 4, "data": 2, None: 1}
    if target == "griffin-orbax":
        for name, spec in param_specs(CONFIG).items():
            counts = [axes[axis] for axis in split.axes_in_training(spec, 2)]
            chunks = chunks_of(out, name.replace(".", "/"))
            for size, n, count in zip(chunks, spec.shape, counts, strict=True):
                assert (n // count) % size == 0, name


@pytest.mark.parametrize(
    ("target", "chunks", "sentence"),
    [
        ("hf", "model=4", "--chunks is for formats in chunks"),
        ("griffin-orbax", "x=4", "--chunks 'x=4': expected sizes of the axes data and model"),
    ],
)
def test_what_cannot_be_is_one_sentence(source, tmp_path, target, chunks, sentence):
    done = griffin_eval("convert", source, tmp_path / "out", "--to", target, "--chunks", chunks)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert sentence in done.stderr and not (tmp_path / "out").exists()


def parts_of(folder, devices: int):
    """Return the parts of every parameter by name and device rank, and the open checkpoint."""
    checkpoint = Checkpoint(folder)
    split = split_over(checkpoint.config, devices)
    found = {}
    for name, spec in param_specs(checkpoint.config).items():
        for rank in range(devices):
            found[name, rank] = checkpoint.parts(name).numpy(split.part(spec, rank))
    return found, checkpoint


def test_no_flipped_bit_goes_into_a_part(source, tmp_path):
    out, draw, noticed = tmp_path / "out", np.random.default_rng(0), 0
    done = griffin_eval("convert", source, out, "--to", "griffin-orbax", "--chunks", "model=4")
    assert done.returncode == 0, done.stderr
    whole, checkpoint = parts_of(out, 4)
    assert checkpoint.parts_read == checkpoint.parts_checked > 0
    original = Checkpoint(source)
    split = split_over(CONFIG, 4)
    for (name, rank), part in whole.items():
        spec = param_specs(CONFIG)[name]
        np.testing.assert_array_equal(part, original.numpy(name)[split.part(spec, rank)])
    files = [path for path in sorted(out.rglob("d/*")) if path.is_file()]
    sizes = np.array([path.stat().st_size for path in files])
    for flips in range(200):  # many flips hit bytes that no part uses
        if noticed == 3 and flips >= 10:
            break
        path = files[draw.choice(len(files), p=sizes / sizes.sum())]
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[draw.integers(len(content))] ^= 1 << draw.integers(8)
        path.write_bytes(flipped)
        try:
            found, _ = parts_of(out, 4)
        except BadInput:
            noticed += 1
        else:
            for key, part in found.items():
                np.testing.assert_array_equal(part, whole[key])
        path.write_bytes(content)
    assert noticed >= 3


def test_parts_of_chunks_are_not_checked_and_the_log_says_so(source, tmp_path, caplog):
    out = tmp_path / "out"
    assert griffin_eval("convert", source, out, "--to", "griffin").returncode == 0
    caplog.set_level("INFO")
    _, checkpoint = parts_of(out, 4)
    assert 0 < checkpoint.parts_checked < checkpoint.parts_read  # norms are read whole
    checkpoint.log_parts()
    unchecked = 1 - checkpoint.parts_checked / checkpoint.parts_read
    assert f"{100 * unchecked:.0f}% of the weights that this process reads" in caplog.text
