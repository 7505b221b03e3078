"""Arrays in pieces, so that little memory is needed to write or to hash them."""

import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


CHUNK_BYTES = 16 << 20
_TILE = 256  # columns of a transposed array that are copied at a time


def chunks(array: "np.ndarray", nbytes: int = CHUNK_BYTES) -> Iterator["np.ndarray"]:
    """An array in contiguous, little-endian pieces of its leading axis, of about ``nbytes``."""
    import numpy as np

    if array.ndim == 0:
        yield np.ascontiguousarray(array)
        return
    row_bytes = max(1, array[:1].nbytes)
    rows = max(1, nbytes // row_bytes)
    for start in range(0, len(array), rows):
        part = array[start : start + rows]
        if not part.flags.c_contiguous:
            view, part = part, np.empty(part.shape, part.dtype)
            fill(part, view)
        yield part


def flattened(array: "np.ndarray", nbytes: int) -> Iterator["np.ndarray"]:
    """The elements of an array in C order, as consecutive contiguous flat arrays.

    A contiguous array is a single view; another is copied in parts of at most ``nbytes`` bytes.
    """
    import numpy as np

    if array.flags.c_contiguous or array.nbytes <= nbytes:
        yield np.ascontiguousarray(array).reshape(-1)
        return
    rows = max(1, len(array) * nbytes // array.nbytes)
    for start in range(0, len(array), rows):
        part = array[start : start + rows]
        yield from flattened(part[0] if len(part) == 1 and part.nbytes > nbytes else part, nbytes)


def fill(out: "np.ndarray", values: "np.ndarray") -> None:
    """Copies values of any strides into an array of their shape.

    As numpy does it, but transposed matrices four times as fast: their rows are a few columns
    long at a time, so that what was read of the source is used before the cache drops it.
    """
    if out.ndim != 2:
        out[...] = values
        return
    for start in range(0, out.shape[1], _TILE):
        out[:, start : start + _TILE] = values[:, start : start + _TILE]


def drop_pages(array: "np.ndarray") -> None:
    """Takes the pages of an array over a file that is mapped read-only out of this process's
    memory, once it was read; nothing for other arrays. It may be read again."""
    import numpy as np

    owner = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, mmap.mmap) or array.flags.writeable or not array.flags.c_contiguous:
        return
    begin = array.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE  # of the pages that hold nothing else
    whole = (begin + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if whole > 0 and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED, first, whole)


def bytes_of(piece: "np.ndarray") -> memoryview:
    """The bytes of an array in C order, which are not copied if they lie so."""
    import numpy as np

    return np.ascontiguousarray(piece).view(np.uint8).data
