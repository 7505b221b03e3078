"""Reads the tensors of a torch.save file in place, without torch and without running anything.

The format: a zip archive, nothing compressed; ``NAME/data.pkl`` is a pickle of the object, in which
storages are persistent ids, and ``NAME/data/KEY`` holds the bytes of storage KEY. Both are
untrusted. The pickle is not unpickled but followed, opcode by opcode, by a machine that knows those
that torch.save writes and makes nothing but numbers, strings, containers and descriptions of
tensors: as strict as ``torch.load(weights_only=True, mmap=True)``, whose results it reproduces, but
no callable of the file is ever called, nothing is allocated at its word, and every view is checked
to lie within its storage, every storage within the file.
"""

import io
import math
import mmap
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from griffin_eval.converters.resolve import DAMAGED, brief, listed
from griffin_eval.converters.safetensors_folder import natural_key
from griffin_eval.errors import CheckpointError
from griffin_eval.hints import nearest

if TYPE_CHECKING:
    import numpy as np
    import torch

SAVE_AGAIN = "load it where it was made and torch.save(model.state_dict(), path) again"
ROOTS = ("model_state_dict", "state_dict", "params")  # under which trainers put the weights

_ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e4m3fnuz"), 1),
    **dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
_STORAGES = {
    **{"BoolStorage": "bool", "ByteStorage": "uint8", "CharStorage": "int8"},
    **{"ShortStorage": "int16", "IntStorage": "int32", "LongStorage": "int64"},
    **{"HalfStorage": "float16", "BFloat16Storage": "bfloat16", "FloatStorage": "float32"},
    **{"DoubleStorage": "float64", "ComplexFloatStorage": "complex64"},
    **{"ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8"},
}
_ZIP, _LOCAL_HEADER = b"PK\3\4", struct.Struct("<4s22xHH")
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # what torch.save wrote before 1.6
_MAX_PICKLE = 100_000_000  # bytes
_MAX_DEPTH, _MAX_NAME, _MAX_DIMENSIONS = 32, 1000, 32


class TorchTensor(NamedTuple):
    """Where one tensor is.

    Attributes:
        name: its key, joined with "." where dicts are nested.
        shape: its shape.
        dtype: numpy's name of its dtype, such as ``"bfloat16"``.
        file: the file that holds it.
        start: byte of the file at which its first element is.
        strides: elements from one index to the next, per dimension.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of its elements, however few of them the file holds (an expanded tensor)."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]

    @property
    def span(self) -> int:
        """Elements of the file from its first to its last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))


class TorchFile:
    """The tensors of a .pt, .pth or .bin file that torch.save wrote.

    Opening maps the file and reads its directory and pickle; no tensor is read. What was returned
    stays valid after ``close``, which only lets go of the mappings held here.

    Attributes:
        file: the file.
        root: the key under which the state dict is, "" if it is all there is.
        tensors: every tensor by name, in natural order (layer 2 before layer 10).
        left_out: what is not among them, by key: the rest of a trainer's file, numbers, text.

    Args:
        path: the file, or a folder that holds one such file.
        item: key of the state dict in the file, for a trainer's file with several. By default the
            file itself if a tensor stands at its top, else whichever of ``ROOTS`` it has.

    Raises:
        CheckpointError: no or several such files, one that is truncated or contradicts itself,
            that holds more than tensors and plain values, or no or several state dicts.
    """

    def __init__(self, path: str | Path, *, item: str | None = None):
        self.file = _find_file(Path(path))
        self._maps: dict[int, mmap.mmap] = {}  # by kind of access
        self._closed = False
        content = self._unpickle(self._mapped(mmap.ACCESS_READ))
        self.root, state = self._choose_root(content, item)
        self.left_out: dict[str, str] = {}
        if self.root:
            self.left_out = {str(k): _describe(v) for k, v in content.items() if k != self.root}
        tensors: dict[str, TorchTensor] = {}
        for name, leaf in self._flatten(state):
            if name in tensors:
                raise CheckpointError(
                    f"{self.file}: two tensors are called {name!r} once nested keys are joined "
                    f"with '.'; {SAVE_AGAIN}"
                )
            if isinstance(leaf, _Tensor):
                tensors[name] = TorchTensor(name, leaf.shape, leaf.dtype, self.file, *leaf[2:])
            else:
                self.left_out[f"{self.root}.{name}" if self.root else name] = _describe(leaf)
        if not tensors:
            raise CheckpointError(
                f"{self.file}: expected a state dict, found no tensor in it, but "
                f"{listed(f'{k!r}, {v}' for k, v in self.left_out.items()) or 'nothing'}"
            )
        self.tensors = {name: tensors[name] for name in sorted(tensors, key=natural_key)}

    def __enter__(self) -> "TorchFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the file; arrays and tensors that were returned keep what they need."""
        self._closed = True
        self._maps.clear()

    def numpy(self, name: str) -> "np.ndarray":
        """The tensor as a read-only view of the mapped file, with the strides it was saved with.

        bfloat16 and the float8 dtypes are those of ml_dtypes.

        Raises:
            CheckpointError: no such tensor.
        """
        import ml_dtypes
        import numpy as np

        tensor = self._find(name)
        dtype = np.dtype(getattr(ml_dtypes, tensor.dtype, tensor.dtype))
        if tensor.span == 0:
            array = np.empty(tensor.shape, dtype)
        else:  # numpy, too, refuses what does not fit into the buffer
            strides = tuple(step * dtype.itemsize for step in tensor.strides)
            data = self._mapped(mmap.ACCESS_READ)
            array = np.ndarray(tensor.shape, dtype, data, tensor.start, strides)
        array.flags.writeable = False
        return array

    def torch(self, name: str) -> "torch.Tensor":
        """The tensor over a private mapping of the file: pages are shared until written to.

        Writing to it copies the touched pages for this process (also for earlier results of the
        same storage) and never reaches the file.

        Raises:
            CheckpointError: no such tensor.
        """
        import torch

        tensor = self._find(name)
        dtype = getattr(torch, tensor.dtype)
        if tensor.span == 0:
            return torch.empty(tensor.shape, dtype=dtype)
        data = self._mapped(mmap.ACCESS_COPY)
        flat = torch.frombuffer(data, dtype=dtype, count=tensor.span, offset=tensor.start)
        return flat.as_strided(tensor.shape, tensor.strides)

    def _find(self, name: str) -> TorchTensor:
        if self._closed:
            raise ValueError(f"{self.file} was closed: read {name!r} before closing it")
        if name not in self.tensors:
            raise CheckpointError(f"{self.file}: no tensor {name!r}{nearest(name, self.tensors)}")
        return self.tensors[name]

    def _mapped(self, access: int) -> mmap.mmap:
        if access not in self._maps:
            try:
                with open(self.file, "rb") as handle:
                    self._maps[access] = mmap.mmap(handle.fileno(), 0, access=access)
            except (OSError, ValueError) as error:  # ValueError: an empty file
                raise CheckpointError(f"{self.file} cannot be read: {error}; {DAMAGED}") from None
        return self._maps[access]

    def _unpickle(self, data: mmap.mmap) -> Any:
        records = zip_records(self.file, data)
        (name,) = [name for name in records if name.endswith("/data.pkl")]
        prefix, record = name.removesuffix("data.pkl"), records[name]
        if record.size > _MAX_PICKLE:
            raise CheckpointError(
                f"{self.file}: its pickle has {record.size} bytes, more than any state dict needs; "
                f"{SAVE_AGAIN}"
            )
        pickled = data[record.start : record.start + record.size]
        if record.checksum not in (0, zlib.crc32(pickled)):  # 0: torch.save was told not to
            raise CheckpointError(f"{self.file}: the checksum of data.pkl is wrong; {DAMAGED}")
        order = records.get(f"{prefix}byteorder")
        if order and data[order.start : order.start + order.size] != b"little":
            raise CheckpointError(
                f"{self.file} is not little-endian: save it on a little-endian machine"
            )
        storages = {
            name.removeprefix(f"{prefix}data/"): record
            for name, record in records.items()
            if name.startswith(f"{prefix}data/")
        }
        try:
            return _Machine(storages).run(pickled)
        except _NotAllowed as error:
            raise CheckpointError(
                f"{self.file} holds {error}, which is refused, since what is more than tensors and "
                f"plain values can be code that runs; if you trust the file, {SAVE_AGAIN}"
            ) from None
        except Exception as error:  # whatever nonsense makes an opcode fail
            raise CheckpointError(
                f"{self.file}: its pickle cannot be followed ({brief(str(error))}); {DAMAGED}"
            ) from None

    def _choose_root(self, content: Any, item: str | None) -> tuple[str, Any]:
        if not isinstance(content, dict):
            raise CheckpointError(
                f"{self.file}: expected a state dict, found {_describe(content)}; {SAVE_AGAIN}"
            )
        if item:
            if not isinstance(content.get(item), dict):
                dicts = [str(key) for key, value in content.items() if isinstance(value, dict)]
                raise CheckpointError(
                    f"{self.file}: no state dict {item!r}; expected one of "
                    f"{listed(dicts) or 'none: the file itself is the state dict'}"
                )
            return item, content[item]
        if item == "" or any(isinstance(value, _Tensor) for value in content.values()):
            return "", content
        roots = [key for key in ROOTS if isinstance(content.get(key), dict)]
        if len(roots) > 1:
            raise CheckpointError(
                f"{self.file} holds several state dicts, {listed(roots)}: say which with item="
            )
        return (roots[0], content[roots[0]]) if roots else ("", content)

    def _flatten(self, state: Any) -> Iterator[tuple[str, Any]]:
        """The leaves; no container twice, so that neither loops nor shared nests run away."""
        seen: set[int] = set()
        stack: list[tuple[str, int, Any]] = [("", 0, state)]
        while stack:
            prefix, depth, value = stack.pop()
            nested = isinstance(value, dict) or (
                isinstance(value, list) and value and isinstance(value[0], dict | list | _Tensor)
            )
            if not nested:
                yield prefix, value
                continue
            if id(value) in seen or depth > _MAX_DEPTH:
                raise CheckpointError(
                    f"{self.file}: {brief(prefix)} is nested in itself or shared; {SAVE_AGAIN}"
                )
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, child in reversed(list(items)):
                name = f"{prefix}.{key}" if depth else str(key)
                if len(name) > _MAX_NAME or any("\ud800" <= c <= "\udfff" for c in name):
                    raise CheckpointError(
                        f"{self.file}: {brief(name)} is too long for a name, or not Unicode; "
                        f"{DAMAGED}"
                    )
                stack.append((name, depth + 1, child))


class Record(NamedTuple):
    """Where the bytes of one entry of a zip are, and the CRC-32 that its directory states."""

    start: int
    size: int
    checksum: int


def zip_records(file: Path, data: mmap.mmap) -> dict[str, Record]:
    """The entries of an archive of torch.save: stored, within the file, none over another.

    Raises:
        CheckpointError: anything else.
    """
    if data[: len(_LEGACY)] == _LEGACY:
        raise CheckpointError(
            f"{file} is in the format that torch.save wrote before version 1.6, which is not read: "
            "torch.load(path, weights_only=True) it and torch.save that again"
        )
    if data[:4] != _ZIP:
        raise CheckpointError(f"{file}: expected a zip archive as torch.save writes; {DAMAGED}")
    try:
        with zipfile.ZipFile(file) as archive:
            entries, directory = archive.infolist(), archive.start_dir
    except Exception as error:  # zipfile raises many kinds for a damaged directory
        raise CheckpointError(
            f"{file}: the directory at its end cannot be read ({brief(str(error))}); {DAMAGED}"
        ) from None
    records: dict[str, Record] = {}
    problems = []
    for entry in entries:
        name, at = entry.filename, entry.header_offset
        if not 0 <= at <= directory - _LOCAL_HEADER.size:
            problems.append(f"{brief(name)} begins outside the file")
            continue
        magic, length, extra = _LOCAL_HEADER.unpack_from(data, at)
        start = at + _LOCAL_HEADER.size + length + extra
        written = data[start - length - extra : start - extra]
        encoding = "utf-8" if entry.flag_bits & 0x800 else "cp437"
        if name in records:
            problems.append(f"{brief(name)} is there twice")
        elif entry.compress_type or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
            problems.append(f"{brief(name)} is compressed or encrypted")
        elif magic != _ZIP or written != entry.orig_filename.encode(encoding):
            problems.append(f"{brief(name)} is not where the directory says")
        elif start + entry.file_size > directory:
            problems.append(f"{brief(name)} ends outside the file")
        records[name] = Record(start, entry.file_size, entry.CRC)
    end, before = 0, ""
    for name, record in sorted(records.items(), key=lambda item: item[1]):
        if record.size and record.start < end:
            problems.append(f"{brief(name)} overlaps {brief(before)}")
        if record.size:
            end, before = record.start + record.size, name
    if problems:
        raise CheckpointError(f"{file}: {listed(problems)}; {DAMAGED}")
    names = [name for name in records if name.endswith("/data.pkl")]
    if any(name.endswith("/constants.pkl") for name in records):
        raise CheckpointError(f"{file} is a TorchScript program, not a state dict; {SAVE_AGAIN}")
    if len(names) != 1:
        raise CheckpointError(
            f"{file}: expected one data.pkl, as torch.save writes, found {len(names)}; {DAMAGED}"
        )
    return records


def looks_like_torch(path: str | Path) -> bool:
    """Whether this is a file of torch.save, whole or not, or a folder that holds one."""
    path = Path(path)
    if path.is_dir():
        return bool(_candidates(path))
    if not path.is_file():
        return False
    try:
        with open(path, "rb") as handle:
            start = handle.read(300)
    except OSError:
        return False
    if start.startswith(_ZIP):
        return b"/data.pkl" in start
    return start.startswith(_LEGACY) or path.suffix in (".pt", ".pth")


def _candidates(folder: Path) -> list[Path]:
    for pattern in ("*.pt", "*.pth", "pytorch_model*.bin"):
        if files := sorted(file for file in folder.glob(pattern) if file.is_file()):
            return files
    return []


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path}: expected a file that torch.save wrote, found none")
    files = _candidates(path)
    if len(files) != 1:
        found = listed(file.name for file in files) or "none"
        raise CheckpointError(f"{path}: expected one .pt file in the folder, found {found}")
    return files[0]


# What the machine makes of a pickle.


class _NotAllowed(Exception):
    """A phrase: what a state dict has no need of."""


class _Global(NamedTuple):
    name: str


class _Other(NamedTuple):
    """Stands for an object that is not a dense tensor."""

    what: str


class _Storage(NamedTuple):
    dtype: str | None  # None: quantized
    start: int
    nbytes: int


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    start: int
    strides: tuple[int, ...]


def _describe(value: Any) -> str:
    # Not repr: a container may be nested without end.
    if isinstance(value, _Tensor):
        return f"a tensor of shape {value.shape}"
    if isinstance(value, _Other | _Global):
        return value[0]
    if isinstance(value, dict | list | tuple | bytes):
        return f"a {type(value).__name__} of {len(value)}"
    return brief(value)


def _rebuild_v2(storage, offset, shape, strides, _grad, _hooks, metadata=None) -> Any:
    return _rebuild_v3(storage, offset, shape, strides, _grad, _hooks, None, metadata)


def _rebuild_v3(storage, offset, shape, strides, _grad, _hooks, dtype, metadata=None) -> Any:
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor without a storage")
    name = storage.dtype if dtype is None else dtype.name.removeprefix("torch.")
    if name not in _ITEM_BYTES:
        return _Other("a tensor of a dtype that numpy lacks")
    if metadata:
        return _Other("a tensor that is a conjugate or negative view")
    for sizes in (shape, strides):
        if not isinstance(sizes, tuple) or len(sizes) > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor of more than {_MAX_DIMENSIONS} dimensions or of none")
    if len(shape) != len(strides) or not all(
        type(n) is int and 0 <= n < 1 << 63 for n in (offset, *shape, *strides)
    ):
        raise ValueError("a tensor with an impossible shape, strides or offset")
    item = _ITEM_BYTES[name]
    tensor = _Tensor(shape, name, storage.start + offset * item, strides)
    span = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if math.prod(max(n, 1) for n in shape) * item >= 1 << 63:
        raise ValueError(f"a tensor of shape {shape}, larger than any memory")
    if 0 not in shape and (offset + span) * item > storage.nbytes:
        raise ValueError(f"a tensor of shape {shape} that reaches beyond its storage")
    return tensor


def _rebuild_from_type(function, _kind, arguments, _state) -> Any:
    return _REDUCE[function.name](*arguments)


# The callables that torch.load(weights_only=True) allows, and what is made in their place.
_REDUCE: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": lambda data, _grad, _hooks: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, _grad, _hooks, _state: data,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch._utils._rebuild_qtensor": lambda *_: _Other("a quantized tensor"),
    "torch._utils._rebuild_sparse_tensor": lambda *_: _Other("a sparse tensor"),
    "torch.serialization._get_layout": lambda _: _Other("a layout"),
    "torch.Size": lambda sizes: sizes,
    "torch.device": lambda *_: _Other("a device"),
    "collections.OrderedDict": lambda: {},  # items come later; given here, they could be endless
    "collections.Counter": lambda *_: _Other("a counter"),
    "_codecs.encode": lambda *_: _Other("bytes"),
}
for _module in ("builtins", "__builtin__"):  # the second: what protocol 2 calls it
    _REDUCE[f"{_module}.set"] = lambda *_: _Other("a set")
    _REDUCE[f"{_module}.complex"] = lambda *_: _Other("a complex number")
    _REDUCE[f"{_module}.bytearray"] = lambda *_: _Other("bytes")
_CONSTANTS = {f"torch.{name}" for name in _ITEM_BYTES}
_CONSTANTS |= {"torch.Tensor", "torch.nn.parameter.Parameter"}
_CONSTANTS |= {f"torch.{name}" for name in _STORAGES} | {"torch.storage.UntypedStorage"}
_CONSTANTS |= {f"torch.Q{kind}Storage" for kind in ("Int8", "Int32", "UInt8", "UInt4x2", "UInt2x4")}
_CONSTANTS |= {f"torch.per_{kind}_affine" for kind in ("tensor", "channel")}


class _Machine:
    """Follows the opcodes of one pickle."""

    def __init__(self, storages: Mapping[str, Record]):
        self._storages = storages
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        # genops decodes the arguments of opcodes and checks their lengths; it makes no objects.
        argument: Any
        for opcode, argument, _ in pickletools.genops(io.BytesIO(data)):
            name = opcode.name
            if name == "STOP":
                return self._stack.pop()
            if name in _PUSHED:
                self._stack.append(argument)
            elif name in _CONSTANT:
                self._stack.append(_CONSTANT[name]())
            elif name in _TUPLES:
                self._stack.append(tuple(self._pop(_TUPLES[name])))
            elif name in ("BINPUT", "LONG_BINPUT"):
                self._memo[argument] = self._stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                self._stack.append(self._memo[argument])
            elif name not in ("PROTO", "FRAME"):
                step = getattr(self, f"op_{name.lower()}", None)
                if step is None:
                    raise _NotAllowed(f"the opcode {name}")
                step(argument)
        raise ValueError("it has no end")

    def op_memoize(self, _) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def op_mark(self, _) -> None:
        self._marks.append(len(self._stack))

    def _since_mark(self) -> list[Any]:
        at = self._marks.pop()
        items = self._stack[at:]
        del self._stack[at:]
        return items

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise ValueError("its stack is empty")
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    def op_tuple(self, _) -> None:
        self._stack.append(tuple(self._since_mark()))

    def op_append(self, _) -> None:
        self._extend(self._pop(1))

    def op_appends(self, _) -> None:
        self._extend(self._since_mark())

    def _extend(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise ValueError("it appends to what is no list")
        self._stack[-1].extend(items)

    def op_additems(self, _) -> None:
        self._since_mark()  # of a set, which is not kept

    def op_setitem(self, _) -> None:
        self._update(self._pop(2))

    def op_setitems(self, _) -> None:
        self._update(self._since_mark())

    def _update(self, items: list[Any]) -> None:
        to = self._stack[-1]
        if not isinstance(to, dict):
            raise ValueError("it sets items of what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Of other kinds, some take for ever to hash, and numbers can be made to collide.
            if not isinstance(key, str) and not (type(key) is int and abs(key) < 1 << 31):
                raise _NotAllowed(f"a dict whose key is {_describe(key)}")
            to[key] = value

    def op_global(self, argument: str) -> None:
        self._stack.append(_allowed(argument.replace(" ", ".", 1)))

    def op_stack_global(self, _) -> None:
        module, name = self._pop(2)
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("it names a global by what is no text")
        self._stack.append(_allowed(f"{module}.{name}"))

    def op_reduce(self, _) -> None:
        function, arguments = self._pop(2)
        if not (isinstance(function, _Global) and function.name in _REDUCE):
            raise _NotAllowed(f"a call of {_describe(function)}")
        if not isinstance(arguments, tuple) or len(arguments) > _MAX_DIMENSIONS:
            raise ValueError("it calls with what are no arguments")
        self._stack.append(_REDUCE[function.name](*arguments))

    def op_build(self, _) -> None:
        self._pop(1)  # attributes, such as the version of a state dict: nothing reads them
        if not isinstance(self._stack[-1], dict | _Other | _Tensor):
            raise _NotAllowed(f"attributes of {_describe(self._stack[-1])}")

    def op_binpersid(self, _) -> None:
        (identifier,) = self._pop(1)
        what, kind, key, _device, size = identifier
        if what != "storage" or not (
            isinstance(kind, _Global) and isinstance(key, str) and type(size) is int
        ):
            raise ValueError("it refers to what is no storage")
        dtype = _STORAGES.get(kind.name.rpartition(".")[2])
        start, available, _ = self._storages[key]
        nbytes = size * (_ITEM_BYTES[dtype] if dtype else 1)
        if not 0 <= nbytes <= available:
            raise ValueError(f"storage {key} needs {nbytes} bytes, but has {available}")
        self._stack.append(_Storage(dtype, start, nbytes))


def _allowed(name: str) -> _Global:
    if name not in _REDUCE and name not in _CONSTANTS:
        raise _NotAllowed(brief(name))
    return _Global(name)


_PUSHED = frozenset(
    "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE SHORT_BINSTRING BINSTRING "
    "SHORT_BINBYTES BINBYTES".split()
)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CONSTANT: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": lambda: _Other("a set"),
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
