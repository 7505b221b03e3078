"""Reads the tensors of a torch.save file in place, without torch and without running anything.

The format: a zip archive, nothing compressed; ``NAME/data.pkl`` is a pickle of the object, in which
storages are persistent ids, and ``NAME/data/KEY`` holds the bytes of storage KEY. Both are
untrusted. The pickle is not unpickled but followed, opcode by opcode, by an interpreter that knows
those that torch.save writes and makes nothing but numbers, strings, containers and descriptions of
tensors: as strict as ``torch.load(weights_only=True, mmap=True)``, whose results it reproduces, but
no callable of the file is ever called, nothing is allocated at its word, and every view is checked
to lie within its storage, every storage within the file.
"""

import fnmatch
import math
import mmap
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from griffin_eval.converters.arrays.dtypes import ITEM_BYTES, numpy_dtype
from griffin_eval.converters.containers.container import MAX_NAME, natural_key
from griffin_eval.converters.containers.mmap_reader import (
    MappedTensors,
)
from griffin_eval.converters.containers.torch_pt.pickle import (
    FoundTensor,
    NotAllowed,
    PickleInterpreter,
    Record,
    describe,
)
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.json_files import list_folder
from griffin_eval.messages import DAMAGED, brief, is_unicode, listed

if TYPE_CHECKING:
    import numpy as np
    import torch

SAVE_AGAIN = "load it where it was made and torch.save(model.state_dict(), path) again"
ROOTS = ("model_state_dict", "state_dict", "params")  # under which trainers put the weights
# Files of a trainer's state, which lie beside weights and hold none.
_STATES = ("optimizer.*", "scheduler.*", "scaler.*", "rng_state*.pth", "training_args.*")

_ZIP, _LOCAL_HEADER = b"PK\3\4", struct.Struct("<4s22xHH")
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # what torch.save wrote before 1.6
_MAX_PICKLE = 10_000_000  # bytes, some 60,000 tensors; following more would take minutes
_MAX_DEPTH = 32
_SHARD = re.compile(r"-\d+-of-\d+\.bin")


class TorchTensor(NamedTuple):
    """The place of one tensor in a file.

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
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def span(self) -> int:
        """Elements of the file from its first to its last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))


class TorchFile(MappedTensors[TorchTensor]):
    """The tensors of a .pt, .pth or .bin file that torch.save wrote.

    Opening maps the file and reads its directory and pickle; no tensor is read. What was returned
    stays valid after ``close``, which only lets go of the mappings held here.

    Attributes:
        file: the file.
        root: the key under which the state dict is, "" if it is all there is.
        tensors: every tensor by name, in natural order (layer 2 before layer 10).
        left_out: everything else, by key: the rest of a trainer's file, numbers, text.

    Args:
        path: the file, or a folder that holds one such file.
        item: key of the state dict in the file, for a trainer's file with several. By default the
            file itself if a tensor stands at its top, else whichever of ``ROOTS`` it has.

    Raises:
        CheckpointError: no or several such files, one that is truncated or contradicts itself,
            that holds more than tensors and plain values, or no state dict.
        ArgumentError: several state dicts, or not the one that ``item`` says.
    """

    def __init__(self, path: str | Path, *, item: str | None = None):
        self.file = _find_file(Path(path))
        super().__init__(self.file)
        data = self._mapped(self.file)
        records = zip_records(self.file, data)
        self._sums = {(r.start, r.size): r.checksum for r in records.values()}
        content = self._unpickle(data, records)
        self.root, state = self._choose_root(content, item)
        if self.root:
            self.left_out = {str(k): describe(v) for k, v in content.items() if k != self.root}
        tensors: dict[str, TorchTensor] = {}
        for name, leaf in self._flatten(state):
            if name in tensors:
                raise CheckpointError(
                    f"{self.file}: two tensors are called {name!r} once nested keys are joined "
                    f"with '.'; {SAVE_AGAIN}"
                )
            if isinstance(leaf, FoundTensor):
                tensors[name] = TorchTensor(name, leaf.shape, leaf.dtype, self.file, *leaf[2:])
            else:
                self.left_out[f"{self.root}.{name}" if self.root else name] = describe(leaf)
        if not tensors:
            raise CheckpointError(
                f"{self.file}: expected a state dict, found no tensor in it, but "
                f"{listed(f'{k!r}, {v}' for k, v in self.left_out.items()) or 'nothing'}"
            )
        self.tensors = {name: tensors[name] for name in sorted(tensors, key=natural_key)}

    def files(self) -> Iterable[Path]:
        return [self.file]

    def describe(self) -> str:
        return "torch.save"

    def numpy(self, name: str) -> "np.ndarray":
        """The tensor as a read-only view of the mapped file, with the strides it was saved with.

        bfloat16 and the float8 dtypes are those of ml_dtypes.

        Raises:
            CheckpointError: no such tensor.
        """
        import numpy as np

        tensor = self._find(name)
        dtype = numpy_dtype(tensor.dtype)
        if tensor.span == 0:
            array = np.empty(tensor.shape, dtype)
        else:  # numpy, too, refuses what does not fit into the buffer
            strides = tuple(step * dtype.itemsize for step in tensor.strides)
            data = self._mapped(self.file)
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
        data = self._mapped(self.file, mmap.ACCESS_COPY)
        flat = torch.frombuffer(data, dtype=dtype, count=tensor.span, offset=tensor.start)
        return flat.as_strided(tensor.shape, tensor.strides)

    def checksum(self, name: str) -> int | None:
        """Of a tensor that is all of its storage, as those of a state dict are; else None."""
        tensor = self._find(name)
        steps, step = [], 1
        for length in reversed(tensor.shape):
            steps.append(step)
            step *= length
        if tensor.strides != tuple(reversed(steps)):
            return None
        return self._sums.get((tensor.start, tensor.nbytes)) or None  # 0: torch.save wrote none

    def _unpickle(self, data: mmap.mmap, records: dict[str, Record]) -> Any:
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
            return PickleInterpreter(storages).run(pickled)
        except NotAllowed as error:
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
                f"{self.file}: expected a state dict, found {describe(content)}; {SAVE_AGAIN}"
            )
        if item:
            if not isinstance(content.get(item), dict):
                dicts = [str(key) for key, value in content.items() if isinstance(value, dict)]
                raise ArgumentError(
                    f"{self.file}: no state dict {item!r}; expected one of "
                    f"{listed(dicts) or 'none: the file itself is the state dict'}"
                )
            return item, content[item]
        if item == "" or any(isinstance(value, FoundTensor) for value in content.values()):
            return "", content
        roots = [key for key in ROOTS if self._holds_tensors(content.get(key))]
        if len(roots) > 1:
            raise ArgumentError(
                f"{self.file} holds several state dicts, {listed(roots)}: say which with item="
            )
        return (roots[0], content[roots[0]]) if roots else ("", content)

    def _holds_tensors(self, content: Any) -> bool:
        return isinstance(content, dict) and any(
            isinstance(leaf, FoundTensor) for _, leaf in self._flatten(content)
        )

    def _flatten(self, state: Any) -> Iterator[tuple[str, Any]]:
        """The leaves; no container twice, so that neither loops nor shared nests run away."""
        seen: set[int] = set()
        stack: list[tuple[str, int, Any]] = [("", 0, state)]
        while stack:
            prefix, depth, value = stack.pop()
            nested = isinstance(value, dict) or (
                isinstance(value, list)
                and value
                and isinstance(value[0], dict | list | FoundTensor)
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
                if len(name) > MAX_NAME or not is_unicode(name):
                    raise CheckpointError(
                        f"{self.file}: {brief(name)} is too long for a name, or not Unicode; "
                        f"{DAMAGED}"
                    )
                stack.append((name, depth + 1, child))


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
        for refused in (error, error.__context__):  # and hides the system's
            if isinstance(refused, OSError):
                said = refused.strerror or refused
                raise CheckpointError(f"{file} cannot be read: {said}") from None
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
    with open(path, "rb") as handle:
        start = handle.read(300)
    if start.startswith(_ZIP):
        return b"/data.pkl" in start
    return start.startswith(_LEGACY) or path.suffix in (".pt", ".pth")


def torch_files(names: Iterable[str]) -> list[str]:
    """Those of the names of files in a folder that torch.save gives to weights, of one kind."""
    names = sorted(n for n in names if not any(fnmatch.fnmatch(n, each) for each in _STATES))
    for pattern in ("*.pt", "*.pth", "pytorch_model*.bin"):
        if matching := fnmatch.filter(names, pattern):
            return matching
    return []


def _candidates(folder: Path) -> list[Path]:
    names = [name for name in list_folder(folder) if (folder / name).is_file()]
    return [folder / name for name in torch_files(names)]


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path}: expected a file that torch.save wrote, found none")
    files = _candidates(path)
    if len(files) != 1:
        raise CheckpointError(f"{path}: {not_one_file([file.name for file in files])}")
    return files[0]


def not_one_file(names: Sequence[str]) -> str:
    """The clause about a folder that holds no file of torch.save with weights, or several."""
    if names and all(_SHARD.search(name) for name in names):
        return (
            f"weights of torch.save in several files are not read ({listed(names)}): load the "
            "model with transformers and save_pretrained it, which writes safetensors"
        )
    return (
        f"expected one .pt file, found {listed(names) or 'none'}: give the path of the one that is "
        "meant"
    )
