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
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from griffin_eval.converters.containers.container import MAX_NAME, Container, in_natural_order
from griffin_eval.converters.files import TensorFile
from griffin_eval.converters.quantised import Quantised, dequantised
from griffin_eval.converters.tensors import LazyTensor
from griffin_eval.errors import CheckpointError, MissingExtraError
from griffin_eval.json_files import list_folder
from griffin_eval.messages import DAMAGED, brief, listed

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # before 2, counts had 32 bits
# Types that are not in blocks -> numpy's names of their dtypes.
_PLAIN = {
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
}
_STRING, _ARRAY = 8, 9
# Types of metadata of one size, as `struct` has them.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_SCALARS |= {10: "Q", 11: "q", 12: "d"}
_MAX_HEADER = 100_000_000  # bytes, the same limit as safetensors has
_MAX_DIMENSIONS = 4  # ggml's limit
_ALIGNMENT = "general.alignment"
_PARTS = "split.count"
_TOGETHER = 1 << 16  # elements passed at a time to the library, which copies them often


def gguf() -> Any:
    """Return the gguf library, imported when it is needed; MissingExtraError if it is not
    installed."""
    try:
        import gguf
    except ImportError:
        raise MissingExtraError("gguf", "gguf") from None
    return gguf


def open_gguf(path: str | Path) -> Container:
    """Open a GGUF file, or a folder that holds one; blocks are dequantised to float32 by the
    gguf library.

    Opening reads and checks the header, and maps the file; no tensor is read.

    Raises:
        CheckpointError: no or several such files, one that is truncated, contradicts itself, is
            big-endian or a part of several, or has tensors of a type that cannot be dequantised.
        MissingExtraError: the gguf library is not installed.
    """
    file = TensorFile(_find_file(Path(path)))
    try:
        tensors, left_out = _read(file, _Header(file.data))
    except CheckpointError:  # it is a ValueError, and names the file already
        raise
    except ValueError as error:
        raise CheckpointError(f"{file.path} {error}; {DAMAGED}") from None
    files = [file.path]
    return Container(in_natural_order(tensors), "GGUF", lambda: files, left_out)


def _read(file: TensorFile, header: "_Header") -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Return the tensors, and the metadata as entries that are left out; ValueError, a phrase that
    follows the file's name, if the header is damaged."""
    metadata = header.metadata()
    parts = metadata.get(_PARTS, 1)
    if parts not in (0, 1):  # llama-gguf-split --merge writes 0
        raise CheckpointError(
            f"{file.path} is one of {brief(parts)} parts of a model: join them with "
            "llama-gguf-split --merge"
        )
    alignment = metadata.get(_ALIGNMENT, 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"has {_ALIGNMENT} {brief(alignment)}, expected a power of two")
    entries = [header.tensor() for _ in range(header.tensors)]
    start = -(-header.at // alignment) * alignment
    counts = Counter(entry.name for entry in entries)
    problems = [f"{brief(name)} is there twice" for name, count in counts.items() if count > 1]
    places, tensors = [], {}
    for entry in entries:
        try:
            at, stored, tensors[entry.name] = _place(entry, file, start, alignment)
            places.append((at, stored, entry.name))
        except ValueError as error:
            problems.append(f"{brief(entry.name)} {error}")
    problems = problems or _offset_problems(sorted(places), start, len(file.data), alignment)
    if problems:
        raise CheckpointError(f"{file.path}: {listed(problems)}; {DAMAGED}")
    return tensors, dict.fromkeys(metadata, "metadata, from which no config is read")


class _Entry(NamedTuple):
    """A tensor as the header states it: dimensions from the innermost one on."""

    name: str
    dimensions: tuple[int, ...]
    type: int
    offset: int


class _Header:
    """A reader of the header from its beginning on; ValueError, a phrase that follows the file's
    name, where the header is malformed. ``at`` is the byte that is read next."""

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
        """Return the metadata by name: numbers, and None in place of other values."""
        found: dict[str, Any] = {}
        for _ in range(self._metadata):
            name, (kind,) = self._name(), self._unpack("I")
            if name in found:
                raise ValueError(f"has the metadata {brief(name)} twice")
            found[name] = self._value(name, kind)
        return found

    def tensor(self) -> _Entry:
        """Return the next tensor."""
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


def _place(
    entry: _Entry, file: TensorFile, start: int, alignment: int
) -> tuple[int, int, LazyTensor]:
    """Return a tensor's offset and size in bytes, and the tensor; ValueError, a phrase that follows
    the tensor's name, if the entry contradicts itself."""
    import numpy as np

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
    ):  # a dimension of zero must not hide the others
        raise ValueError(f"has shape {brief(shape)}, larger than any memory")
    if entry.offset % alignment or entry.offset >= 1 << 63:
        raise ValueError(f"has the offset {entry.offset}, no multiple of {alignment}")
    at, size = start + entry.offset, math.prod(shape)
    if dtype := _PLAIN.get(kind.name):
        return at, size * nbytes, file.tensor(shape, dtype, at)
    if not shape or shape[-1] % block:
        raise ValueError(f"is {shape}, no rows of whole blocks of {block} ({kind.name})")
    try:
        quants.dequantize(np.zeros((1, nbytes), np.uint8), kind)
    except NotImplementedError:
        raise ValueError(f"is {kind.name}, which the gguf library does not dequantise") from None
    blocks = file.tensor((size // block, nbytes), "uint8", at)

    def values(first: int, last: int) -> "np.ndarray":
        # Pass the blocks as one row: the library would handle few rows at a time.
        return quants.dequantize(blocks.rows(first, last).reshape(1, -1), kind)[0]

    facts = Quantised("gguf", f"{kind.name} in blocks of {block}", 8 * nbytes / block)
    tensor = dequantised(shape, "float32", block, values, facts, _TOGETHER)
    return at, blocks.nbytes, tensor


def _offset_problems(
    places: Sequence[tuple[int, int, str]], start: int, size: int, alignment: int
) -> list[str]:
    """Return a clause for each tensor that is out of place: tensors must follow each other without
    gaps up to the end of the file."""
    problems, expected, before = [], start, "the header"
    for begin, nbytes, name in places:
        gap, end = begin - expected, begin + nbytes
        if end > size:
            problems.append(f"{name!r} ends at byte {end} of a file of {size}")
        if gap < 0:
            problems.append(f"{name!r} overlaps {before}")
        elif gap >= alignment:
            problems.append(f"{gap} bytes between {before} and {name!r} are unused")
        expected, before = max(expected, end), repr(name)
    if size - expected >= alignment and not problems:
        problems.append(f"{size - expected} bytes after {before} are unused")
    return problems


def gguf_files(names: Iterable[str]) -> list[str]:
    """Return the GGUF files among the names of files in a folder."""
    return sorted(name for name in names if name.endswith(".gguf"))


def one_gguf(names: list[str], where: str) -> list[str]:
    """Return the GGUF file of a folder on the hub; CheckpointError if there are several."""
    files = gguf_files(names)
    if len(files) > 1:
        raise CheckpointError(
            f"{where}: expected one .gguf file, found {listed(files)}; download the one that is "
            "meant and give its path"
        )
    return files


def looks_like_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, whole or damaged, or a folder that holds one."""
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
