"""Files of torch.save, read without torch; damaged and hostile files are refused."""

import collections
import hashlib
import io
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slow import examples

from griffin_eval.converters.containers.torch_pt.reader import looks_like_torch, open_torch
from griffin_eval.converters.tensors import bytes_of
from griffin_eval.errors import ArgumentError, CheckpointError

fuzzed = settings(
    max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def save(path: Path, content, **options) -> Path:
    torch.save(content, path, **options)
    return path


def refusal(path: Path, *fragments: str, **options) -> str:
    """Return the one-line error from opening the file."""
    with pytest.raises(ArgumentError if "item" in options else CheckpointError) as caught:
        open_torch(path, **options)
    message = str(caught.value)
    for fragment in (str(path), *fragments):
        assert fragment in message
    assert "\n" not in message
    assert caught.value.__cause__ is None
    return message


def bits(tensor: torch.Tensor) -> bytes:
    # contiguous() would keep odd strides where a dimension has one element.
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return flat.view(-1).view(torch.uint8).numpy().tobytes()


def check_equal(file: open_torch, expected: dict[str, torch.Tensor]) -> None:
    assert set(file.tensors) == set(expected)
    for name, tensor in expected.items():
        info, array, read = (
            file.tensors[name],
            file.tensors[name].numpy(),
            file.tensors[name].torch(),
        )
        assert info.shape == array.shape == tuple(read.shape) == tuple(tensor.shape)
        assert info.nbytes == array.nbytes == tensor.nbytes
        assert info.dtype == str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
        assert read.dtype == tensor.dtype
        assert array.tobytes() == bits(tensor) == bits(read)


def rezip(path: Path, change) -> Path:
    """Rewrite the archive with ``change(name, bytes)`` for every entry, stored and in order."""
    with zipfile.ZipFile(path) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries:
            archive.writestr(name, change(name, data))
    return path


def with_pickle(path: Path, pickled: bytes) -> Path:
    """Write a file of torch.save with this pickle, and the storages 0 and 1 of 16 bytes each."""
    save(path, {"a": torch.arange(4.0), "b": torch.arange(4.0)})
    return rezip(path, lambda name, data: pickled if name.endswith("data.pkl") else data)


# Reading.

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]
DTYPES += [torch.uint8, torch.uint16, torch.float8_e4m3fn, torch.complex64]


def test_reads_every_dtype_and_protocol(tmp_path):
    for dtype, protocol in [*((dtype, 2) for dtype in DTYPES), (DTYPES[1], 4), (DTYPES[1], 5)]:
        content = {"x.y": torch.arange(-3, 9).reshape(3, 4).to(torch.float32).abs().to(dtype)}
        content |= {"scalar": content["x.y"][1, 1].clone(), "empty": torch.empty(0, 3, dtype=dtype)}
        with open_torch(save(tmp_path / "m.pt", content, pickle_protocol=protocol)) as file:
            check_equal(file, content)
            assert file.left_out == {} and file.root == ""


def test_parameters_and_views_are_read_in_place(tmp_path):
    base = torch.arange(60.0).reshape(3, 4, 5)
    content = {
        "whole": base,
        "transposed": base.transpose(0, 2),
        "expanded everywhere": torch.ones(()).expand(7, 7),
        "diagonal": torch.arange(25, dtype=torch.bfloat16).reshape(5, 5).diagonal(),
        "parameter": torch.nn.Parameter(torch.ones(2, 2).T),
        "with attributes": torch.ones(2),
    }
    content["parameter"].tag = content["with attributes"].tag = "x"
    with open_torch(save(tmp_path / "m.pt", content)) as file:
        check_equal(file, content)
        whole, other = (file.tensors[name].numpy() for name in ("whole", "transposed"))
        assert np.shares_memory(whole, other) and not whole.flags.owndata


def test_pieces_of_views_take_little_memory(tmp_path):
    """Peak memory is small for every order of a tensor's elements in the file."""
    base, piece = torch.arange(16 * 16 * (16 << 10)).float().reshape(16, 16, 16 << 10), 1 << 20
    views = {
        "whole": base,
        "transposed": base.transpose(0, 2),
        "rows between rows": base.transpose(0, 1),
        "columns": base[:, 3:5],
        "expanded": base[:1, :1].expand(32, 8, 16 << 10),
        "empty": base[:0].transpose(0, 2),
        "number": base[1, 2, 3],
    }
    save(tmp_path / "m.pt", views)
    with open_torch(tmp_path / "m.pt") as file:
        for name, tensor in views.items():
            list(file.tensors["number"].pieces(piece))  # imports modules before the measurement
            joined = hashlib.sha256()
            tracemalloc.start()
            for array in file.tensors[name].pieces(piece):
                assert array.flags.c_contiguous and array.flags.writeable
                joined.update(bytes_of(array))
                del array
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert joined.digest() == hashlib.sha256(bits(tensor)).digest(), name
            row = tensor[:1].nbytes if tensor.ndim else 4
            apart = 0 if tensor.is_contiguous() else base.nbytes  # read in one piece
            assert peak < min(max(piece, row), tensor.nbytes) + apart + 100_000, name


def test_a_trainers_file(tmp_path):
    weights = {"embedder": {"w": torch.ones(2)}, "blocks.0": {"b": torch.ones(3), "n": 7}}
    content = {
        "model_state_dict": weights,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(5)}}, "param_groups": [{"lr": 1e-3}]},
        "epoch": 12,
        "note": "a" * 1000,
    }
    path = save(tmp_path / "m.pt", content)
    with open_torch(path) as file:
        assert file.root == "model_state_dict"
        assert set(file.tensors) == {"embedder.w", "blocks.0.b"}
        assert set(file.left_out) == {"optimizer", "epoch", "note", "model_state_dict.blocks.0.n"}
        assert file.left_out["optimizer"] == "a dict of 2"
        assert len(file.left_out["note"]) < 300
    with open_torch(path, item="optimizer") as file:
        assert set(file.tensors) == {"state.0.exp_avg"}
    with open_torch(path, item="") as file:
        assert "model_state_dict.embedder.w" in file.tensors
    refusal(path, "no state dict 'ema'", "optimizer", item="ema")
    save(path, {"params": {"a": torch.ones(1)}, "state_dict": {"a": torch.ones(1)}})
    with pytest.raises(ArgumentError, match="several state dicts, .*params.*item="):
        open_torch(path)


def test_lists_of_layers_and_modules_state_dicts(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    with open_torch(save(tmp_path / "m.pt", module.state_dict())) as file:  # includes _metadata
        check_equal(file, module.state_dict())
    content = {"layers": [{"w": torch.ones(i + 1)} for i in range(11)]}
    with open_torch(save(tmp_path / "m.pt", content)) as file:
        assert list(file.tensors) == [f"layers.{i}.w" for i in range(11)]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_what_is_no_dense_tensor_is_left_out(tmp_path):
    content = {
        "w": torch.ones(2),
        "sparse": torch.eye(2).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "size": torch.Size([1]),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "set": {1, 2},
        "bytes": b"abc",
        "bytearray": bytearray(b"abc"),
        "complex": 1j,
        "counter": collections.Counter("ab"),
        "none": None,
        "betas": (0.9, 0.95),
        "losses": [1.0, 2.0],
        "extra state": io.BytesIO(b"abc"),
        "metrics": {(1, 2): 1, 0.5: 2, None: 3, 1 << 40: 4},
    }
    content["again"] = content["metrics"]
    with open_torch(save(tmp_path / "m.pt", content)) as file:
        assert list(file.tensors) == ["w"]
        assert {name.partition(".")[0] for name in file.left_out} == content.keys() - {"w"}


def test_shared_containers_are_read(tmp_path):
    weights, settings = {"a": torch.ones(2)}, {"width": 8}
    content = {"params": weights, "config": settings, "trainer": {"config": settings}}
    content["best"] = weights
    with open_torch(save(tmp_path / "m.pt", content)) as file:
        assert list(file.tensors) == ["a"] and file.root == "params"


def test_a_folder_with_one_file_and_names(tmp_path):
    folder = tmp_path / "release"
    folder.mkdir()
    assert not looks_like_torch(folder)
    refusal(folder, "found none")
    save(folder / "2b.pt", {"model.layers.0.w": torch.ones(2)})
    (folder / "tokenizer.model").write_bytes(b"x")
    (folder / "other.bin").write_bytes(b"x")
    assert looks_like_torch(folder)
    with open_torch(folder) as file:
        assert list(file.files()) == [folder / "2b.pt"]
    save(folder / "9b.pt", {"a": torch.ones(2)})
    refusal(folder, "2b.pt; 9b.pt")


def test_what_looks_like_torch(tmp_path):
    save(tmp_path / "a.bin", {"a": torch.ones(2)})
    save(tmp_path / "old.bin", {"a": torch.ones(2)}, _use_new_zipfile_serialization=False)
    (tmp_path / "text.bin").write_bytes(b"text")
    (tmp_path / "cut.pt").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    looks = {p.name for p in tmp_path.iterdir() if looks_like_torch(p)}
    assert looks == {"a.bin", "old.bin", "cut.pt"}
    assert not looks_like_torch(tmp_path / "nothing")


# Refused files.


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def evil(tmp_path, *call) -> Path:
    return save(tmp_path / "evil.pt", {"w": torch.ones(2), "x": Evil(*call)})


def test_code_is_never_run(tmp_path):
    import os

    ran = tmp_path / "ran"
    refusal(evil(tmp_path, os.system, f"touch {ran}"), "posix.system", "refused")
    refusal(evil(tmp_path, eval, f"open({str(ran)!r}, 'w')"), "__builtin__.eval")
    refusal(evil(tmp_path, open, str(ran), "w"), "io.open")
    refusal(evil(tmp_path, getattr, 1, "real"), "getattr")
    refusal(evil(tmp_path, torch.load, "x"), "torch.serialization.load")
    for protocol in range(6):
        pickled = pickle.dumps({"x": Evil(os.system, f"touch {ran}")}, protocol=protocol)
        refusal(with_pickle(tmp_path / "e.pt", pickled), "refused")
    assert not ran.exists()


@pytest.mark.parametrize("allowed", ["torch.float32", "torch.Tensor", "torch.FloatStorage"])
def test_only_the_callables_of_state_dicts_are_called(tmp_path, allowed):
    module, name = allowed.rsplit(".", 1)
    pickled = b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"K\x05\x85R."
    refusal(with_pickle(tmp_path / "m.pt", pickled), f"a call of {allowed}")


def storage(kind=b"FloatStorage", key=b"0", size=4) -> bytes:
    pid = b"(X\7\0\0\0storagectorch\n" + kind + b"\nX" + struct.pack("<I", len(key)) + key
    return pid + b"X\3\0\0\0cpuJ" + struct.pack("<i", size) + b"tQ"


def numbers(*values: int) -> bytes:
    return (
        b"(" + b"".join(b"\x8a\x09" + v.to_bytes(9, "little", signed=True) for v in values) + b"t"
    )


def tensor(source=None, offset=0, shape=(4,), strides=(1,)) -> bytes:
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\n(" + (storage() if source is None else source)
    hooks = b"\x89ccollections\nOrderedDict\n)RtR"
    where = b"\x8a\x09" + offset.to_bytes(9, "little", signed=True)
    return rebuild + where + numbers(*shape) + numbers(*strides) + hooks


def state(value: bytes) -> bytes:
    return b"\x80\x02}X\1\0\0\0a" + value + b"s."


def test_the_pickles_made_here_are_good(tmp_path):
    with open_torch(with_pickle(tmp_path / "m.pt", state(tensor(offset=1, shape=(3,))))) as file:
        assert file.tensors["a"].numpy().tolist() == [1, 2, 3]
    column = state(tensor(shape=(4, 1), strides=(1, 1 << 61)))
    with open_torch(with_pickle(tmp_path / "m.pt", column)) as file:
        assert file.tensors["a"].numpy().shape == (4, 1)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (tensor(shape=(5,)), "beyond its storage"),
        (tensor(offset=1), "beyond its storage"),
        (tensor(shape=(2, 2), strides=(3, 1)), "beyond its storage"),
        (tensor(shape=(2,), strides=(1 << 62,)), "beyond its storage"),
        (tensor(offset=-1, shape=(1,)), "impossible"),
        (tensor(shape=(-1,)), "impossible"),
        (tensor(strides=(-1,)), "impossible"),
        (tensor(shape=(4, 1)), "impossible"),
        (tensor(shape=(1 << 63,), strides=(0,)), "impossible"),
        (tensor(shape=(1 << 40, 1 << 40), strides=(0, 0)), "larger than any memory"),
        (tensor(shape=(1,) * 40, strides=(1,) * 40), "dimensions"),
        (tensor(storage(size=5)), "needs 20 bytes, but has 16"),
        (tensor(storage(size=-1)), "needs -4 bytes"),
        (tensor(storage(key=b"7")), "cannot be followed"),
        (tensor(storage(kind=b"EvilStorage")), "refused"),
        (tensor(b"N"), "without a storage"),
        (b"]", "no tensor in it"),
        (b"h\x05", "cannot be followed"),
        (b"0", "opcode POP"),
    ],
)
def test_pickles_that_lie(tmp_path, value, said):
    refusal(with_pickle(tmp_path / "m.pt", state(value)), said)


def test_pickles_that_would_run_away(tmp_path):
    path = tmp_path / "m.pt"
    # Sixty levels of a container that holds the next level twice: 2^60 paths to the bottom.
    tuples = b"N\x85" + b"q\0h\0\x86" * 60
    refusal(with_pickle(path, b"\x80\x02}" + tuples + b"Ns."), "no tensor in it")
    refusal(with_pickle(path, state(tuples)), "no tensor in it", "a tuple of 2")
    # Each list is built inside the list above it, so that no value has to be popped.
    lists = b"(" + tensor() + b"q\0"
    lists += b"".join(b"]q%c(h%ch%ce" % (i + 1, i, i) for i in range(60)) + b"tq\x80"
    used = b"}q\x81X\1\0\0\0a" + b"h\x3c" + b"s"
    refusal(with_pickle(path, b"\x80\x02" + lists + used + b"."), "nested in itself, or shared")
    lists = b"(" + tensor() + b"q\0"
    lists += b"".join(b"]q%c(h%ch%ce" % (i + 1, i, i) for i in range(30)) + b"tq\x80"
    used = b"}q\x81X\1\0\0\0a" + b"h\x1e" + b"s"
    refusal(with_pickle(path, b"\x80\x02" + lists + used + b"."), "shared too often")
    itself = b"}q\1X\1\0\0\0bh\1s"
    refusal(with_pickle(path, state(itself)), "nested in itself")
    refusal(with_pickle(path, b"\x80\x02]q\1h\1ah\1a."), "a list of 2")
    # A memo index for which pickle would allocate 34 GB, and lengths beyond the end.
    for opcode in (b"r\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f", b"\x96" + b"\xff" * 7 + b"\x00"):
        refusal(with_pickle(path, b"\x80\x02}" + opcode + b"."))
    refusal(with_pickle(path, b"\x80\x02]" + b"\x85" * 20_000 + b"."), "a tuple of 1")
    refusal(with_pickle(path, b"\x80\x02" + b"}0" * 5_000_000 + b"."), "more than any state dict")
    long = b"X" + struct.pack("<I", 2000) + b"a" * 2000
    refusal(with_pickle(path, b"\x80\x02}" + long + tensor() + b"s."), "too long for a name")


def test_archives_that_lie(tmp_path):
    path = tmp_path / "m.pt"
    good = save(path, {"a": torch.ones(4), "b": torch.ones(4)}).read_bytes()

    def directory(data: bytes, name: bytes) -> int:
        return data.rindex(b"PK\1\2", 0, data.rindex(name))

    def changed(name: bytes, field: int, value: bytes) -> Path:
        data = bytearray(good)
        at = directory(good, name) + field
        data[at : at + len(value)] = value
        path.write_bytes(data)
        return path

    size = struct.pack("<L", 1000) * 2
    refusal(changed(b"/data/0", 20, size), "'m/data/0'", "overlaps")
    refusal(changed(b"/data/1", 20, struct.pack("<L", 10**6) * 2), "ends outside the file")
    refusal(changed(b"/data/0", 42, struct.pack("<L", 10**6)), "begins outside the file")
    refusal(changed(b"/data/0", 42, struct.pack("<L", 0)), "not where the directory says")
    refusal(changed(b"/data/0", 10, b"\x08"), "compressed")
    refusal(changed(b"/data/0", 46 + 7, b"1"), "there twice")
    refusal(changed(b"data.pkl", 16, b"abcd"), "checksum of data.pkl")
    path.write_bytes(good)
    rezip(path, lambda name, data: b"big" if name.endswith("byteorder") else data)
    refusal(path, "little-endian")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/data.pkl", b"x" * 1000)
    refusal(path, "compressed")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", b"x")
    refusal(path, "expected one data.pkl")


def test_zip64_that_lies(tmp_path):
    """Sizes and offsets beyond 4 GiB are in a separate field, which can be wrong as well."""
    path = save(tmp_path / "m.pt", {"a": torch.ones(4)})
    with zipfile.ZipFile(path) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries:
            with archive.open(name, "w", force_zip64=True) as entry:
                entry.write(data)
    check_equal(open_torch(path), {"a": torch.ones(4)})
    good = path.read_bytes()
    at = good.rindex(b"PK\1\2", 0, good.rindex(b"m/data/0"))
    fields = list(struct.unpack_from("<4s4B4HL2L5H2L", good, at))
    name, rest = good[at + 46 : at + 46 + fields[12]], good[at + 46 + fields[12] + fields[13] :]
    true = fields[18]
    for size, offset, said in (
        (1 << 40, true, "ends outside the file"),
        ((1 << 64) - 1, true, "ends outside the file"),
        (16, 1 << 40, "begins outside the file"),
        (16, (1 << 64) - 1, "begins outside the file"),
        (16, 0, "not where the directory says"),
    ):
        lie = struct.pack("<HHQQQ", 1, 24, size, size, offset)
        fields[10:12], fields[13], fields[18] = [0xFFFFFFFF] * 2, len(lie), 0xFFFFFFFF
        entry = struct.pack("<4s4B4HL2L5H2L", *fields) + name + lie
        end = bytearray(rest)
        length = struct.unpack_from("<L", end, end.rindex(b"PK\5\6") + 12)[0]
        struct.pack_into("<L", end, end.rindex(b"PK\5\6") + 12, length + len(lie))
        path.write_bytes(good[:at] + entry + end)
        refusal(path, said)


def test_other_files(tmp_path):
    path = tmp_path / "m.pt"
    refusal(path, "found none")
    for content in (b"", b"x", b"PK\3\4", b"\x80\x02}."):
        path.write_bytes(content)
        refusal(path, "damaged")
    save(path, {"a": torch.ones(4)}, _use_new_zipfile_serialization=False)
    refusal(path, "before version 1.6")
    refusal(save(path, [torch.ones(4)]), "a list of 1")
    refusal(save(path, torch.ones(4)), "a tensor of shape (4,)")
    refusal(save(path, {}), "no tensor in it", "nothing")
    refusal(save(path, {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}), "two tensors", "'a.b'")
    save(path, {"a": torch.ones(1)})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("m/constants.pkl", b"")
    refusal(path, "TorchScript")


def test_a_checksum_that_was_not_computed_is_not_checked(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        save(tmp_path / "m.pt", {"a": torch.ones(2)})
    finally:
        torch.serialization.set_crc32_options(True)
    with open_torch(tmp_path / "m.pt") as file:
        assert file.tensors["a"].numpy().tolist() == [1, 1]


# Fuzz.


def flattened(prefix: str, value) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested dicts and lists by their keys joined with "."."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flattened(f"{prefix}.{key}" if prefix else str(key), child)


def survives(path: Path) -> None:
    """Assert that the file is refused in one sentence, or that all its tensors can be read.

    Their values must equal those of ``torch.load(weights_only=True)``, unless torch refuses the
    file for parts that hold no tensor, such as fields of the zip or the pickle protocol.
    """
    try:
        file = open_torch(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    for tensor in file.tensors.values():
        if tensor.nbytes < 1 << 20:
            assert tensor.numpy().tobytes() == bits(tensor.torch())
    try:
        loaded = torch.load(path, weights_only=True)
    except Exception:
        return
    check_equal(file, dict(flattened("", loaded[file.root] if file.root else loaded)))


opcodes = st.sampled_from(
    [b"}", b"]", b")", b"(", b"t", b"\x85", b"\x86", b"\x87", b"s", b"u", b"a", b"e", b"N", b"Q"]
    + [b"R", b"b", b"\x81", b"q\0", b"q\1", b"h\0", b"h\1", b"K\4", b"X\1\0\0\0a", storage()]
    + [tensor(), b"ccollections\nOrderedDict\n", b"ctorch\nSize\n", b"\x94", b"\x93", b"."]
)


@fuzzed
@given(program=st.lists(opcodes, max_size=30))
def test_random_programs(tmp_path, program):
    survives(with_pickle(tmp_path / "m.pt", b"\x80\x02}X\1\0\0\0z" + b"".join(program) + b"s."))


@st.composite
def state_dicts(draw):
    """Draw state dicts with views of shared storages, as torch makes them."""
    bases = [
        torch.arange(24).to(draw(st.sampled_from(DTYPES[:5])))
        for _ in range(draw(st.integers(1, 3)))
    ]
    content = {}
    for i in range(draw(st.integers(1, 5))):
        view = draw(st.sampled_from(bases)).reshape(
            draw(st.sampled_from([(24,), (4, 6), (2, 3, 4)]))
        )
        view = view.permute(draw(st.permutations(range(view.ndim))))
        for axis in range(view.ndim):
            start, step = draw(st.integers(0, 2)), draw(st.integers(1, 3))
            view = view[(slice(None),) * axis + (slice(start, None, step),)]
        if draw(st.booleans()):
            view = view[None].expand(3, *view.shape)
        content[f"n{i}"] = view
    return content


@fuzzed
@given(content=state_dicts())
def test_reads_what_torch_reads(tmp_path, content):
    save(tmp_path / "m.pt", content)
    with open_torch(tmp_path / "m.pt") as file:
        check_equal(file, torch.load(tmp_path / "m.pt", weights_only=True, mmap=True))


# Writing.

_ANONYMOUS = """
import re, sys
from pathlib import Path
import numpy as np
def resident():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\\s+(\\d+)", status)[1]) << 10
"""


@pytest.mark.slow
def test_large_files_take_no_memory(tmp_path):
    """The file has 5 GB and one tensor over 4 GiB, so the zip needs its 64-bit fields."""
    code = (
        _ANONYMOUS
        + """
from griffin_eval.converters.containers.torch_pt.writer import TorchWriter
from griffin_eval.converters.files import TensorFile
from griffin_eval.converters.tensors import bytes_of
from griffin_eval.converters.containers.torch_pt.reader import open_torch
import torch
path, rows = sys.argv[1], 70_000
specs = {"first": ((3,), "float32"), "big": ((rows, 1 << 15), "float16")}
specs |= {"last": ((rows // 10, 1 << 15), "float16"), "end": ((2,), "float32")}
block = np.arange(1 << 15, dtype=np.float16)[None] + np.zeros((100, 1), np.float16)
before = peak = resident()
def chunks(n):
    global peak
    for i in range(0, n, 100):
        block[:, 0] = i % 1000
        yield block
        peak = max(peak, resident())
with TorchWriter(path, specs) as writer:
    writer.write("end", [np.ones(2, np.float32)])
    writer.write("big", chunks(rows))
    writer.write("last", chunks(rows // 10))
    writer.write("first", [np.ones(3, np.float32)])
with open_torch(path) as file:
    big, last, end = (file.tensors[name] for name in ("big", "last", "end"))
    for loaded in (big.torch(), torch.load(path, weights_only=True, mmap=True)["big"]):
        assert loaded[-1, 0] == (rows - 100) % 1000 and loaded[-1, 100] == 100
    assert last.numpy()[-1, 7] == 7 and end.numpy().tolist() == [1, 1]
    peak = max(peak, resident())
print((peak - before) >> 20)
"""
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m.pt")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    assert int(done.stdout) < 150  # MB, including the import of torch
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        assert archive.testzip() is None
