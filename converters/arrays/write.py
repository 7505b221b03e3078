"""Writes arrays to files as fast as the disk takes them."""

import errno
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from griffin_eval.converters.arrays.pieces import flattened
from griffin_eval.errors import BadInput

if TYPE_CHECKING:
    import numpy as np


_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
_PIECE = 1 << 22  # bytes written at a time: few enough to be in the cache still when summed


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turns what the system says against writing to a path into a sentence, BadInput."""
    try:
        yield
    except OSError as error:
        raise cannot_be_written(path, error.strerror or str(error)) from None


def cannot_be_written(path: str | Path, reason: str) -> BadInput:
    """The error for a path, which names its disk where that is what refuses."""
    if any(os.strerror(code) in reason for code in _OF_THE_DISK):
        there = os.path.abspath(path)
        while not os.path.ismount(there):
            there = os.path.dirname(there)
        reason += f" (the disk at {there})"
    return BadInput(f"{path} cannot be written: {reason}")


def write_array(
    descriptor: int,
    start: int,
    shape: tuple[int, ...],
    dtype: "np.dtype",
    chunks: "Iterable[np.ndarray]",
    *,
    checksum: bool = False,
) -> int:
    """Writes the elements of an array, in C order, into an open file; returns their CRC-32.

    Args:
        descriptor: descriptor of the file.
        start: byte of the file at which the array begins.
        shape: shape of the whole array.
        dtype: dtype that every chunk must have.
        chunks: consecutive pieces, along the first axis or flat. Any strides: what is not
            contiguous is copied a few MiB at a time.
        checksum: whether to compute the CRC; 0 is returned otherwise.

    Raises:
        ValueError: a phrase about the chunks: another dtype, too many or too few elements.
    """
    import zlib

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
            write_all(descriptor, piece, at)
            at += len(piece)
    if at < end:
        raise ValueError(
            f"was given {at - start} bytes, expected the {end - start} of shape {shape}"
        )
    return crc


def write_all(descriptor: int, data: "bytes | bytearray | memoryview", at: int) -> None:
    """Writes bytes at a place of an open file. (The system may write a part: a full disk fails only
    on the next call.)"""
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, at)
        left, at = left[written:], at + written


def read_all(descriptor: int, count: int, at: int) -> bytes:
    """So many bytes from a place of an open file.

    Raises:
        OSError: the file ends before.
    """
    data = bytearray()
    while len(data) < count:
        part = os.pread(descriptor, count - len(data), at + len(data))
        if not part:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        data += part
    return bytes(data)


def _pieces(array: "np.ndarray") -> Iterator[memoryview]:
    """The bytes of an array in C order, at most ``_PIECE`` at a time."""
    import numpy as np

    for flat in flattened(array, _PIECE):
        data = flat.view(np.uint8).data
        for i in range(0, len(data), _PIECE):
            yield data[i : i + _PIECE]
