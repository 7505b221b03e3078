"""Reads the tensors of a safetensors folder: headers checked in full, data mapped, never copied.

No framework is needed to open a folder and check it; numpy and torch are imported only by the
methods that return their arrays. The format: 8 bytes, the length N of the header, little-endian;
N bytes of JSON, ``{name: {"dtype", "shape", "data_offsets": [begin, end]}}``; the data, without
holes or overlaps. The header is untrusted: nothing is read at an offset that was not checked.
"""

import math
import mmap
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from griffin_eval.converters.arrays.dtypes import FLOATS, ITEM_BYTES, numpy_dtype
from griffin_eval.converters.arrays.shapes import MAX_DIMENSIONS, are_naturals
from griffin_eval.converters.containers.container import MAX_NAME, natural_key
from griffin_eval.converters.containers.mmap_reader import MappedTensors
from griffin_eval.converters.containers.safetensors.files import CODES, INDEX_FILE, model_files
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import parse_json
from griffin_eval.messages import DAMAGED, brief, listed

if TYPE_CHECKING:
    import numpy as np
    import torch

# What safetensors calls a dtype -> the bits of an element.
_BITS = {
    **{code: 8 * ITEM_BYTES[name] for name, code in CODES.items()},
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
}
_NAMES = {code: name for name, code in CODES.items()}
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library


class TensorInfo(NamedTuple):
    """The place of one tensor in a file.

    Attributes:
        name: the key of the tensor.
        shape: the shape of the tensor.
        code: safetensors' name of its dtype, such as ``"BF16"``.
        file: the file that holds it.
        offsets: first byte and one past the last, counted from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    code: str
    file: Path
    offsets: tuple[int, int]

    @property
    def dtype(self) -> str:
        """numpy's name of a dtype that parameters have, such as ``bfloat16``; else the code."""
        name = _NAMES.get(self.code)
        return name if name in FLOATS else self.code

    @property
    def start(self) -> int:
        return self.offsets[0]

    @property
    def nbytes(self) -> int:
        return self.offsets[1] - self.offsets[0]


class SafetensorsFolder(MappedTensors[TensorInfo]):
    """The tensors of ``model.safetensors``, of the shards of its index, or of a lone file.

    Opening reads and checks every header, and maps every file; no tensor is read. What was
    returned stays valid after ``close``, which only lets go of the mappings held here.

    Attributes:
        folder: the folder, as given.
        tensors: every tensor by name, in natural order (layer 2 before layer 10).

    Args:
        folder: the folder.
        only: the files to read, where they are no model.

    Raises:
        CheckpointError: no such folder, no or several models in it, a file that is truncated or
            whose header is not consistent, an index that disagrees with its shards.
    """

    def __init__(self, folder: str | Path, only: list[Path] | None = None):
        self.folder = Path(folder)
        super().__init__(self.folder)
        self._torch_files: dict[Path, Any] = {}
        files, index = model_files(self.folder) if only is None else (only, None)
        tensors: list[TensorInfo] = []
        problems: list[str] = []
        for file in files:
            infos, wrong = _read_header(file, self._mapped(file))
            tensors += infos
            problems += [f"{file.name}: {problem}" for problem in wrong]
        if problems:
            raise CheckpointError(f"{self.folder}: {listed(problems)}; {DAMAGED}")
        if index is not None:
            _check_index(self.folder, index, tensors)
        self.tensors = {t.name: t for t in sorted(tensors, key=lambda t: natural_key(t.name))}

    def close(self) -> None:
        super().close()
        self._torch_files.clear()

    def files(self) -> Iterable[Path]:
        return {tensor.file for tensor in self.tensors.values()}

    def describe(self) -> str:
        return "safetensors"

    def numpy(self, name: str) -> "np.ndarray":
        """The tensor as a read-only array over the mapped file; bfloat16 is ml_dtypes' dtype.

        Raises:
            CheckpointError: no such tensor, or a dtype that numpy does not have.
        """
        import numpy as np

        tensor = self._find(name)
        if tensor.code not in _NAMES:
            raise CheckpointError(
                f"{tensor.file}: {name!r} is {tensor.code}, which numpy cannot hold; "
                f"expected one of {', '.join(CODES[float] for float in FLOATS)}"
            )
        data = self._mapped(tensor.file)
        flat = np.frombuffer(
            data, numpy_dtype(_NAMES[tensor.code]), math.prod(tensor.shape), tensor.offsets[0]
        )
        return flat.reshape(tensor.shape)

    def torch(self, name: str) -> "torch.Tensor":
        """The tensor over a private mapping of the file: pages are shared until written to.

        Writing to it copies the touched pages for this process (also for earlier results of the
        same name) and never reaches the file.

        Raises:
            CheckpointError: no such tensor, or a dtype that torch does not have.
        """
        from safetensors import SafetensorError, safe_open

        tensor = self._find(name)
        try:
            if tensor.file not in self._torch_files:
                self._torch_files[tensor.file] = safe_open(tensor.file, framework="pt")
            return self._torch_files[tensor.file].get_tensor(name)
        except (SafetensorError, OSError, AttributeError) as error:  # AttributeError: no such dtype
            raise CheckpointError(
                f"{tensor.file}: {name!r} ({tensor.code}, {tensor.shape}) cannot be read into "
                f"torch: {error}"
            ) from None


def _check_index(folder: Path, index: Mapping[str, str], tensors: Iterable[TensorInfo]) -> None:
    homes: dict[str, list[str]] = {}
    for tensor in tensors:
        homes.setdefault(tensor.name, []).append(tensor.file.relative_to(folder).as_posix())
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


def _read_header(file: Path, data: mmap.mmap) -> tuple[list[TensorInfo], list[str]]:
    """The tensors of a file, and everything that is wrong with its header."""
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


def _read_entry(name: str, entry: Any, file: Path, start: int) -> TensorInfo:
    """One tensor; ValueError, a phrase that follows its name, if the entry contradicts itself."""
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
    return TensorInfo(name, tuple(shape), dtype, file, (start + offsets[0], start + offsets[1]))


def _offset_problems(tensors: Sequence[TensorInfo], start: int, size: int) -> list[str]:
    problems, beyond = [], []
    expected, before = start, "the header"
    for tensor in sorted(tensors, key=lambda t: t.offsets):
        begin, end = tensor.offsets
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
