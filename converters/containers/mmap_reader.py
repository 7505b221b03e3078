"""Tensors in files that are mapped into memory once, and released by ``close``.

A mapped file must not become shorter: the system ends a process that touches what is gone (SIGBUS).
So whoever only passes through a tensor reads its pieces, which are copies, and gets an error.
"""

import mmap
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from griffin_eval.converters.arrays.grid import Region
from griffin_eval.converters.arrays.pieces import CHUNK_BYTES
from griffin_eval.errors import CheckpointError
from griffin_eval.messages import DAMAGED, did_you_mean

if TYPE_CHECKING:
    import numpy as np


class InFile(Protocol):
    """The place of a tensor: its file, and the byte of it at which its first element is."""

    @property
    def file(self) -> Path: ...
    @property
    def start(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


Info = TypeVar("Info", bound=InFile)


class MappedTensors(ABC, Generic[Info]):
    """Tensors by name in mapped files. What was returned stays valid after ``close``.

    Attributes:
        tensors: the facts of every tensor, by name.
        left_out: everything else in the files, by name, with the reason why it is no tensor.
        mapped: as of `Container`.
    """

    mapped = True
    tensors: dict[str, Info]
    left_out: dict[str, str]

    def __init__(self, source: Path):
        self._source, self._closed = source, False
        self.left_out = {}
        self._maps: dict[tuple[Path, int], mmap.mmap] = {}
        self._descriptors: dict[Path, _Descriptor] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def numpy(self, name: str) -> "np.ndarray":
        """One tensor, as a read-only view of its mapped file."""

    def slice(self, name: str, start: int, stop: int) -> "np.ndarray":
        """Entries of the first axis of a tensor, copied."""
        return self._copy(name, self.numpy(name), start, stop)

    def part(self, name: str, part: Region) -> "np.ndarray":
        """A part of a tensor, a slice of each dimension."""
        return self.numpy(name)[part]

    def pieces(self, name: str, nbytes: int = CHUNK_BYTES) -> "Iterator[np.ndarray]":
        """One tensor in contiguous pieces along its first axis, copied.

        Raises:
            CheckpointError: the file has become shorter, or cannot be read.
        """
        import numpy as np

        layout = self.numpy(name)  # whose memory is not touched
        if layout.ndim == 0:
            yield self._copy(name, layout.reshape(1), 0, 1).reshape(())
            return
        rows, whole = rows_of(layout, nbytes), None
        if rows < len(layout) and is_interleaved(layout):  # or each piece would read nearly all
            whole = self._load(name, layout, 0)
        for start in range(0, len(layout), rows):
            if whole is None:
                yield self._copy(name, layout, start, start + rows)
            else:
                yield np.array(whole[start : start + rows], order="C")

    def checksum(self, name: str) -> int | None:
        """None, unless the container has checksums."""
        return None

    def close(self) -> None:
        """Lets go of the files; arrays and tensors that were returned keep what they need."""
        # Not mmap.close(): it would refuse while an array lives, or pull the memory from under it.
        self._closed = True
        self._maps.clear()
        self._descriptors.clear()

    def _copy(self, name: str, layout: "np.ndarray", start: int, stop: int) -> "np.ndarray":
        """Rows of a tensor, contiguous; of its mapped array only the layout is looked at."""
        import numpy as np

        start = min(start, len(layout))
        rows = self._load(name, layout[start:stop], start * layout.strides[0])
        return np.ascontiguousarray(rows)

    def _load(self, name: str, layout: "np.ndarray", at: int) -> "np.ndarray":
        """What lies as ``layout`` says from byte ``at`` of a tensor, with what lies between."""
        import numpy as np

        tensor = self._find(name)
        flat = np.empty(span(layout), np.uint8)
        if not flat.size:
            return np.empty(layout.shape, layout.dtype)
        self._read_into(tensor.file, flat.data, tensor.start + at)
        return np.ndarray(layout.shape, layout.dtype, flat.data, 0, layout.strides)

    def _read_into(self, file: Path, out: memoryview, at: int) -> None:
        done = 0
        try:
            while done < len(out):
                count = os.preadv(self._descriptors[file].number, [out[done:]], at + done)
                if not count:
                    raise CheckpointError(
                        f"{file} ends at byte {at + done}, and was longer when it was opened: it "
                        "changed while it was read; wait until whatever writes it has ended"
                    )
                done += count
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None

    def _mapped(self, file: Path, access: int = mmap.ACCESS_READ) -> mmap.mmap:
        if (file, access) not in self._maps:
            self._maps[file, access] = map_file(file, access)
        if file not in self._descriptors:
            self._descriptors[file] = _Descriptor(file)
        return self._maps[file, access]

    def _find(self, name: str) -> Info:
        if self._closed:
            raise ValueError(f"{self._source} was closed: read {name!r} before closing it")
        if name not in self.tensors:
            raise CheckpointError(
                f"{self._source}: no tensor {name!r}{did_you_mean(name, self.tensors)}"
            )
        return self.tensors[name]


def span(layout: "np.ndarray") -> int:
    """Bytes of a file from the first element of a tensor to its last."""
    if not layout.size:
        return 0
    steps = ((n - 1) * step for n, step in zip(layout.shape, layout.strides, strict=True))
    return sum(steps) + layout.itemsize


def rows_of(layout: "np.ndarray", nbytes: int) -> int:
    """The number of rows in pieces of about so many bytes."""
    return max(1, nbytes // max(1, layout[:1].nbytes))


def is_interleaved(layout: "np.ndarray") -> bool:
    """Whether parts of other rows lie between those of one, as in what was transposed."""
    return len(layout) > 1 and span(layout[:1]) > layout.strides[0]


class _Descriptor:
    """A file that is open for reading as long as this object lives."""

    def __init__(self, file: Path):
        try:
            self.number = os.open(file, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
        weakref.finalize(self, os.close, self.number)


def map_file(file: Path, access: int = mmap.ACCESS_READ) -> mmap.mmap:
    """All of a file, mapped: read-only, or with ``mmap.ACCESS_COPY`` as private pages.

    Raises:
        CheckpointError: it cannot be read, or is empty.
    """
    try:
        with open(file, "rb") as handle:
            if os.fstat(handle.fileno()).st_size == 0:  # which mmap refuses
                raise CheckpointError(f"{file} is empty; {DAMAGED}")
            return mmap.mmap(handle.fileno(), 0, access=access)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
