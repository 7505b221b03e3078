"""Reads the msgpack files of flax and of Orbax's first versions: arrays are mapped, never loaded.

A file is one msgpack map of maps. An array is extension 1: a msgpack list of shape, numpy's name
of the dtype, and bytes. Arrays beyond 1 GiB are maps of flat chunks. Where Orbax stored an array
elsewhere, the leaf is a string ``PLACEHOLDER://name``.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.converters.files import TensorFile
from griffin_eval.converters.tensors import LazyTensor, are_naturals, by_rows, numpy_dtype
from griffin_eval.errors import CheckpointError
from griffin_eval.messages import DAMAGED, brief

PLACEHOLDER = "PLACEHOLDER://"

_DEPTH = 64
_CHUNKED = "__msgpack_chunked_array__"
_ARRAY = 1
_MAX_VALUES = 1 << 17  # far more than any model has; more of a hostile file would fill the memory
# First byte -> number of bytes that hold a length, and the kind of value that has this length.
_SIZED = {
    **{0xC4: (1, "bytes"), 0xC5: (2, "bytes"), 0xC6: (4, "bytes")},
    **{0xC7: (1, "ext"), 0xC8: (2, "ext"), 0xC9: (4, "ext")},
    **{0xD9: (1, "str"), 0xDA: (2, "str"), 0xDB: (4, "str")},
    **{0xDC: (2, "list"), 0xDD: (4, "list"), 0xDE: (2, "map"), 0xDF: (4, "map")},
}
_NUMBERS = dict(zip(range(0xCA, 0xD4), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8), strict=True))  # bytes
_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_OTHER = object()  # an extension that is no array, such as a scalar


def read_msgpack(path: Path) -> dict[tuple[str, ...], Any]:
    """Return leaves by their keys: `LazyTensor`, or numbers, strings and None as they are;
    CheckpointError if the file cannot be read, or is no msgpack of this kind."""
    try:
        file = TensorFile(path)
        tree, end = _Decoder(file).value(0, 0)
        if not isinstance(tree, dict):
            raise ValueError("no map at its beginning")
        if end != len(file.data):
            raise ValueError(f"{len(file.data) - end} bytes after its end")
        return dict(_leaves(tree, ()))
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: expected msgpack as flax writes it, found {error}; {DAMAGED}"
        ) from None


def _leaves(tree: dict[str, Any], keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, list):
            value = {str(i): item for i, item in enumerate(value)}
        if not isinstance(value, dict):
            yield (*keys, key), value
        elif value.get(_CHUNKED) is True:
            yield (*keys, key), _joined(value)
        elif value:
            yield from _leaves(value, (*keys, key))


def _joined(value: dict[str, Any]) -> LazyTensor:
    chunks, sizes = value.get("chunks"), value.get("shape")
    if not isinstance(chunks, dict) or not isinstance(sizes, dict) or not chunks:
        raise ValueError("a chunked array without chunks or shape")
    parts = [part for i in range(len(chunks)) if isinstance(part := chunks.get(str(i)), LazyTensor)]
    shape = tuple(n for i in range(len(sizes)) if type(n := sizes.get(str(i))) is int)
    if len(parts) < len(chunks) or len(shape) < len(sizes) or not are_naturals(shape):
        raise ValueError("a chunked array whose chunks or shape are malformed")
    lengths = [math.prod(part.shape) for part in parts]
    one_kind = len({part.dtype for part in parts}) == 1 and all(len(p.shape) == 1 for p in parts)
    if not one_kind or sum(lengths) != math.prod(shape):
        raise ValueError(f"chunks that do not make up an array of shape {shape}")
    row = math.prod(shape[1:])

    def rows(start: int, stop: int) -> np.ndarray:
        out, at = np.empty((stop - start) * row, numpy_dtype(parts[0].dtype)), -start * row
        for part, length in zip(parts, lengths, strict=True):
            begin, end = max(0, at), min(len(out), at + length)
            if begin < end:
                out[begin:end] = part.rows(begin - at, end - at)
            at += length
        return out.reshape(stop - start, *shape[1:])

    return by_rows(tuple(shape), parts[0].dtype, rows, nbytes=sum(part.nbytes for part in parts))


class _Decoder:
    """A decoder of a file's values that reads nothing beyond the file, and limits their number."""

    def __init__(self, file: TensorFile):
        self._file, self._data, self._left = file, memoryview(file.data), _MAX_VALUES

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        """Return the value at an offset, and the offset after it."""
        self._left -= 1
        if depth > _DEPTH or self._left < 0:
            raise ValueError("maps nested too deeply" if depth > _DEPTH else "too many values")
        first, at = self._taken(at, 1)[0], at + 1
        if first <= 0x7F:
            return first, at
        if first >= 0xE0:
            return first - 0x100, at
        if first in _CONSTANTS:
            return _CONSTANTS[first], at
        if first in _NUMBERS:  # values matter only in shapes, so a float may become NaN
            size = _NUMBERS[first]
            number = int.from_bytes(self._taken(at, size), "big", signed=first >= 0xD0)
            return (float("nan") if first in (0xCA, 0xCB) else number), at + size
        if first <= 0x8F:
            kind, count = "map", first & 0x0F
        elif first <= 0x9F:
            kind, count = "list", first & 0x0F
        elif first <= 0xBF:
            kind, count = "str", first & 0x1F
        elif first in _EXTENSIONS:
            kind, count = "ext", _EXTENSIONS[first]
        elif first in _SIZED:
            width, kind = _SIZED[first]
            count, at = int.from_bytes(self._taken(at, width), "big"), at + width
        else:
            raise ValueError(f"the byte {first:#x} at {at - 1}")
        if kind in ("map", "list"):
            items = []
            for _ in range(2 * count if kind == "map" else count):
                item, at = self.value(at, depth + 1)
                items.append(item)
            return (_entries(items) if kind == "map" else items), at
        if kind == "ext":
            code, at = self._taken(at, 1)[0], at + 1
            self._taken(at, count)
            array = self._array(at, at + count, depth) if code == _ARRAY else _OTHER
            return array, at + count
        content = self._taken(at, count)
        return (str(content, "utf-8") if kind == "str" else _Bytes(at, at + count)), at + count

    def _array(self, at: int, end: int, depth: int) -> LazyTensor:
        fields, after = self.value(at, depth + 1)
        if after != end or not isinstance(fields, list) or len(fields) != 3:
            raise ValueError(f"no array at {at}")
        shape, name, data = fields
        if isinstance(name, _Bytes):
            name = str(self._data[name.start : name.stop], "ascii")
        if not isinstance(name, str) or not name.isidentifier():  # numpy reads "(2,)f4" as Python
            raise ValueError(f"an array of {brief(name)}")
        dtype = numpy_dtype(name)
        nbytes = data.stop - data.start if isinstance(data, _Bytes) else -1
        if (
            not are_naturals(shape)
            or dtype.hasobject
            or dtype.itemsize * math.prod(shape) != nbytes
        ):
            raise ValueError(f"an array of {name} and shape {brief(shape)} with {nbytes} bytes")
        tensor = self._file.tensor(tuple(shape), name, data.start)
        return dataclasses.replace(tensor, view=None)  # its elements may begin at any byte

    def _taken(self, at: int, count: int) -> memoryview:
        if at + count > len(self._data):
            raise ValueError(f"an end at {len(self._data)}, expected {at + count} bytes")
        return self._data[at : at + count]


class _Bytes(NamedTuple):
    """The place of bytes in the file."""

    start: int
    stop: int


def _entries(items: list[Any]) -> dict[str, Any]:
    """Return the entries of a map from a list of alternating keys and values."""
    entries: dict[str, Any] = {}
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | int):
            raise ValueError("a key that is neither a string nor a number")
        if str(key) in entries:
            raise ValueError(f"the key {str(key)!r} twice")
        entries[str(key)] = value
    return entries
