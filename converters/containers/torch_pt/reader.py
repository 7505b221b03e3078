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
from typing import Any

from griffin_eval.converters.containers.container import MAX_NAME, Container, in_natural_order
from griffin_eval.converters.containers.safetensors.reader import TORCH_FILE
from griffin_eval.converters.containers.torch_pt.pickle import (
    FoundTensor,
    NotAllowed,
    PickleInterpreter,
    Record,
    describe,
)
from griffin_eval.converters.files import TensorFile, c_strides
from griffin_eval.converters.tensors import ITEM_BYTES, LazyTensor
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.json_files import list_folder
from griffin_eval.messages import DAMAGED, brief, is_unicode, listed

SAVE_AGAIN = "load it where it was made and torch.save(model.state_dict(), path) again"
ROOTS = ("model_state_dict", "state_dict", "params")  # keys under which trainers put the weights
# Files of a trainer's state, which are beside weights and hold none.
_STATES = ("optimizer.*", "scheduler.*", "scaler.*", "rng_state*.pth", "training_args.*")

_ZIP, _LOCAL_HEADER = b"PK\3\4", struct.Struct("<4s22xHH")
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # start of files before torch 1.6
_MAX_PICKLE = 10_000_000  # bytes, some 60,000 tensors; following more would take minutes
_MAX_DEPTH = 32
_MAX_LEAVES = 1_000_000  # more than in the largest pickle, unless it refers to some again and again
_SHARD = re.compile(r"-\d+-of-\d+\.bin")


def open_torch(path: str | Path, *, item: str | None = None) -> Container:
    """Open a .pt, .pth or .bin file of torch.save, or a folder that holds one. Keys of nested
    dicts are joined with ".".

    Opening maps the file and reads its directory and pickle; no tensor is read. Tensors are
    views of the mapped file with the strides they were saved with. ``item`` is the key of the
    state dict in a trainer's file with several: by default the file itself if a tensor stands at
    its top, else whichever of ``ROOTS`` it has.

    Raises:
        CheckpointError: no or several such files, one that is truncated or contradicts itself,
            that holds more than tensors and plain values, or no state dict.
        ArgumentError: several state dicts, or not the one that ``item`` says.
    """
    file = TensorFile(_find_file(Path(path)))
    records = zip_records(file.path, file.data)
    sums = {(r.start, r.size): r.checksum for r in records.values()}
    content = _unpickle(file.path, file.data, records)
    root, state = _choose_root(file.path, content, item)
    left_out = {str(k): describe(v) for k, v in content.items() if k != root} if root else {}
    tensors: dict[str, LazyTensor] = {}
    for name, leaf in _flatten(file.path, state):
        if name in tensors:
            raise CheckpointError(
                f"{file.path}: two tensors are called {name!r} once nested keys are joined with "
                f"'.'; {SAVE_AGAIN}"
            )
        if isinstance(leaf, FoundTensor):
            crc32 = None
            if leaf.strides == c_strides(leaf.shape):  # all of its storage, as in a state dict
                nbytes = math.prod(leaf.shape) * ITEM_BYTES[leaf.dtype]
                crc32 = sums.get((leaf.start, nbytes)) or None  # 0: torch.save wrote none
            tensors[name] = file.tensor(
                leaf.shape, leaf.dtype, leaf.start, strides=leaf.strides, crc32=crc32
            )
        else:
            left_out[f"{root}.{name}" if root else name] = describe(leaf)
    if not tensors:
        raise CheckpointError(
            f"{file.path}: expected a state dict, found no tensor in it, but "
            f"{listed(f'{k!r}, {v}' for k, v in left_out.items()) or 'nothing'}"
        )
    files = [file.path]
    return Container(in_natural_order(tensors), "torch.save", lambda: files, left_out, root)


def _unpickle(file: Path, data: mmap.mmap, records: dict[str, Record]) -> Any:
    (name,) = [name for name in records if name.endswith("/data.pkl")]
    prefix, record = name.removesuffix("data.pkl"), records[name]
    if record.size > _MAX_PICKLE:
        raise CheckpointError(
            f"{file}: its pickle has {record.size} bytes, more than any state dict needs; "
            f"{SAVE_AGAIN}"
        )
    pickled = data[record.start : record.start + record.size]
    if record.checksum not in (0, zlib.crc32(pickled)):  # 0: torch.save wrote no checksum
        raise CheckpointError(f"{file}: the checksum of data.pkl is wrong; {DAMAGED}")
    order = records.get(f"{prefix}byteorder")
    if order and data[order.start : order.start + order.size] != b"little":
        raise CheckpointError(f"{file} is not little-endian: save it on a little-endian machine")
    storages = {
        name.removeprefix(f"{prefix}data/"): record
        for name, record in records.items()
        if name.startswith(f"{prefix}data/")
    }
    try:
        return PickleInterpreter(storages).run(pickled)
    except NotAllowed as error:
        raise CheckpointError(
            f"{file} holds {error}, which is refused, since objects other than tensors and "
            f"plain values may run code; if you trust the file, {SAVE_AGAIN}"
        ) from None
    except Exception as error:  # a malformed pickle may raise any error
        raise CheckpointError(
            f"{file}: its pickle cannot be followed ({brief(str(error))}); {DAMAGED}"
        ) from None


def _choose_root(file: Path, content: Any, item: str | None) -> tuple[str, Any]:
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{file}: expected a state dict, found {describe(content)}; {SAVE_AGAIN}"
        )
    if item:
        if not isinstance(content.get(item), dict):
            dicts = [str(key) for key, value in content.items() if isinstance(value, dict)]
            raise ArgumentError(
                f"{file}: no state dict {item!r}; expected one of "
                f"{listed(dicts) or 'none: the file itself is the state dict'}"
            )
        return item, content[item]
    if item == "" or any(isinstance(value, FoundTensor) for value in content.values()):
        return "", content
    roots = [key for key in ROOTS if _holds_tensors(file, content.get(key))]
    if len(roots) > 1:
        raise ArgumentError(
            f"{file} holds several state dicts, {listed(roots)}: say which with item="
        )
    return (roots[0], content[roots[0]]) if roots else ("", content)


def _holds_tensors(file: Path, content: Any) -> bool:
    return isinstance(content, dict) and any(
        isinstance(leaf, FoundTensor) for _, leaf in _flatten(file, content)
    )


def _flatten(file: Path, state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves, those of a shared container each time; CheckpointError for containers that
    are nested in themselves, or for too many leaves."""
    count = 0
    stack: list[tuple[str, int, Any]] = [("", 0, state)]
    while stack:
        prefix, depth, value = stack.pop()
        nested = isinstance(value, dict) or (
            isinstance(value, list) and value and isinstance(value[0], dict | list | FoundTensor)
        )
        if not nested:
            yield prefix, value
            continue
        count += len(value)
        if depth > _MAX_DEPTH or count > _MAX_LEAVES:
            raise CheckpointError(
                f"{file}: {brief(prefix)} is nested in itself, or shared too often; {SAVE_AGAIN}"
            )
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in reversed(list(items)):
            name = f"{prefix}.{key}" if depth else str(key)
            if len(name) > MAX_NAME or not is_unicode(name):
                raise CheckpointError(
                    f"{file}: {brief(name)} is too long for a name, or not Unicode; {DAMAGED}"
                )
            stack.append((name, depth + 1, child))


def zip_records(file: Path, data: mmap.mmap) -> dict[str, Record]:
    """Return the entries of an archive of torch.save: stored, within the file, none over
    another; CheckpointError for anything else."""
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
    """Return whether a path is a file of torch.save, whole or damaged, or a folder with one."""
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
    """Return the names among a folder's files that torch.save's weights have: those that
    transformers reads, or else all."""
    names = sorted(n for n in names if not any(fnmatch.fnmatch(n, each) for each in _STATES))
    if TORCH_FILE in names:
        return [TORCH_FILE]
    return fnmatch.filter(names, "pytorch_model*.bin") or [
        name for name in names if name.endswith((".pt", ".pth"))
    ]


def one_torch(names: list[str], where: str) -> list[str]:
    """Return the file of torch.save of a folder on the hub; CheckpointError if there are
    several."""
    files = torch_files(names)
    if len(files) > 1:
        raise CheckpointError(f"{where}: {not_one_file(files)} (download it first)")
    return files


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
    """Return the clause about a folder that holds no file of torch.save with weights, or
    several."""
    if names and all(_SHARD.search(name) for name in names):
        return (
            f"weights of torch.save in several files are not read ({listed(names)}): load the "
            "model with transformers and save_pretrained it, which writes safetensors"
        )
    return (
        f"expected one .pt file, found {listed(names) or 'none'}: give the path of the one that is "
        "meant"
    )
