"""Folders of Orbax, flax and recurrentgemma, read without them; damaged folders are refused."""

import itertools
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from griffin_eval.converters.containers.orbax import store, stream
from griffin_eval.converters.containers.orbax.find import looks_like_orbax
from griffin_eval.converters.containers.orbax.reader import open_orbax
from griffin_eval.converters.containers.orbax.writer import OrbaxWriter
from griffin_eval.converters.source.steps import steps_of
from griffin_eval.errors import ArgumentError, CheckpointError, MissingExtraError

RNG = np.random.default_rng(0)
PARAMS = {
    "embedder": {"input_embedding": RNG.standard_normal((96, 8)).astype(ml_dtypes.bfloat16)},
    "blocks.0": {
        "w": RNG.standard_normal((2, 5, 6)).astype(np.float32),
        "b": RNG.standard_normal((2, 1, 1, 6)).astype(np.float16),
    },
    "blocks.10": {"scale": RNG.standard_normal(8).astype(np.float32)},
    "blocks.2": {"scale": RNG.standard_normal(8).astype(np.float32)},
}
OTHER = {"step": np.int32(7), "rng": np.array([1, 2], np.uint32)}


def flat(tree, prefix=()):
    """Return the leaves of a tree by their keys joined with "/"."""
    items = enumerate(tree) if isinstance(tree, list | tuple) else tree.items()
    found = {}
    for key, value in items:
        keys = (*prefix, str(key))
        if isinstance(value, dict | list | tuple):
            found |= flat(value, keys)
        else:
            found["/".join(keys)] = np.asarray(value)
    return found


def check(folder, expected=PARAMS, *, item=None):
    """Assert that every way of reading the folder gives exactly these arrays, bit for bit."""
    reader = open_orbax(folder, item=item)
    wanted = flat(expected)
    assert reader.tensors.keys() == wanted.keys()
    for name, array in wanted.items():
        info = reader.tensors[name]
        assert (info.shape, info.dtype) == (array.shape, array.dtype.name)
        assert info.nbytes == array.nbytes
        found = reader.tensors[name].numpy()
        assert found.dtype == array.dtype and found.tobytes() == array.tobytes()
        pieces = list(reader.tensors[name].pieces())
        assert b"".join(piece.tobytes() for piece in pieces) == array.tobytes()
        if array.ndim:
            middle = reader.tensors[name].rows(1, 3)
            assert middle.tobytes() == array[1:3].tobytes()
    return reader


def save(folder, tree, **options):
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(**options)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(Path(folder).absolute(), tree)
    return folder


LAYOUTS = {
    "OCDBT, zarr": {},
    "a folder per array, zarr": {"use_ocdbt": False},
    "OCDBT, zarr3": {"use_zarr3": True},
    "a folder per array, zarr3": {"use_ocdbt": False, "use_zarr3": True},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save JAX and numpy arrays under ``params``, beside other keys, in a folder per layout."""
    import jax

    root = tmp_path_factory.mktemp("saved")
    tree = {"params": dict(PARAMS), "name": "a", "nothing": None, "empty": {}, **OTHER}
    tree["params"]["blocks.10"] = jax.tree.map(jax.numpy.asarray, PARAMS["blocks.10"])
    return {
        layout: save(root / str(i), tree, **options)
        for i, (layout, options) in enumerate(LAYOUTS.items())
    }


@pytest.mark.parametrize("streamed", [False, True, "no pyarrow"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(saved, layout, streamed, monkeypatch):
    if streamed:  # the way that large chunks are read
        monkeypatch.setattr(store, "_STREAMED", 0)
    if streamed == "no pyarrow":
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    elif streamed:
        opened = []
        monkeypatch.setattr(
            stream.ChunkStream,
            "_open",
            lambda *a, real=stream.ChunkStream._open: opened.append(a) or real(*a),
        )
    assert looks_like_orbax(saved[layout])
    reader = check(saved[layout])
    assert reader.layout == f"{layout}, params root"
    assert reader.left_out == {
        "name": "string",
        "nothing": "empty",
        "empty": "empty",
        "step": reader.left_out["step"],
        "rng": "uint32, state of random numbers",
    }
    if streamed is True and not layout.startswith("OCDBT"):  # OCDBT stores small values in its tree
        assert opened


def test_deepmind_s_two_layouts(tmp_path):
    """Released folders have no root key, but recurrentgemma's save_parameters writes one."""
    from recurrentgemma.jax import utils

    utils.save_parameters(str(tmp_path / "rooted"), PARAMS)
    assert check(tmp_path / "rooted").root == "params"
    assert check(save(tmp_path / "flat", PARAMS)).root == ""


def test_names_are_in_natural_order_and_numbers_are_strings(tmp_path):
    tree = {"layers": [np.ones(1, np.float32)] * 12, "int": {3: np.ones(1), 11: np.ones(2)}}
    reader = check(save(tmp_path / "x", tree), tree)
    expected = ["int/3", "int/11", *(f"layers/{i}" for i in range(12))]
    assert list(reader.tensors) == expected


def test_values_of_nnx_are_stripped(tmp_path):
    import orbax.checkpoint as ocp
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    model = Model(nnx.Rngs(0))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(model))
    pure = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    reader = check(tmp_path / "state", pure)
    assert set(reader.tensors) == {f"layers/{i}/{n}" for i in (0, 1) for n in ("kernel", "bias")}
    assert {key.split("/")[0] for key in reader.left_out} == {"dropout"}


@pytest.fixture(scope="module")
def train_state():
    import jax
    import optax
    from flax.training.train_state import TrainState

    params = jax.tree.map(jax.numpy.asarray, PARAMS)
    with jax.numpy_dtype_promotion("standard"):
        return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))


def test_steps_of_a_trainer(tmp_path, train_state):
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step in (900, 12000):
            state = train_state.replace(step=step)
            manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    reader = check(tmp_path / "run")
    assert reader.layout == "OCDBT, zarr, params root, step 12000, item default"
    reasons = {key: why for key, why in reader.left_out.items() if key.startswith("opt_state")}
    assert len(reasons) > 8 and set(reasons.values()) == {"state of an optimizer"}
    assert reader.left_out.keys() - reasons.keys() == {"step"}
    assert "step 900" in check(tmp_path / "run" / "900").layout
    assert "item" not in check(tmp_path / "run" / "900" / "default").layout
    check(tmp_path / "run", item="default")
    check(tmp_path / "run", item="default/params")
    zeros = {key: {k: np.zeros_like(v) for k, v in group.items()} for key, group in PARAMS.items()}
    mu = check(tmp_path / "run", zeros, item="opt_state/0/mu")
    assert mu.left_out["params/blocks.2/scale"] == "not in opt_state/0/mu"

    # An interrupted save does not count as the latest step.
    (tmp_path / "run" / "13000.orbax-checkpoint-tmp").mkdir()
    shutil.copytree(tmp_path / "run" / "12000", tmp_path / "run" / "14000")
    metadata = tmp_path / "run" / "14000" / "_CHECKPOINT_METADATA"
    raw = json.loads(metadata.read_text()) | {"commit_timestamp_nsecs": None}
    metadata.write_text(json.dumps(raw))
    reader = check(tmp_path / "run")
    assert "step 12000, unfinished: 14000" in reader.layout


LEFTOVERS = (
    "9.orbax-checkpoint-tmp-1712345678901234",  # the number after "tmp" is a timestamp
    "3.orbax-checkpoint-tmp-1712345678901234",
    "step_9.orbax-checkpoint-tmp-1712345678901234",
    "9.orbax-checkpoint-tmp",
    "9.orbax-tmp-1712345678901234",
    "tmp-checkpoint-9",  # name in transformers 4.36 and 4.37
    "tmp_9",
)


@pytest.fixture(scope="module")
def unmarked_run(tmp_path_factory):
    """Write a run as releases of Orbax did that marked no step as finished."""
    import orbax.checkpoint as ocp

    root = tmp_path_factory.mktemp("run")
    ocp.PyTreeCheckpointer().save(root / "7", {"params": PARAMS})
    for name in ("_CHECKPOINT_METADATA", "commit_success.txt"):
        (root / "7" / name).unlink(missing_ok=True)
    return root


@pytest.mark.parametrize("name", LEFTOVERS)
def test_what_a_save_that_was_cut_off_left_is_no_step(tmp_path, unmarked_run, name):
    import orbax.checkpoint as ocp

    run = shutil.copytree(unmarked_run, tmp_path / "run")
    leftover = shutil.copytree(run / "7", run / name)
    assert "step 7" in check(run).layout
    assert ocp.CheckpointManager(run).latest_step() == 7 or name.startswith("tmp")
    assert steps_of(run) == {7: run / "7"}
    (leftover / "manifest.ocdbt").unlink()  # processes wrote their parts, but never merged them
    assert "step 7" in check(run).layout
    assert steps_of(run) == {7: run / "7"}
    shutil.rmtree(run / "7")
    assert not steps_of(run)
    if "orbax" in name:
        said = f"{run} holds no finished step, only {name}, left by saves that were cut off"
        with pytest.raises(CheckpointError, match=re.escape(said)):
            open_orbax(run)
        assert looks_like_orbax(run)
        with pytest.raises(CheckpointError, match="is a save that was cut off"):
            open_orbax(leftover)


def test_a_step_without_the_file_that_marks_an_earlier_one_as_finished(tmp_path, unmarked_run):
    """Orbax marks finished steps by commit_success.txt in stores that cannot rename folders."""
    run = shutil.copytree(unmarked_run, tmp_path / "run")
    shutil.copytree(run / "7", run / "9")
    assert "step 9" in check(run).layout
    (run / "7" / "commit_success.txt").write_text("")
    reader = check(run)
    assert "step 7" in reader.layout and "unfinished: 9" in reader.layout
    assert list(steps_of(run)) == [7]
    check(run / "9")  # an explicit path is read nevertheless
    (run / "9" / "commit_success.txt").write_text("")
    assert "step 9" in check(run).layout and list(steps_of(run)) == [7, 9]
    (run / "7" / "commit_success.txt").unlink()  # step of an older release
    assert "step 9" in check(run).layout and list(steps_of(run)) == [7, 9]
    (run / "9" / "commit_success.txt").rename(run / "7" / "commit_success.txt")
    with OrbaxWriter(run / "11", {"a": ((2,), "float32")}) as writer:
        writer.write("a", [np.ones(2, np.float32)])
    assert "step 11" in open_orbax(run).layout and list(steps_of(run)) == [7, 11]


def test_copies_of_steps_are_not_the_latest_step(tmp_path, unmarked_run):
    run = shutil.copytree(unmarked_run, tmp_path / "run")
    shutil.copytree(run / "7", run / "backup_20260102")
    assert "step 7" in check(run).layout and list(steps_of(run)) == [7]
    check(run / "backup_20260102")
    (run / "7").rename(run / "step_7")
    assert list(steps_of(run)) == [7, 20260102]


def test_a_path_with_two_dots(tmp_path, monkeypatch):
    """tensorstore refuses paths with two dots, so they are resolved first."""
    save(tmp_path / "run" / "7" / "default", PARAMS)
    (tmp_path / "aside").mkdir()
    assert "step 7" in check(tmp_path / "aside" / ".." / "run").layout
    assert "step 7" in check(tmp_path / "run" / "7" / "default" / "..").layout
    monkeypatch.chdir(tmp_path / "aside")
    check("../run/7/default")
    (tmp_path / "link").symlink_to(tmp_path / "run" / "7", target_is_directory=True)
    check("../link/../7")  # the parent of the link's target
    monkeypatch.chdir(tmp_path / "run" / "7")
    assert "step 7" in check(".").layout


def test_items_are_chosen(tmp_path):
    import orbax.checkpoint as ocp

    doubled = {key: {k: v + v for k, v in group.items()} for key, group in PARAMS.items()}
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(
            3,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(PARAMS),
                state=ocp.args.StandardSave({"ema_params": doubled, "params": PARAMS}),
                opt_state=ocp.args.StandardSave({"mu": PARAMS}),
                meta=ocp.args.JsonSave({"a": 1}),
            ),
        )
        manager.wait_until_finished()
    with pytest.raises(ArgumentError, match="several items; choose one: item=params; item=state"):
        open_orbax(tmp_path / "run")
    reader = check(tmp_path / "run", item="params")
    assert reader.left_out["item opt_state"] == "another item"
    check(tmp_path / "run", doubled, item="state/ema_params")
    check(tmp_path / "run/3/state", doubled, item="ema_params")
    with pytest.raises(ArgumentError, match="item=state/ema_params; item=state/params$"):
        open_orbax(tmp_path / "run", item="state")
    with pytest.raises(ArgumentError, match="choose one: item=ema_params; item=params$"):
        open_orbax(tmp_path / "run/3/state")
    with pytest.raises(ArgumentError, match=r"no item 'parms' \(did you mean 'params'\?\)"):
        open_orbax(tmp_path / "run", item="parms")
    with pytest.raises(ArgumentError, match="expected one of ema_params; params$"):
        open_orbax(tmp_path / "run", item="state/nothing")


def test_averages_beside_an_item_of_unknown_name_are_not_chosen(tmp_path):
    for name, item in (("one", "weights"), ("one", "ema"), ("two", "state"), ("two", "ema_params")):
        save(tmp_path / name / "3" / item, PARAMS)
    with pytest.raises(ArgumentError, match="several items; choose one: item=ema; item=weights$"):
        open_orbax(tmp_path / "one")
    check(tmp_path / "one", item="weights")
    with pytest.raises(ArgumentError, match="choose one: item=ema_params; item=state$"):
        open_orbax(tmp_path / "two")


def test_version_1_of_the_interface(tmp_path):
    from orbax.checkpoint.experimental import v1

    if not hasattr(v1, "save"):
        pytest.skip("from Orbax 0.12 on")
    v1.save(tmp_path / "one", {"params": PARAMS, "step": 7})
    assert "zarr3, params root, item " in check(tmp_path / "one").layout
    with v1.training.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(5, PARAMS)
    assert "step 5" in check(tmp_path / "run").layout


@pytest.mark.ci
def test_parts_of_several_hosts(tmp_path):
    """Two processes with two devices each save a step, as a trainer on several hosts does."""
    program = f"""
    import sys, jax, numpy as np, orbax.checkpoint as ocp
    from jax.sharding import NamedSharding, PartitionSpec as P
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize("127.0.0.1:" + sys.argv[2], 2, int(sys.argv[1]))
    mesh = jax.make_mesh((4,), ("x",))
    a = np.random.default_rng(0).standard_normal((64, 99), np.float32)
    def put(*spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(a.shape, sharding, lambda index: a[index])
    tree = {{"params": {{"rows": put("x"), "copies": put()}}, "opt_state": {{"mu": put("x")}}}}
    with ocp.CheckpointManager({str(tmp_path / "run")!r}) as manager:
        manager.save(7, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), rank, port], env=environment
        )
        for rank in ("0", "1")
    ]
    try:
        assert [host.wait(timeout=240) for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
    a = np.random.default_rng(0).standard_normal((64, 99), np.float32)
    reader = check(tmp_path / "run", {"rows": a, "copies": a})
    assert reader.layout == "OCDBT, zarr, params root, step 7, item default"
    assert reader.left_out == {"opt_state/mu": "state of an optimizer"}
    shutil.rmtree(tmp_path / "run" / "7" / "default" / "ocdbt.process_1")
    refused(tmp_path / "run", "cannot be read")


@pytest.mark.parametrize("chunked", [False, True])
def test_msgpack_of_flax(tmp_path, train_state, chunked, monkeypatch):
    from flax import serialization

    if chunked:
        monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 100)
    for step in (3, 20):
        (tmp_path / f"checkpoint_{step}").write_bytes(serialization.to_bytes(train_state))
    (tmp_path / "notes.txt").write_text("")
    assert looks_like_orbax(tmp_path) and looks_like_orbax(tmp_path / "checkpoint_3")
    reader = check(tmp_path)
    assert reader.layout == "msgpack, params root, step checkpoint_20"
    assert "step" not in check(tmp_path / "checkpoint_3").layout


def test_aggregate_file_of_old_orbax(tmp_path):
    """Old Orbax wrote a msgpack file ``checkpoint``, with large leaves in separate folders."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import msgpack_utils

    (tmp_path / "one").mkdir()
    encoded = msgpack_utils.msgpack_serialize({"params": PARAMS, "step": 7})
    (tmp_path / "one" / "checkpoint").write_bytes(encoded)
    check(tmp_path / "one")

    for ocdbt in (False, True):
        folder = save(tmp_path / f"ocdbt={ocdbt}", {"params": PARAMS}, use_ocdbt=ocdbt)
        (folder / "_METADATA").unlink()
        keys = [tuple(name.split("/")) for name in flat({"params": PARAMS})]
        tree = {}
        for path in keys:
            group = tree
            for key in path[:-1]:
                group = group.setdefault(key, {})
            group[path[-1]] = f"PLACEHOLDER://{'.'.join(path)}"
        tree["step"] = 7
        (folder / "checkpoint").write_bytes(msgpack_utils.msgpack_serialize(tree))
        check(folder)
        restored = ocp.PyTreeCheckpointer().restore(folder)  # Orbax accepts this as a checkpoint
        assert flat(restored)["params/blocks.2/scale"].tobytes() == (
            PARAMS["blocks.2"]["scale"].tobytes()
        )


def test_tensorstore_missing(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'griffin-eval\[jax\]'"):
        open_orbax(saved["OCDBT, zarr"])


def test_what_is_no_checkpoint(tmp_path, saved):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "x"')  # TensorFlow's file
    assert not looks_like_orbax(tmp_path)
    assert not looks_like_orbax(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="_METADATA.*found checkpoint; checkpoint-500; conf"):
        open_orbax(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        open_orbax(tmp_path / "absent")
    with open_orbax(saved["OCDBT, zarr"]) as reader:
        assert reader.tensors["blocks.2/scale"].rows(6, 99).shape == (2,)


def refused(folder, match):
    with pytest.raises(CheckpointError, match=match) as raised:
        with open_orbax(folder) as reader:
            for name in reader.tensors:
                reader.tensors[name].numpy()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 3000


def test_damage_is_named(saved, tmp_path):
    def copy(layout="a folder per array, zarr"):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(saved[layout], folder)
        return folder

    (folder := copy("OCDBT, zarr")).joinpath("_METADATA").unlink()
    refused(folder, "_METADATA is missing")
    (folder := copy("OCDBT, zarr")).joinpath("manifest.ocdbt").unlink()
    refused(folder, "manifest.ocdbt is missing, though processes wrote")
    (folder := copy("OCDBT, zarr")).joinpath("manifest.ocdbt").write_bytes(b"12345678")
    refused(folder, "manifest.ocdbt cannot be read")
    shutil.rmtree((folder := copy("OCDBT, zarr")) / "d")
    refused(folder, "cannot be read")
    shutil.rmtree((folder := copy()) / "params.blocks.0.w")
    refused(folder, r"1 of \d+ arrays cannot be read: 'params.blocks.0.w'")
    (folder := copy()).joinpath("params.blocks.2.scale", "0").unlink()
    refused(folder, "'params.blocks.2.scale': 1 of its 1 chunks are missing")
    path = (folder := copy()) / "params.blocks.0.w" / "0.0.0"
    path.write_bytes(path.read_bytes()[:-9])
    refused(folder, "'blocks.0/w' cannot be read")
    path.write_bytes(b"")
    refused(folder, "'blocks.0/w' cannot be read")

    metadata = (folder := copy()) / "_METADATA"
    raw = json.loads(metadata.read_text())
    key = "('params', 'blocks.10', 'scale')"
    raw["tree_metadata"][key]["value_metadata"]["write_shape"] = [9]
    metadata.write_text(json.dumps(raw))
    refused(folder, r"disagrees with the arrays: 'params/blocks.10/scale' as \(9,\), stored \(8,\)")
    raw["tree_metadata"][key]["key_metadata"] = 3
    metadata.write_text(json.dumps(raw))
    refused(folder, "malformed leaves: .*blocks.10")
    raw["tree_metadata"][key]["key_metadata"] = [{"key": "../../x", "key_type": 2}]
    metadata.write_text(json.dumps(raw))
    refused(folder, r"'../../x' leads out of the folder")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("zarr3", [True, False])
def test_chunks_of_zeros_that_orbax_left_out(tmp_path, monkeypatch, zarr3, ocdbt, streamed):
    """Orbax left out chunks of zeros before it recorded in _METADATA that it writes them."""
    import jax
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src.serialization import tensorstore_utils

    if streamed:
        monkeypatch.setattr(store, "_STREAMED", 0)
    rows = np.repeat(np.arange(4, dtype=np.float32), 8).reshape(8, 4)
    tree = {"none": np.zeros((3, 5), np.float32), "some": rows, "one": np.zeros((), np.float32)}
    folder, flag = tmp_path / "folder", "store_array_data_equal_to_fill_value"
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with monkeypatch.context() as patch, ocp.Checkpointer(handler) as checkpointer:
        patch.setattr(tensorstore_utils, flag.upper(), False)
        arguments = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=32), tree)
        checkpointer.save(folder, tree, save_args=arguments)
    raw = json.loads((folder / "_METADATA").read_text())
    assert raw[flag] is False
    for said in (False, None):
        if said is None:
            del raw[flag]
            (folder / "_METADATA").write_text(json.dumps(raw))
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            check(folder, jax.tree.map(np.asarray, checkpointer.restore(folder)))
        check(folder, tree)
    if not zarr3:  # this format has all its chunks
        return
    (folder / "_METADATA").write_text(json.dumps(raw | {flag: True}))
    refused(folder, r"3 of 3 arrays .*'some': \d of its \d chunks are missing")
    (folder / "_METADATA").write_text(json.dumps(raw | {flag: 3}))
    refused(folder, f"expected a boolean '{flag}', found 3")


def packed_array(shape=b"\x90", dtype=b"\xa7float32", content=b"\xc4\x04abcd") -> bytes:
    """Return an array in msgpack, of shape () by default."""
    fields = b"\x93" + shape + dtype + content
    return b"\xc9" + struct.pack(">Ib", len(fields), 1) + fields


def nested_arrays(levels: int) -> bytes:
    array = packed_array()
    for _ in range(levels):
        array = packed_array(shape=array)
    return array


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (packed_array(dtype=b"\xa6(2,)f4"), r"an array of '\(2,\)f4'"),
        (packed_array(dtype=b"\xa2(2"), r"an array of '\(2'"),
        (packed_array(dtype=b"\xa3>f4"), "an array of '>f4'"),
        (packed_array(dtype=b"\xa1O"), "an array of O"),
        (packed_array(dtype=b"\x05"), "an array of 5"),
        (packed_array(shape=b"\x91\x02"), r"float32 and shape \[2\] with 4 bytes"),
        (packed_array(shape=b"\x91\xff"), r"float32 and shape \[-1\] with 4 bytes"),
        (packed_array(shape=b"\xa0"), "float32 and shape '' with 4 bytes"),
        (packed_array(content=b"\xc6\xff\xff\xff\xff"), "an end at"),
        (packed_array(content=b"\x93"), "an end at"),
        (b"\xd4\x01\x05", "no array at"),
        (b"\x81\x80\x01", "neither a string nor a number"),
        (b"\x82\xa1x\x01\xa1x\x01", "the key 'x' twice"),
        (nested_arrays(3000), "nested too deeply"),
        (b"\x91" * 3000 + b"\x01", "nested too deeply"),
        (b"\xdd" + struct.pack(">I", 3 << 20) + b"\xc0" * (3 << 20), "too many values"),
        (b"\xdd" + struct.pack(">I", 200_000) + b"\x90" * 200_000, "too many values"),
    ],
    ids=itertools.count(),  # some values are too long for an id
)
def test_msgpack_that_lies(tmp_path, value, said):
    good = b"\x82\xa1w" + packed_array()
    (tmp_path / "checkpoint").write_bytes(good + b"\xa1x" + packed_array())
    assert set(open_orbax(tmp_path).tensors) == {"w", "x"}
    (tmp_path / "checkpoint").write_bytes(good + b"\xa1x" + value)
    refused(tmp_path, said)


@pytest.mark.parametrize("size", [10**11, 10**13, 10**17])
def test_a_shape_beyond_memory_does_not_end_the_process(saved, tmp_path, size):
    folder = tmp_path / "x"
    shutil.copytree(saved["a folder per array, zarr"], folder)
    (folder / "_METADATA").write_text((folder / "_METADATA").read_text().replace("write_s", "no"))
    path = folder / "params.blocks.2.scale" / ".zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"shape": [size], "chunks": [size]}))
    refused(folder, "blocks.2.scale")


def test_a_large_chunk_without_rows(tmp_path):
    import tensorstore

    metadata = {"shape": [0, 8], "chunks": [8_000_000, 8], "dtype": "<f4", "compressor": None}
    store = {"driver": "file", "path": f"{tmp_path}/a/"}
    spec = {"driver": "zarr", "kvstore": store, "metadata": metadata}
    tensorstore.open(spec, create=True).result()
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    entry = {"key_metadata": [{"key": "a", "key_type": 2}], "value_metadata": value}
    tree = {"tree_metadata": {"('a',)": entry}, "use_ocdbt": False, "use_zarr3": False}
    (tmp_path / "_METADATA").write_text(json.dumps(tree))
    with open_orbax(tmp_path) as container:
        assert container.tensors["a"].numpy().shape == (0, 8)
