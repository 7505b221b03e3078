"""Contract of every container: our readers and the format's library read all written tensors."""

import resource
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from slow import examples

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.containers.registry import CONTAINERS
from griffin_eval.converters.tensors import FLOATS
from griffin_eval.errors import BadInput

WRITTEN = ("safetensors", "torch", "orbax")
FILES = {"torch": "model.pt"}  # file names of containers that consist of one file
SPECS = {
    "model/b": ((7,), "float32"),
    "model/a": ((300, 7), "bfloat16"),
    "scalar": ((), "float64"),
    "layers/0/half": ((2, 3, 5), "float16"),
    "layers/10/ünïcode": ((2, 1, 1, 6), "float32"),
    "layers/2/zeros": ((9,), "float32"),  # zeros, with which Orbax fills absent chunks
}


def values(specs=SPECS, seed=0) -> dict[str, np.ndarray]:
    """Return arrays of random bits, which include NaNs of every kind."""
    rng, made = np.random.default_rng(seed), {}
    for name, (shape, dtype) in specs.items():
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        content = rng.bytes(int(np.prod(shape, dtype=int)) * kind.itemsize)
        made[name] = np.frombuffer(content, kind).reshape(shape)
        if name.endswith("zeros"):
            made[name] = np.zeros(shape, kind)
    return made


def writer(kind, folder, specs=SPECS, nbytes=5 * 10**9):
    folder.mkdir(exist_ok=True)
    return CONTAINERS[kind].open_writer(folder, specs, nbytes, {})


def write(kind, folder, arrays, order=reversed, **options):
    specs = {name: (array.shape, array.dtype.name) for name, array in arrays.items()}
    with writer(kind, folder, specs, **options) as made:
        for name in order(arrays):
            made.write(name, [arrays[name]])
    return folder


def reader(kind, folder):
    return CONTAINERS[kind].open(folder / FILES.get(kind, ""), None)


def bits(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def as_the_library_reads(kind, folder) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    """Read the shape, dtype and bytes of each tensor with the library of the format."""
    if kind == "orbax":
        import jax
        import orbax.checkpoint as ocp

        leaves = jax.tree_util.tree_leaves_with_path(ocp.PyTreeCheckpointer().restore(folder))
        arrays = {"/".join(str(k.key) for k in path): np.asarray(leaf) for path, leaf in leaves}
        return {n: (a.shape, a.dtype.name, a.tobytes()) for n, a in arrays.items()}
    loaded = {}
    if kind == "torch":
        loaded = torch.load(folder / FILES[kind], weights_only=True, mmap=True)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            loaded |= {name: file.get_tensor(name) for name in file.keys()}
    return {
        name: (
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            bits(tensor),
        )
        for name, tensor in loaded.items()
    }


def expect_read(kind, folder, arrays) -> None:
    """Assert that the format's library and every read method of ours return these arrays."""
    stored = {n: (a.shape, a.dtype.name, a.tobytes()) for n, a in arrays.items()}
    assert as_the_library_reads(kind, folder) == stored
    with reader(kind, folder) as container:
        assert container.tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            tensor = container.tensors[name]
            assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype.name)
            assert tensor.nbytes == array.nbytes
            assert tensor.numpy().tobytes() == array.tobytes()
            assert tensor.numpy().shape == array.shape
            assert bits(tensor.torch()) == array.tobytes()
            pieces = list(tensor.pieces(100))
            assert b"".join(piece.tobytes() for piece in pieces) == array.tobytes()
            if array.ndim:
                assert tensor.rows(1, 3).tobytes() == array[1:3].tobytes()


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_is_written_is_read(kind, tmp_path):
    arrays = values()
    expect_read(kind, write(kind, tmp_path / "one", arrays), arrays)
    if kind != "orbax":  # Orbax gives its files random names
        write(kind, tmp_path / "two", arrays, order=iter)
        names = sorted(path.name for path in (tmp_path / "one").iterdir())
        assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
        for name in names:
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("room", [0, 3000])  # bytes of a file
def test_a_file_that_finds_no_room_is_one_sentence(kind, room, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(BadInput, match="cannot be written"):
            write(kind, tmp_path / "full", values())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", WRITTEN)
@settings(max_examples=examples(15))
@given(
    specs=st.dictionaries(
        st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=5),
        st.tuples(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(FLOATS)),
        min_size=1,
        max_size=5,
    ),
    nbytes=st.sampled_from([1, 50, 10**9]),
)
def test_any_tensors(tmp_path_factory, kind, specs, nbytes):
    if kind == "orbax":  # Orbax stores no arrays without elements
        specs = {n: (tuple(max(1, size) for size in shape), d) for n, (shape, d) in specs.items()}
    arrays = values(specs)
    expect_read(kind, write(kind, tmp_path_factory.mktemp("any"), arrays, nbytes=nbytes), arrays)


@pytest.mark.parametrize("kind", WRITTEN)
def test_chunks_and_strides(kind, tmp_path):
    """The writer takes rows, flat pieces or whole arrays and keeps no reference to their memory."""
    array = np.arange(35, dtype=np.float32).reshape(5, 7)

    def reused():
        buffer = np.empty((1, 5), np.float32)
        for row in array.T:
            buffer[:] = row
            yield buffer
        buffer[:] = np.nan

    names = ("rows", "flat", "whole", "reused")
    with writer(kind, tmp_path, {name: ((7, 5), "float32") for name in names}) as made:
        made.write("rows", (array.T[i : i + 2] for i in range(0, 7, 2)))
        made.write("flat", np.array_split(array.T.reshape(-1), 4))
        made.write("whole", [array.T])
        made.write("reused", reused())
    expect_read(kind, tmp_path, dict.fromkeys(names, array.T))


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_cannot_be_written(kind, tmp_path):
    ones = np.ones(2, np.float32)
    specs = {name: ((2,), "float32") for name in "abc"}
    with pytest.raises(ValueError, match="2 tensors were never written: 'b'; 'c'"):
        with writer(kind, tmp_path / "incomplete", specs) as made:
            made.write("a", [ones])
    with writer(kind, tmp_path / "one", {"a": ((2,), "float32")}) as made:
        with pytest.raises(ValueError, match="'b' is not among"):
            made.write("b", [])
        for chunks in ([ones[:1]], [ones, ones], [np.ones(2)], [ones.astype(">f4")]):
            with pytest.raises(ValueError, match="'a' was given"):
                made.write("a", chunks)
        made.write("a", [ones])
        with pytest.raises(ValueError, match="'a' was written before"):
            made.write("a", [ones])
    with pytest.raises(ValueError, match="'a' is int4"):
        writer(kind, tmp_path / "dtype", {"a": ((2,), "int4")})
    with pytest.raises(ValueError, match="no tensors"):
        writer(kind, tmp_path / "none", {})
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written: "):
        with CONTAINERS[kind].open_writer(tmp_path / "file" / "x", specs, 10**9, {}) as made:
            made.write("a", [ones])


@pytest.mark.parametrize("kind", ["torch", "orbax"])
def test_an_exception_leaves_no_checkpoint(kind, tmp_path):
    with pytest.raises(KeyError), writer(kind, tmp_path) as made:  # the error raised inside
        made.write("model/b", [values()["model/b"]])
        raise KeyError
    with pytest.raises(BadInput):
        reader(kind, tmp_path)


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_was_read_outlives_the_container_and_never_changes_it(kind, tmp_path):
    array = np.arange(4, dtype=np.float32)
    write(kind, tmp_path, {"a": array})
    with reader(kind, tmp_path) as container:
        found, tensor = container.tensors["a"].numpy(), container.tensors["a"].torch()
        tensor.add_(1)
        assert container.tensors["a"].numpy().tolist() == [0, 1, 2, 3]
        if kind != "orbax":  # chunks of Orbax are compressed, so they cannot be mapped
            assert not found.flags.writeable and not found.flags.owndata
    container.close()  # a second close is allowed
    assert found.tolist() == [0, 1, 2, 3] and tensor.tolist() == [1, 2, 3, 4]
    expect_read(kind, tmp_path, {"a": array})


def test_a_closed_checkpoint_says_so(checkpoint):
    opened, name = Checkpoint(checkpoint), "model.final_norm.weight"
    opened.close()
    reads = (opened.numpy, opened.torch, opened.parts, opened.sha256, opened.quantised)
    for read in (*reads, lambda name: list(opened.pieces(name))):
        with pytest.raises(ValueError, match=f"is closed: open it again to read {name}$"):
            read(name)


def test_no_framework_is_needed(tmp_path):
    """Opening a container imports only the modules that read its files."""
    for kind in WRITTEN:
        write(kind, tmp_path / kind, {"a": np.ones(2, np.float32)})
    code = (
        "import sys\n"
        "for name in ('torch', 'jax', 'flax', 'orbax'): sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "from griffin_eval.converters.containers.registry import CONTAINERS\n"
        f"root, files = Path({str(tmp_path)!r}), {FILES}\n"
        f"for kind in {WRITTEN}:\n"
        "    opened = CONTAINERS[kind].open(root / kind / files.get(kind, ''), None)\n"
        "    assert kind == 'orbax' or not {'numpy', 'safetensors'} & set(sys.modules), kind\n"
        "    assert kind == 'orbax' or 'tensorstore' not in sys.modules\n"
        f"for kind in {WRITTEN}:\n"
        "    opened = CONTAINERS[kind].open(root / kind / files.get(kind, ''), None)\n"
        "    assert opened.tensors['a'].numpy().sum() == 2\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
