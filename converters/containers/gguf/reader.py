"""Reads the tensors of a GGUF file: its header checked in full, data mapped, never copied.

The format, little-endian: ``GGUF``, the version, how many tensors and how many metadata there are;
metadata, each a name, a type and a value; tensors, each a name, its dimensions in reverse, a type
and an offset; then the data, from the next multiple of the alignment on, each tensor at such a
multiple. The gguf library knows the types. Its own reader trusts counts and lengths, so that the
header, which is untrusted, is read here: nothing is read at an offset that was not checked.
"""

import math
import mmap
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from griffin_eval.converters.arrays.dtypes import numpy_dtype
from griffin_eval.converters.containers.container import MAX_NAME, natural_key
from griffin_eval.converters.containers.gguf.library import gguf
from griffin_eval.converters.containers.mmap_reader import MappedTensors
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import list_folder
from griffin_eval.messages import DAMAGED, brief, listed

if TYPE_CHECKING:
    import numpy as np
    import torch

MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # before 2, counts had 32 bits
# Types whose elements are stored one by one, and numpy's name of them.
_PLAIN = {
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
}
_STRING, _ARRAY = 8, 9
# Types of metadata of one size, as `struct` has them.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_SCALARS |= {10: "Q", 11: "q", 12: "d"}
_MAX_HEADER = 100_000_000  # bytes, as of safetensors
_MAX_DIMENSIONS = 4  # of ggml
_ALIGNMENT = "general.alignment"
_PARTS = "split.count"


class GgufTensor(NamedTuple):
    """The place of one tensor in the file.

    Attributes:
        name: its name.
        shape: of the array that is stored: the tensor's own, or, if it is quantised, blocks and
            the bytes of a block.
        dtype: numpy's name of it, or, if it is quantised, GGUF's, such as ``"Q4_K"``.
        dequantised_shape: the tensor's own shape.
        file: the file.
        start: first byte, counted from the start of the file.
        nbytes: bytes that it takes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dequantised_shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int

    @property
    def quantised(self) -> bool:
        return self.dtype not in _PLAIN.values()


class GgufFile(MappedTensors[GgufTensor]):
    """The tensors of a GGUF file, those that are quantised as blocks of bytes.

    Opening reads and checks the header, and maps the file; no tensor is read.

    Attributes:
        file: the file.
        tensors: every tensor by name, in natural order (layer 2 before layer 10).
        left_out: the metadata, by name.

    Args:
        path: the file, or a folder that holds one such file.

    Raises:
        CheckpointError: no or several such files, one that is truncated, contradicts itself, is
            big-endian or a part of several, or has tensors of a type that cannot be dequantised.
        MissingExtraError: the gguf library is not installed.
    """

    def __init__(self, path: str | Path):
        self.file = _find_file(Path(path))
        super().__init__(self.file)
        data = self._mapped(self.file)
        try:
            tensors = self._read(_Header(data), len(data))
        except ValueError as error:
            raise CheckpointError(f"{self.file} {error}; {DAMAGED}") from None
        self.tensors = {t.name: t for t in sorted(tensors, key=lambda t: natural_key(t.name))}

    def files(self) -> Iterable[Path]:
        return [self.file]

    def describe(self) -> str:
        return "GGUF"

    def numpy(self, name: str) -> "np.ndarray":
        """The tensor as a read-only array over the mapped file; blocks as uint8."""
        import numpy as np

        tensor = self._find(name)
        dtype = np.dtype(np.uint8) if tensor.quantised else numpy_dtype(tensor.dtype)
        data = self._mapped(self.file)
        return np.frombuffer(data, dtype, math.prod(tensor.shape), tensor.start).reshape(
            tensor.shape
        )

    def torch(self, name: str) -> "torch.Tensor":
        """The tensor over a private mapping of the file: pages are shared until written to."""
        import torch

        tensor = self._find(name)
        dtype = torch.uint8 if tensor.quantised else getattr(torch, tensor.dtype)
        count = math.prod(tensor.shape)
        if not count:
            return torch.empty(tensor.shape, dtype=dtype)
        data = self._mapped(self.file, mmap.ACCESS_COPY)
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=tensor.start)
        return flat.reshape(tensor.shape)

    def _read(self, header: "_Header", size: int) -> list[GgufTensor]:
        """The tensors; ValueError, a phrase that follows the file, if the header is damaged."""
        metadata = header.metadata()
        parts = metadata.get(_PARTS, 1)
        if parts != 1:
            raise CheckpointError(
                f"{self.file} is one of {brief(parts)} parts of a model: join them with "
                "llama-gguf-split --merge"
            )
        alignment = metadata.get(_ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"has {_ALIGNMENT} {brief(alignment)}, expected a power of two")
        self.left_out = dict.fromkeys(metadata, "metadata, from which no config is read")
        entries = [header.tensor() for _ in range(header.tensors)]
        start = -(-header.at // alignment) * alignment
        tensors, problems = [], []
        for entry in entries:
            try:
                tensors.append(_place(entry, self.file, start, alignment))
            except ValueError as error:
                problems.append(f"{brief(entry.name)} {error}")
        names = [entry.name for entry in entries]
        problems += [
            f"{brief(n)} is there twice" for n in dict.fromkeys(names) if names.count(n) > 1
        ]
        problems = problems or _offset_problems(tensors, start, size, alignment)
        if problems:
            raise CheckpointError(f"{self.file}: {listed(problems)}; {DAMAGED}")
        return tensors


class _Entry(NamedTuple):
    """A tensor as the header states it: dimensions from the innermost one on."""

    name: str
    dimensions: tuple[int, ...]
    type: int
    offset: int


class _Header:
    """The header, read from its beginning on; ValueError, a phrase that follows
    the file, wherever it is not as it must be.

    Attributes:
        at: the byte that is read next.
        tensors: how many there are.
    """

    def __init__(self, data: mmap.mmap):
        self._data, self._end, self.at = data, min(len(data), _MAX_HEADER), 0
        magic, version, big = *self._unpack("4sI"), struct.unpack(">I", data[4:8])[0]
        if magic != MAGIC:
            raise ValueError(f"is no GGUF file: it begins with {brief(magic)}")
        if big in _VERSIONS:
            raise ValueError("is big-endian, and only little-endian files are read")
        if version not in _VERSIONS:
            raise ValueError(f"is GGUF of version {version}, expected one of {brief(_VERSIONS)}")
        self.tensors, self._metadata = self._unpack("QQ")

    def metadata(self) -> dict[str, Any]:
        """The metadata by name: numbers, and None in place of whatever else there is."""
        found: dict[str, Any] = {}
        for _ in range(self._metadata):
            name, (kind,) = self._name(), self._unpack("I")
            if name in found:
                raise ValueError(f"has the metadata {brief(name)} twice")
            found[name] = self._value(name, kind)
        return found

    def tensor(self) -> _Entry:
        """The next tensor."""
        name, (count,) = self._name(), self._unpack("I")
        if count > _MAX_DIMENSIONS:
            raise ValueError(
                f"has {brief(name)} of {count} dimensions, expected at most {_MAX_DIMENSIONS}"
            )
        dimensions = self._unpack(f"{count}Q")
        return _Entry(name, dimensions, *self._unpack("IQ"))

    def _value(self, name: str, kind: int) -> Any:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            self._skip(*self._unpack("Q"))
            return None
        if kind != _ARRAY:
            raise ValueError(f"has metadata {brief(name)} of the unknown type {kind}")
        kind, count = self._unpack("IQ")
        if kind in _SCALARS:
            self._skip(count * struct.calcsize(_SCALARS[kind]))
        elif kind == _STRING:
            for _ in range(count):  # ends with the file at the latest
                self._skip(*self._unpack("Q"))
        else:
            raise ValueError(f"has metadata {brief(name)}, an array of the type {kind}")
        return None

    def _name(self) -> str:
        (length,) = self._unpack("Q")
        if not length:
            raise ValueError(f"has an empty name at byte {self.at}")
        if length > MAX_NAME:
            raise ValueError(f"has a name of {length} bytes, expected at most {MAX_NAME}")
        start = self.at
        self._skip(length)
        try:
            return self._data[start : self.at].decode()
        except UnicodeDecodeError:
            raise ValueError("has a name that is not UTF-8") from None

    def _unpack(self, format: str) -> tuple[Any, ...]:
        start, nbytes = self.at, struct.calcsize(f"<{format}")
        self._skip(nbytes)
        return struct.unpack_from(f"<{format}", self._data, start)

    def _skip(self, nbytes: int) -> None:
        if nbytes > self._end - self.at:
            raise ValueError(
                f"has a header that goes on for {nbytes} bytes at byte {self.at}, but only "
                f"{self._end - self.at} are there"
            )
        self.at += nbytes


def _place(entry: _Entry, file: Path, start: int, alignment: int) -> GgufTensor:
    """One tensor; ValueError, a phrase that follows its name, if the entry contradicts itself.

    Args:
        entry: as the header states it.
        file: that holds it.
        start: byte of the file from which on offsets count.
        alignment: of the offsets.
    """
    types, quants = gguf().GGMLQuantizationType, gguf().quants
    try:
        kind = types(entry.type)
        block, nbytes = gguf().GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ValueError(
            f"has the type {entry.type}, which the gguf library does not know"
        ) from None
    shape = tuple(reversed(entry.dimensions))
    if (
        math.prod(max(n, 1) for n in shape) * max(nbytes, 8) >= 1 << 63
    ):  # also with a zero among them
        raise ValueError(f"has shape {brief(shape)}, larger than any memory")
    if entry.offset % alignment or entry.offset >= 1 << 63:
        raise ValueError(f"has the offset {entry.offset}, no multiple of {alignment}")
    size = math.prod(shape)
    stored, dtype = shape, _PLAIN.get(kind.name)
    if dtype is None:
        if not shape or shape[-1] % block:
            raise ValueError(f"is {shape}, no rows of whole blocks of {block} ({kind.name})")
        try:
            quants.dequantize(_zeros(nbytes), kind)
        except NotImplementedError:
            raise ValueError(
                f"is {kind.name}, which the gguf library does not dequantise"
            ) from None
        stored, dtype = (size // block, nbytes), kind.name
    at = start + entry.offset
    return GgufTensor(entry.name, stored, dtype, shape, file, at, size // block * nbytes)


def _zeros(nbytes: int) -> "np.ndarray":
    """A block of so many bytes."""
    import numpy as np

    return np.zeros((1, nbytes), np.uint8)


def _offset_problems(
    tensors: Sequence[GgufTensor], start: int, size: int, alignment: int
) -> list[str]:
    """What is wrong with the places of tensors: one behind the other, up to the end of the file."""
    problems, expected, before = [], start, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.start, t.nbytes)):
        gap, end = tensor.start - expected, tensor.start + tensor.nbytes
        if end > size:
            problems.append(f"{tensor.name!r} ends at byte {end} of a file of {size}")
        if gap < 0:
            problems.append(f"{tensor.name!r} overlaps {before}")
        elif gap >= alignment:
            problems.append(f"{gap} bytes between {before} and {tensor.name!r} are unused")
        expected, before = max(expected, end), repr(tensor.name)
    if size - expected >= alignment and not problems:
        problems.append(f"{size - expected} bytes after {before} are unused")
    return problems


def gguf_files(names: Iterable[str]) -> list[str]:
    """The GGUF files among the names of files in a folder."""
    return sorted(name for name in names if name.endswith(".gguf"))


def looks_like_gguf(path: Path) -> bool:
    """Whether this is a GGUF file, whole or not, or a folder that holds one."""
    if path.is_dir():
        return bool(gguf_files(list_folder(path)))
    if not path.is_file():
        return False
    with open(path, "rb") as handle:
        return handle.read(4) == MAGIC or path.suffix == ".gguf"


def _find_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = gguf_files(name for name in list_folder(path) if (path / name).is_file())
    if len(files) != 1:
        raise CheckpointError(
            f"{path}: expected one .gguf file in the folder, found {listed(files) or 'none'}: give "
            "the path of the one that is meant"
        )
    return path / files[0]
