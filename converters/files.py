"""Files of tensors: read in place and mapped, written as fast as the disk takes them."""

import errno
import math
import mmap
import os
import stat
import threading
import weakref
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from griffin_eval.converters.tensors import (
    ITEM_BYTES,
    PIECE_BYTES,
    LazyTensor,
    Region,
    Shape,
    bytes_of,
    flattened,
    numpy_dtype,
)
from griffin_eval.errors import ArgumentError, BadInput, CheckpointError
from griffin_eval.json_files import exists
from griffin_eval.messages import DAMAGED

if TYPE_CHECKING:
    import numpy as np

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
_PIECE = 1 << 22  # bytes written at a time: few enough to be in the cache still when summed


class TensorFile:
    """A file whose tensors are read in place. Lazy tensors keep it open.

    A mapped file must not become shorter: the system ends a process that touches what is gone
    (SIGBUS). So a region of a tensor is read as a copy, which raises an error instead.
    CheckpointError if the file cannot be read, or is empty.
    """

    def __init__(self, path: Path):
        self.path = path
        with reading(path):
            self._descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            if os.fstat(self._descriptor).st_size == 0:  # mmap refuses empty files
                raise CheckpointError(f"{path} is empty; {DAMAGED}")
            self.data = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)

    @cached_property
    def _private(self) -> mmap.mmap:
        """Pages that are shared until they are written to, which never reaches the file."""
        return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)

    def tensor(
        self,
        shape: Shape,
        dtype: str,
        start: int,
        *,
        strides: Shape | None = None,
        stored_as: str | None = None,
        crc32: int | None = None,
    ) -> LazyTensor:
        """Return a tensor in the file.

        Args:
            dtype: Name of the dtype, for messages.
            start: Byte of the file at which its first element is.
            strides: Elements from one index to the next, per dimension; None for C order.
            stored_as: numpy's name of the dtype; None if that is ``dtype``.
        """
        stored = stored_as or dtype
        item = ITEM_BYTES.get(stored) or numpy_dtype(stored).itemsize
        steps = c_strides(shape)
        if strides:  # those of dimensions of length 1 mean nothing, and may be too large
            pairs = zip(shape, strides, steps, strict=True)
            steps = tuple(step if n > 1 else own for n, step, own in pairs)

        def view(private: bool) -> "np.ndarray":
            import numpy as np

            if 0 in shape:
                return np.empty(shape, numpy_dtype(stored))
            data = self._private if private else self.data
            byte_steps = tuple(item * step for step in steps)
            array = np.ndarray(shape, numpy_dtype(stored), data, start, byte_steps)
            array.flags.writeable = private
            return array

        def read(region: Region) -> "np.ndarray":
            import numpy as np

            part = view(False)[region]  # only for shape and strides: memory is not touched
            if 0 in part.shape:
                return np.empty(part.shape, part.dtype)
            at = sum(cut.start * step for cut, step in zip(region, steps, strict=True))
            flat = np.empty(item * span(part.shape, steps), np.uint8)
            self._read_into(flat.data, start + item * at)
            return np.ndarray(part.shape, part.dtype, flat.data, 0, part.strides)

        # Parts of other rows lie between those of one, as in what was transposed.
        interleaved = len(shape) > 0 and shape[0] > 1 and span((1, *shape[1:]), steps) > steps[0]
        grid = shape if interleaved and 0 not in shape else None
        return LazyTensor(shape, dtype, read, view, grid, math.prod(shape) * item, crc32)

    def _read_into(self, out: memoryview, at: int) -> None:
        done = 0
        while done < len(out):
            with reading(self.path):
                count = os.preadv(self._descriptor, [out[done:]], at + done)
            if not count:
                raise CheckpointError(
                    f"{self.path} ends at byte {at + done}, and was longer when it was opened: "
                    "it changed while it was read; wait until whatever writes it has ended"
                )
            done += count


def c_strides(shape: Shape) -> Shape:
    """Return the strides of a contiguous array in C order, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def span(shape: Shape, strides: Shape) -> int:
    """Return the number of elements of a file from a tensor's first to its last, inclusive."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


def checked_pieces(
    tensor: LazyTensor, name: str, path: Path, nbytes: int = PIECE_BYTES
) -> "Iterator[np.ndarray]":
    """Yield the pieces of a tensor; after the last one, raise CheckpointError if they do not match
    its CRC-32. ``name`` and ``path`` are for the message."""
    crc32 = 0
    for piece in tensor.pieces(nbytes):
        crc32 = zlib.crc32(bytes_of(piece), crc32)
        yield piece
    if tensor.crc32 not in (None, crc32):
        raise CheckpointError(
            f"{path}: {name} has the CRC-32 {crc32:08x}, and the file says {tensor.crc32:08x}: it "
            "is damaged; download or save it again"
        )


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn the system's errors about reading a path into CheckpointErrors in sentences."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn the system's errors about writing to a path into BadInput errors in sentences."""
    try:
        yield
    except OSError as error:
        raise cannot_be_written(path, error.strerror or str(error)) from None


def existing_kind(path: Path) -> str | None:
    """Return "a file", "a folder", "a link" or "a device or a pipe" for a path that exists, and
    None for a new one. BadInput if the system refuses access, or a parent is no folder."""
    with writing(path):
        absolute = path.absolute()
        above = next(folder for folder in (absolute.parent, *absolute.parents) if folder.exists())
        if not above.is_dir():
            raise ArgumentError(
                f"{path} cannot be written, since {above} is no folder: name another path"
            )
        if not exists(path, follow_links=False):
            return None
        mode = path.lstat().st_mode
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISLNK(mode):
        return "a link"
    return "a file" if stat.S_ISREG(mode) else "a device or a pipe"


def write_file(path: Path, content: str | bytes) -> None:
    """Write a small file; BadInput if the system refuses."""
    with writing(path):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def cannot_be_written(path: str | Path, reason: str) -> BadInput:
    """Return the error for a path; it names the disk if the disk fails, is full or read-only."""
    if any(os.strerror(code) in reason for code in _OF_THE_DISK):
        there = os.path.abspath(path)
        while not os.path.ismount(there):
            there = os.path.dirname(there)
        reason += f" (the disk at {there})"
    return BadInput(f"{path} cannot be written: {reason}")


def lock_folder(folder: Path) -> int:
    """Open a folder and lock it until the returned descriptor is closed.

    Network disks without locks do not lock it. BlockingIOError if another process has locked it.
    """
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            os.close(descriptor)
            raise
    return descriptor


def write_array(
    descriptor: int,
    start: int,
    shape: tuple[int, ...],
    dtype: "np.dtype",
    chunks: "Iterable[np.ndarray]",
    lock: "threading.Lock",
    *,
    checksum: bool = False,
) -> int:
    """Write the elements of an array, in C order, into an open file; return their CRC-32, or 0.

    Args:
        start: Byte of the file at which the array begins.
        chunks: Consecutive pieces of that dtype, along the first axis or flat. Those with strides
            are copied a few MiB at a time.
        lock: Lock of the file. The system lets one thread at a time write into a file, and others
            would spin meanwhile (15% of the CPU seconds of a conversion).

    Raises:
        ValueError: a phrase about the chunks: another dtype, too many or too few elements.
    """
    end = start + math.prod(shape) * dtype.itemsize
    at, crc = start, 0
    for chunk in chunks:
        if chunk.dtype != dtype:
            raise ValueError(f"was given chunks of {chunk.dtype}, expected {dtype}")
        if at + chunk.nbytes > end:
            raise ValueError(
                f"was given more than {end - start} bytes, which its shape {shape} has"
            )
        for piece in _pieces(chunk):
            crc = zlib.crc32(piece, crc) if checksum else 0
            with lock:
                write_all(descriptor, piece, at)
            at += len(piece)
    if at < end:
        raise ValueError(
            f"was given {at - start} bytes, expected the {end - start} of shape {shape}"
        )
    return crc


def write_all(descriptor: int, data: "bytes | bytearray | memoryview", at: int) -> None:
    """Write bytes at a place of an open file. (The system may write a part: a full disk fails only
    on the next call.)"""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, at)
        left, at = left[written:], at + written


def _pieces(array: "np.ndarray") -> Iterator[memoryview]:
    """Yield the bytes of an array in C order, at most ``_PIECE`` at a time."""
    import numpy as np

    for flat in flattened(array, _PIECE):
        data = flat.view(np.uint8).data
        for i in range(0, len(data), _PIECE):
            yield data[i : i + _PIECE]
