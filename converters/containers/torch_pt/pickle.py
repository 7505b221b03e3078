"""Follows the pickle of a torch.save file without running anything in it.

The interpreter knows the opcodes that torch.save writes, and makes nothing but numbers, strings,
containers and descriptions of tensors. It needs no torch.
"""

import io
import math
import pickletools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from griffin_eval.converters.tensors import ITEM_BYTES, MAX_DIMENSIONS, are_naturals
from griffin_eval.messages import brief

STORAGES = {
    **{"BoolStorage": "bool", "ByteStorage": "uint8", "CharStorage": "int8"},
    **{"ShortStorage": "int16", "IntStorage": "int32", "LongStorage": "int64"},
    **{"HalfStorage": "float16", "BFloat16Storage": "bfloat16", "FloatStorage": "float32"},
    **{"DoubleStorage": "float64", "ComplexFloatStorage": "complex64"},
    **{"ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8"},
}


class Record(NamedTuple):
    """The place of one entry of a zip in its file, and the CRC-32 that the directory states."""

    start: int
    size: int
    checksum: int


class NotAllowed(Exception):
    """A pickle contains something that no state dict needs; the message is a noun phrase."""


class _Global(NamedTuple):
    name: str


class _Other(NamedTuple):
    """A placeholder for an object that is not a dense tensor."""

    what: str


class _Storage(NamedTuple):
    dtype: str | None  # None: quantized
    start: int
    nbytes: int


class FoundTensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    start: int
    strides: tuple[int, ...]


def describe(value: Any) -> str:
    # Not repr: a container may be nested without end.
    if isinstance(value, FoundTensor):
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
    if name not in ITEM_BYTES:
        return _Other("a tensor of a dtype that numpy lacks")
    if metadata:
        return _Other("a tensor that is a conjugate or negative view")
    for sizes in (shape, strides):
        if not isinstance(sizes, tuple) or len(sizes) > MAX_DIMENSIONS:
            raise ValueError(f"a tensor of more than {MAX_DIMENSIONS} dimensions or of none")
    if len(shape) != len(strides) or not are_naturals((offset, *shape, *strides)):
        raise ValueError("a tensor with an impossible shape, strides or offset")
    item = ITEM_BYTES[name]
    tensor = FoundTensor(shape, name, storage.start + offset * item, strides)
    span = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if math.prod(max(n, 1) for n in shape) * item >= 1 << 63:
        raise ValueError(f"a tensor of shape {shape}, larger than any memory")
    if 0 not in shape and (offset + span) * item > storage.nbytes:
        raise ValueError(f"a tensor of shape {shape} that reaches beyond its storage")
    return tensor


def _rebuild_from_type(function, _kind, arguments, _state) -> Any:
    return _REDUCE[function.name](*arguments)


# Callables that torch.load(weights_only=True) allows, and io.BytesIO, with the functions that are
# called instead of them.
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
    "collections.OrderedDict": lambda: {},  # items come later; arguments here could be endless
    "collections.Counter": lambda *_: _Other("a counter"),
    "_codecs.encode": lambda *_: _Other("bytes"),
    "_io.BytesIO": lambda: _Other("bytes"),  # the extra state of a layer of Transformer Engine
}
for _module in ("builtins", "__builtin__"):  # the second is protocol 2's name
    _REDUCE[f"{_module}.set"] = lambda *_: _Other("a set")
    _REDUCE[f"{_module}.complex"] = lambda *_: _Other("a complex number")
    _REDUCE[f"{_module}.bytearray"] = lambda *_: _Other("bytes")
_CONSTANTS = {f"torch.{name}" for name in ITEM_BYTES}
_CONSTANTS |= {"torch.Tensor", "torch.nn.parameter.Parameter"}
_STORAGE_TYPES = {f"torch.{name}" for name in STORAGES} | {"torch.storage.UntypedStorage"}
_STORAGE_TYPES |= {
    f"torch.Q{kind}Storage" for kind in ("Int8", "Int32", "UInt8", "UInt4x2", "UInt2x4")
}
_CONSTANTS |= _STORAGE_TYPES
_CONSTANTS |= {f"torch.per_{kind}_affine" for kind in ("tensor", "channel")}


class PickleInterpreter:
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
                    raise NotAllowed(f"the opcode {name}")
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
        self._since_mark()  # drop the items of a set, which is not kept

    def op_setitem(self, _) -> None:
        self._update(self._pop(2))

    def op_setitems(self, _) -> None:
        self._update(self._since_mark())

    def _update(self, items: list[Any]) -> None:
        to = self._stack[-1]
        if not isinstance(to, dict):
            raise ValueError("it sets items of what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Other kinds of keys can take for ever to hash, and numbers can be made to collide.
            if not isinstance(key, str) and not (type(key) is int and abs(key) < 1 << 31):
                key = f"{describe(key)}, entry {len(to)}"
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
            raise NotAllowed(f"a call of {describe(function)}")
        if not isinstance(arguments, tuple) or len(arguments) > MAX_DIMENSIONS:
            raise ValueError("it calls with what are no arguments")
        self._stack.append(_REDUCE[function.name](*arguments))

    op_newobj = op_reduce

    def op_build(self, _) -> None:
        self._pop(1)  # attributes, such as the version of a state dict: nothing reads them
        if not isinstance(self._stack[-1], dict | _Other | FoundTensor):
            raise NotAllowed(f"attributes of {describe(self._stack[-1])}")

    def op_binpersid(self, _) -> None:
        (identifier,) = self._pop(1)
        what, kind, key, _device, size = identifier
        known = isinstance(kind, _Global) and kind.name in _STORAGE_TYPES
        if what != "storage" or not (known and isinstance(key, str) and type(size) is int):
            raise ValueError("it refers to what is no storage")
        dtype = STORAGES.get(kind.name.rpartition(".")[2])
        start, available, _ = self._storages[key]
        nbytes = size * (ITEM_BYTES[dtype] if dtype else 1)
        if not 0 <= nbytes <= available:
            raise ValueError(f"storage {key} needs {nbytes} bytes, but has {available}")
        self._stack.append(_Storage(dtype, start, nbytes))


def _allowed(name: str) -> _Global:
    if name not in _REDUCE and name not in _CONSTANTS:
        raise NotAllowed(brief(name))
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
