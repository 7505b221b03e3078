"""Reads the tensors of a safetensors folder: headers checked in full, data mapped, never copied.

No framework is needed to open a folder and check it; numpy and torch are imported only by the
methods that return their arrays. The format: 8 bytes, the length N of the header, little-endian;
N bytes of JSON, ``{name: {"dtype", "shape", "data_offsets": [begin, end]}}``; the data, without
holes or overlaps. The header is untrusted: nothing is read at an offset that was not checked.
"""

import fnmatch
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

from griffin_eval.converters.containers.container import (
    MAX_NAME,
    Container,
    in_natural_order,
    natural_key,
)
from griffin_eval.converters.files import TensorFile
from griffin_eval.converters.tensors import (
    FLOATS,
    ITEM_BYTES,
    MAX_DIMENSIONS,
    LazyTensor,
    Region,
    Shape,
    are_naturals,
)
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import exists, list_folder, parse_json, read_json
from griffin_eval.messages import DAMAGED, brief, listed

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
TORCH_FILE = "pytorch_model.bin"  # transformers reads it if there is no file of safetensors
# numpy's names of dtypes -> safetensors' names.
CODES = {
    **{"bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16"},
    **{"uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64", "complex64": "C64"},
    **{"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"},
}
_SHARD = re.compile(r"-of-0*([2-9]|[1-9][0-9]+)\.safetensors$")


def model_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Return the safetensors files of the model in a folder, and the ``weight_map`` of its
    index, if any.

    They are ``model.safetensors``, the shards that its index names, or the only such file.

    Raises:
        CheckpointError: no folder, no model or several, an index that is malformed, leads out of
            the folder, or names shards that are not there.
    """
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise CheckpointError(f"{folder}: expected a folder with {SINGLE_FILE}, found {found}")
    single, index_path = folder / SINGLE_FILE, folder / INDEX_FILE
    if index_path.is_file():
        index = _read_index(index_path)
        files = sorted({folder / name for name in index.values()})
        if single.is_file() and single not in files:
            raise CheckpointError(
                f"{folder} holds two models, {SINGLE_FILE} and the shards of {INDEX_FILE}: "
                "remove the one that is not meant"
            )
        missing = [file for file in files if not (exists(file) and file.is_file())]
        if absent := [repr(file.name) for file in missing]:
            raise CheckpointError(
                f"{index_path} names {len(absent)} of {len(files)} shards that are not there: "
                f"{listed(absent)}; download or save the folder again"
            )
        return files, index
    names = [name for name in model_names(list_folder(folder)) if (folder / name).is_file()]
    names = [name for name in names if name.endswith(".safetensors")]
    if names:
        return [folder / only_file(str(folder), names)], None
    others = listed(list_folder(folder)) or "nothing"
    raise CheckpointError(
        f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}, found {others}; other formats have to "
        "be converted first"
    )


def model_names(names: Iterable[str]) -> list[str]:
    """Return the names of safetensors files and indexes in a folder that may be a model's: those
    that transformers reads, or, without its ``pytorch_model.bin``, all. An adapter's file is left
    out if there is another."""
    names = list(names)
    pattern = "model*.safetensors*" if TORCH_FILE in names else "*.safetensors*"
    found = fnmatch.filter(names, pattern)
    return [name for name in found if name != ADAPTER_FILE] or found


def weight_files(names: list[str], where: str) -> list[str]:
    """Return the files of weights among those of a folder; raises as `only_file` does."""
    files = [name for name in model_names(names) if name.endswith(".safetensors")]
    return files if INDEX_FILE in names else [only_file(where, files)]


def only_file(where: str, names: Sequence[str]) -> str:
    """Return the safetensors file of a model that has no index: ``model.safetensors``, or the
    only one; CheckpointError if there are several, or it is a shard."""
    if SINGLE_FILE in names:
        return SINGLE_FILE
    if len(names) == 1 and not _SHARD.search(names[0]):
        return names[0]
    raise CheckpointError(
        f"{where}: expected {SINGLE_FILE}, one *.safetensors file, or shards with {INDEX_FILE}, "
        f"found only {listed(names)}; download the index too, or save the model again"
    )


def _read_index(path: Path) -> dict[str, str]:
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        found = "an empty one" if index == {} else f"a {type(index).__name__}"
        raise CheckpointError(
            f"{path}: expected an object 'weight_map' from tensor names to file names, found "
            f"{found}; {DAMAGED}"
        )
    problems = [
        f"{name!r} is in {brief(file)}"
        for name, file in index.items()
        if not isinstance(file, str) or not file or leads_out(file)
    ]
    if problems:
        raise CheckpointError(
            f"{path}: {listed(problems)}; expected names of files within the same folder"
        )
    return index


def leads_out(path: str) -> bool:
    parts = PurePosixPath(path)
    return "\\" in path or parts.is_absolute() or ".." in parts.parts


# Bits of an element, by safetensors' name of the dtype.
_BITS = {
    **{code: 8 * ITEM_BYTES[name] for name, code in CODES.items()},
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
}
_NAMES = {code: name for name, code in CODES.items()}
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library


class _Entry(NamedTuple):
    """The place of one tensor in a file.

    Attributes:
        code: safetensors' name of its dtype, such as ``"BF16"``.
        begin, end: First byte and one past the last, counted from the start of the file.
    """

    name: str
    shape: Shape
    code: str
    file: TensorFile
    begin: int
    end: int

    def tensor(self) -> LazyTensor:
        """Return the tensor; of a dtype that numpy lacks, only its facts."""
        name = _NAMES.get(self.code)
        if name is None:
            return LazyTensor(self.shape, self.code, self._refuse, nbytes=self.end - self.begin)
        dtype = name if name in FLOATS else self.code
        return self.file.tensor(self.shape, dtype, self.begin, stored_as=name)

    def _refuse(self, region: Region) -> NoReturn:
        raise CheckpointError(
            f"{self.file.path}: {self.name!r} is {self.code}, which numpy cannot hold; "
            f"expected one of {', '.join(CODES[float] for float in FLOATS)}"
        )


def open_safetensors(folder: str | Path, only: list[Path] | None = None) -> Container:
    """Open ``model.safetensors``, the shards of its index, or a lone file.

    Opening reads and checks every header, and maps every file; no tensor is read. The dtype of a
    tensor is numpy's name of those that parameters have, and safetensors' code of others.

    Raises:
        CheckpointError: no such folder, no or several models in it, a file that is truncated or
            whose header is not consistent, an index that disagrees with its shards.
    """
    folder = Path(folder)
    files, index = model_files(folder) if only is None else (only, None)
    entries: list[_Entry] = []
    problems: list[str] = []
    for file in files:
        found, wrong = _read_header(TensorFile(file))
        entries += found
        problems += [f"{file.name}: {problem}" for problem in wrong]
    if problems:
        raise CheckpointError(f"{folder}: {listed(problems)}; {DAMAGED}")
    if index is not None:
        _check_index(folder, index, entries)
    used = {entry.file.path for entry in entries}
    tensors = in_natural_order({entry.name: entry.tensor() for entry in entries})
    return Container(tensors, "safetensors", lambda: used)


def _check_index(folder: Path, index: Mapping[str, str], tensors: Iterable[_Entry]) -> None:
    homes: dict[str, list[str]] = {}
    for tensor in tensors:
        homes.setdefault(tensor.name, []).append(tensor.file.path.relative_to(folder).as_posix())
    problems = []
    for name in sorted(index.keys() | homes.keys(), key=natural_key):
        files = homes.get(name, [])
        # The index may write a path in another way ("./x"), so paths are compared, not strings.
        named = PurePosixPath(index[name]).as_posix() if name in index else None
        if len(files) > 1:
            problems.append(f"{name!r} is in {len(files)} shards, {', '.join(files)}")
        elif not files:
            problems.append(f"the index places {name!r} in {named}, which lacks it")
        elif named is None:
            problems.append(f"{files[0]} holds {name!r}, which the index does not name")
        elif named != files[0]:
            problems.append(f"the index places {name!r} in {named}, but it is in {files[0]}")
    if problems:
        raise CheckpointError(
            f"{folder / INDEX_FILE} disagrees with its shards: {listed(problems)}; index and "
            "shards belong to different models: download or save the folder again"
        )


def _read_header(file: TensorFile) -> tuple[list[_Entry], list[str]]:
    """Return the entries of a file's tensors, and a clause for each fault of the header."""
    data = file.data
    if len(data) < 8:
        return [], [f"expected a header of at least 8 bytes, found a file of {len(data)}"]
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(len(data) - 8, _MAX_HEADER):
        return [], [
            f"the header claims {length} bytes, but the file has {len(data) - 8} after its first 8"
            if length > len(data) - 8
            else f"the header claims {length} bytes, more than the {_MAX_HEADER} that are allowed"
        ]
    try:
        header = parse_json(data[8 : 8 + length], parse_int=_integer)
    except ValueError as error:
        return [], [f"expected a JSON header, found {error}"]
    problems, tensors = [], []
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    ):
        problems.append("'__metadata__' must map strings to strings")
    for name, entry in header.items():
        try:
            tensors.append(_read_entry(name, entry, file, 8 + length))
        except ValueError as error:
            problems.append(f"{brief(name)} {error}")
    return tensors, problems or _offset_problems(tensors, 8 + length, len(data))


def _integer(digits: str) -> int:
    """Read an integer as the safetensors library does, for which -0 is negative."""
    if digits == "-0":
        raise ValueError("the number -0, where only integers >= 0 may be")
    return int(digits)


def _read_entry(name: str, entry: Any, file: TensorFile, start: int) -> _Entry:
    """Return one tensor's entry; ValueError, a phrase that follows the tensor's name, if the entry
    contradicts itself."""
    if len(name) > MAX_NAME:
        raise ValueError(f"has {len(name)} characters, more than any name")
    if not isinstance(entry, dict):
        raise ValueError(f"is {brief(entry)}, expected an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"has dtype {brief(dtype)}, which safetensors does not have")
    if not are_naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(
            f"has shape {brief(shape)}, expected at most {MAX_DIMENSIONS} integers >= 0"
        )
    if not are_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"has data_offsets {brief(offsets)}, expected [begin, end]")
    if math.prod(max(n, 1) for n in shape) * _BITS[dtype] >= 1 << 63:  # also with a zero among them
        raise ValueError(f"has shape {brief(shape)}, larger than any memory")
    bits, stored = math.prod(shape) * _BITS[dtype], 8 * (offsets[1] - offsets[0])
    if bits != stored:
        raise ValueError(
            f"has {stored} bits, but dtype {dtype} and shape {tuple(shape)} need {bits}"
        )
    return _Entry(name, tuple(shape), dtype, file, start + offsets[0], start + offsets[1])


def _offset_problems(tensors: Sequence[_Entry], start: int, size: int) -> list[str]:
    problems, beyond = [], []
    expected, before = start, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
        begin, end = tensor.begin, tensor.end
        if end > size:
            beyond.append(repr(tensor.name))
        if begin < expected:
            problems.append(f"{tensor.name!r} overlaps {before} by {expected - begin} bytes")
        elif begin > expected:
            problems.append(
                f"{begin - expected} bytes between {before} and {tensor.name!r} are unused"
            )
        if end >= expected:
            expected, before = end, repr(tensor.name)
    if beyond:
        problems.append(
            f"the file is truncated: expected {expected} bytes, found {size}, so {len(beyond)} "
            f"tensors end past it ({listed(beyond)})"
        )
    elif expected < size:
        problems.append(f"{size - expected} bytes after {before} are unused")
    return problems
