"""Tensors in files that are mapped into memory once, and released by ``close``."""

import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from griffin_eval.converters.arrays.pieces import CHUNK_BYTES, chunks
from griffin_eval.errors import CheckpointError
from griffin_eval.messages import DAMAGED, did_you_mean

if TYPE_CHECKING:
    import numpy as np

Info = TypeVar("Info")


class MappedTensors(ABC, Generic[Info]):
    """Tensors by name in mapped files. What was returned stays valid after ``close``.

    Attributes:
        tensors: the facts of every tensor, by name.
        left_out: everything else in the files, by name, with the reason why it is no tensor.
    """

    tensors: dict[str, Info]
    left_out: dict[str, str]

    def __init__(self, source: Path):
        self._source, self._closed = source, False
        self.left_out = {}
        self._maps: dict[tuple[Path, int], mmap.mmap] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def numpy(self, name: str) -> "np.ndarray":
        """One tensor, as a read-only view of its mapped file."""

    def slice(self, name: str, start: int, stop: int) -> "np.ndarray":
        """Entries of the first axis of a tensor."""
        return self.numpy(name)[start:stop]

    def pieces(self, name: str, nbytes: int = CHUNK_BYTES) -> "Iterator[np.ndarray]":
        """One tensor in contiguous pieces along its first axis."""
        return chunks(self.numpy(name), nbytes)

    def checksum(self, name: str) -> int | None:
        """None, unless the container has checksums."""
        return None

    def memory_to_read(self, name: str, piece: int | None) -> int:
        """None: pages of a mapped file are not the process's own memory."""
        return 0

    def close(self) -> None:
        """Lets go of the files; arrays and tensors that were returned keep what they need."""
        # Not mmap.close(): it would refuse while an array lives, or pull the memory from under it.
        self._closed = True
        self._maps.clear()

    def _mapped(self, file: Path, access: int = mmap.ACCESS_READ) -> mmap.mmap:
        if (file, access) not in self._maps:
            self._maps[file, access] = map_file(file, access)
        return self._maps[file, access]

    def _find(self, name: str) -> Info:
        if self._closed:
            raise ValueError(f"{self._source} was closed: read {name!r} before closing it")
        if name not in self.tensors:
            raise CheckpointError(
                f"{self._source}: no tensor {name!r}{did_you_mean(name, self.tensors)}"
            )
        return self.tensors[name]


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
