"""Writes a .pt file tensor by tensor, in any order, holding no more than a chunk.

torch itself writes the file around the data (``torch.serialization.skip_data``), so it is what
``torch.save`` would have made; then every tensor is written where its storage is, and its checksum
into the zip. Same tensors, same bytes, whatever the file is called.
"""

import contextlib
import math
import mmap
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

from griffin_eval.converters.arrays.dtypes import FLOATS, ITEM_BYTES, numpy_dtype
from griffin_eval.converters.arrays.write import read_all, write_all, write_array, writing
from griffin_eval.converters.containers.container import Writer
from griffin_eval.converters.containers.torch_pt.reader import zip_records
from griffin_eval.errors import BadInput, MissingExtraError
from griffin_eval.messages import listed

if TYPE_CHECKING:
    import numpy as np

_ALIGNMENT = 64
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
_CRC, _LENGTHS = struct.Struct("<L"), struct.Struct("<HHH")


class TorchWriter(Writer):
    """A context manager that writes a state dict as ``torch.save`` does.

    ``torch.load(path, weights_only=True, mmap=True)`` gives a dict of contiguous tensors in the
    order of ``specs``, each with a storage of its own.

    Args:
        path: the file to write.
        specs: shape and dtype (bfloat16, float16, float32, float64) of every tensor, by name.

    Raises:
        ValueError: no tensors, or another dtype.
        MissingExtraError: torch is not installed.
        BadInput: the system refuses to write.
    """

    def __init__(self, path: str | Path, specs: Mapping[str, tuple[tuple[int, ...], str]]):
        self.path = Path(path)
        if not specs:
            raise ValueError("no tensors to write: expected at least one")
        if unknown := sorted(name for name, (_, dtype) in specs.items() if dtype not in FLOATS):
            names = listed(unknown, lambda name: f"{name!r} is {specs[name][1]}")
            raise ValueError(f"expected dtypes {', '.join(FLOATS)}, but {names}")
        self._specs = {name: (tuple(shape), dtype) for name, (shape, dtype) in specs.items()}
        self._checksums: dict[str, int] = {}
        with writing(self.path):
            # An open file: its name would otherwise be written into the archive.
            with open(self.path, "wb") as file:
                _save_without_data(self._specs, file)
            self._starts = self._locate()
            self._file: int | None = os.open(self.path, os.O_RDWR)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def write(self, name: str, chunks: "Iterable[np.ndarray]") -> None:
        if name not in self._specs:
            raise ValueError(f"{name!r} is not among the tensors to write")
        if name in self._checksums or self._file is None:
            raise ValueError(f"{name!r} was written before, or the file closed")
        shape, dtype = self._specs[name]
        with writing(self.path):
            try:
                self._checksums[name] = write_array(
                    self._file,
                    self._starts[name],
                    shape,
                    numpy_dtype(dtype),
                    chunks,
                    checksum=True,
                )
            except BadInput:  # of whoever makes the chunks
                raise
            except ValueError as error:
                raise ValueError(f"{self.path}: {name!r} {error}") from None

    def close(self) -> None:
        """Writes the checksums of the zip and syncs the file.

        Raises:
            ValueError: naming the tensors that were not written.
        """
        if self._file is None:
            return
        if missing := [name for name in self._specs if name not in self._checksums]:
            raise ValueError(
                f"{self.path}: {len(missing)} tensors were never written: {listed(missing, repr)}"
            )
        with writing(self.path):
            self._write_checksums(self._file)
            os.fsync(self._file)
            os.close(self._file)
            self._file = None

    def _locate(self) -> dict[str, int]:
        with open(self.path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        records = zip_records(self.path, data)
        data.close()
        # torch.save numbers storages in the order in which it meets them: that of specs.
        starts = {}
        for i, name in enumerate(self._specs):
            record = records[f"archive/data/{i}"]
            assert record.size == self._nbytes(name)
            starts[name] = record.start
        return starts

    def _nbytes(self, name: str) -> int:
        shape, dtype = self._specs[name]
        return math.prod(shape) * ITEM_BYTES[dtype]

    def _write_checksums(self, file: int) -> None:
        """Into the descriptor behind the data of each entry, and into the directory at the end."""
        with (
            _errors_of_the_system(zipfile.BadZipFile),
            zipfile.ZipFile(self.path) as archive,
        ):
            start = archive.start_dir
        directory = bytearray(read_all(file, os.fstat(file).st_size - start, start))
        names = {f"archive/data/{i}".encode(): name for i, name in enumerate(self._specs)}
        at = 0
        while directory[at : at + 4] == b"PK\1\2":
            crc_at, (length, extra, comment) = at + 16, _LENGTHS.unpack_from(directory, at + 28)
            at += 46
            name = names.get(bytes(directory[at : at + length]))
            at += length + extra + comment
            if name is not None and self._nbytes(name):  # an empty entry has no descriptor
                crc = _CRC.pack(self._checksums[name])
                behind = self._starts[name] + self._nbytes(name)
                assert read_all(file, 4, behind) == b"PK\7\x08"
                write_all(file, crc, behind + 4)
                directory[crc_at : crc_at + 4] = crc
        write_all(file, directory, start)


def _save_without_data(specs: Mapping[str, tuple[tuple[int, ...], str]], file: IO[bytes]) -> None:
    try:
        import torch
    except ImportError:
        raise MissingExtraError("torch", "torch") from None

    sizes = {name: math.prod(shape) * ITEM_BYTES[dtype] for name, (shape, dtype) in specs.items()}
    # Storages of the right sizes over reserved addresses without memory (MAP_NORESERVE), so that
    # torch.save can write headers: with torch.empty, a 9B model would have to fit.
    reserved = sum(sizes.values()) + _ALIGNMENT * len(sizes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    addresses, at = mmap.mmap(-1, reserved, flags=flags), 0
    tensors = {}
    for name, (shape, dtype) in specs.items():
        kind = getattr(torch, dtype)
        if sizes[name]:
            count = math.prod(shape)
            flat = torch.frombuffer(addresses, dtype=kind, count=count, offset=at)
            tensors[name] = flat.reshape(shape)
            at += sizes[name] + -sizes[name] % _ALIGNMENT
        else:
            tensors[name] = torch.empty(shape, dtype=kind)
    with _errors_of_the_system(RuntimeError), torch.serialization.skip_data():
        torch.save(tensors, file)


@contextlib.contextmanager
def _errors_of_the_system(hiding: type[Exception]) -> Iterator[None]:
    """Raises the system's error where a library's hides it."""
    try:
        yield
    except hiding as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
