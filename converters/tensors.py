"""Lazy tensors: shape and dtype are known, and values are read when they are asked for.

A container gives a `LazyTensor` for each of its tensors. Whatever is done to one on its way
(transposed, indexed, cut, stacked, changed) is a function from lazy tensors to a lazy tensor. All
of them are read in the same ways: a region, in pieces, as a whole, or as a view of a mapped file.
"""

import dataclasses
import itertools
import math
import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import numpy as np
    import torch

# Bytes of an element. A dtype goes by the name that numpy, or ml_dtypes for it, and torch give it.
ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e4m3fnuz"), 1),
    **dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
FLOATS = ("bfloat16", "float16", "float32", "float64")  # dtypes that parameters may have
MAX_DIMENSIONS = 32  # limit of numpy's arrays before version 2
PIECE_BYTES = 16 << 20
# Stock Orbax makes one chunk of every array, and compressing one takes three times its size. With
# 32 MiB, two cores are busy with a single array, and the writer takes 200 to 400 MiB, of which
# about 200 are what malloc keeps. Smaller ones are no faster and make more files.
CHUNK_BYTES = 32 << 20
_TOGETHER = 1 << 18  # elements that are changed at a time, few enough to stay in the cache
_TILE = 256  # columns of a transposed array that are copied at a time

Shape = tuple[int, ...]
Region = tuple[slice, ...]  # a part of an array: a slice of each dimension, with both ends


@dataclasses.dataclass(frozen=True, eq=False)
class LazyTensor:
    """A tensor whose values are read on demand. Several threads may read.

    Attributes:
        dtype: numpy's name of its dtype, such as ``bfloat16``; the container's own name of a dtype
            that no parameter has.
        read: Reads a region into memory; the array may have strides.
        view: Returns the whole tensor over a mapped file, with private pages if the argument is
            true, else read-only ones; None where no file is mapped.
        grid: Shape of the blocks of which reading a part costs as much as reading all; None where
            any leading rows can be read alone.
        crc32: CRC-32 that the container states of the bytes in C order.
        quantised: How the values are stored in fewer bits; None if they are not.
    """

    shape: Shape
    dtype: str
    read: "Callable[[Region], np.ndarray]"
    view: "Callable[[bool], np.ndarray] | None" = None
    grid: Shape | None = None
    nbytes: int = -1
    crc32: int | None = None
    quantised: Any = None

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            nbytes = math.prod(self.shape) * ITEM_BYTES[self.dtype]
            object.__setattr__(self, "nbytes", nbytes)

    @property
    def whole(self) -> Region:
        """Region of the whole tensor."""
        return tuple(slice(0, n) for n in self.shape)

    def numpy(self) -> "np.ndarray":
        """Return the whole tensor: a read-only view of a mapped file, or a new array."""
        return self.read(self.whole) if self.view is None else self.view(False)

    def torch(self) -> "torch.Tensor":
        """Return the whole tensor in torch; writes to it never reach the file."""
        return torch_tensor(self.numpy() if self.view is None else self.view(True))

    def rows(self, start: int, stop: int) -> "np.ndarray":
        """Read entries of the first axis, clipped as slices are."""
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        return self.read((slice(start, max(start, stop)), *self.whole[1:]))

    def band(self, nbytes: int) -> int:
        """Return the number of rows to read at a time, so that no block is read twice."""
        row_bytes = max(1, self.nbytes // max(1, self.shape[0]))
        rows = max(1, nbytes // row_bytes)
        block = 1 if self.grid is None else max(1, self.grid[0])
        return -(-rows // block) * block

    def pieces(self, nbytes: int = PIECE_BYTES) -> "Iterator[np.ndarray]":
        """Yield the tensor in consecutive contiguous pieces of its first axis, each of about
        ``nbytes``."""
        if not self.shape:
            yield contiguous(self.read(()))
            return
        rows = self.band(nbytes)
        for start in range(0, self.shape[0], rows):
            yield from pieces_of(self.rows(start, start + rows), nbytes)


def in_memory(array: "np.ndarray") -> LazyTensor:
    """Return an array as a lazy tensor."""
    return LazyTensor(
        array.shape,
        array.dtype.name,
        lambda region: array[region],
        lambda _: array,
        nbytes=array.nbytes,
    )


def assembled(shape: Shape, dtype: str, pieces: "Iterable[np.ndarray]") -> "np.ndarray":
    """Return the array that pieces along its first axis make."""
    import numpy as np

    out, at = np.empty(shape, numpy_dtype(dtype)), 0
    for piece in pieces:
        out[at : at + len(piece)] = piece
        at += len(piece)
    return out


def filled(shape: Shape, dtype: str, value: float = 0.0) -> LazyTensor:
    """Return a tensor with one value everywhere."""

    def read(region: Region) -> "np.ndarray":
        import numpy as np

        return np.full(shape_of(region), value, numpy_dtype(dtype))

    return LazyTensor(shape, dtype, read)


def rearranged(
    tensor: LazyTensor,
    shape: Shape,
    outer: Callable[[Region], Region],
    inner: "Callable[[np.ndarray, Region], np.ndarray]",
    grid: Shape | None,
) -> LazyTensor:
    """Return the elements of a tensor in another arrangement.

    Args:
        outer: Returns the region of ``tensor`` that holds a region of the result.
        inner: Returns the region of the result from what was read there, without a copy.
    """
    view, whole = tensor.view, tuple(slice(0, n) for n in shape)
    return LazyTensor(
        shape,
        tensor.dtype,
        lambda region: inner(tensor.read(outer(region)), region),
        None if view is None else lambda private: inner(view(private)[outer(whole)], whole),
        grid,
    )


def transposed(tensor: LazyTensor) -> LazyTensor:
    """Return the tensor with its axes in reverse."""
    grid = tensor.shape if tensor.grid is None and len(tensor.shape) > 1 else tensor.grid
    return rearranged(
        tensor, tensor.shape[::-1], lambda r: r[::-1], lambda a, _: a.T, grid and grid[::-1]
    )


def index(tensor: LazyTensor, at: int, axis: int = 0) -> LazyTensor:
    """Return one entry of an axis, without that axis; IndexError if there is no such axis."""
    axis = range(len(tensor.shape))[axis]
    before, behind = slice(0, axis), slice(axis + 1, None)
    return rearranged(
        tensor,
        (*tensor.shape[before], *tensor.shape[behind]),
        lambda r: (*r[:axis], slice(at, at + 1), *r[axis:]),
        lambda a, _: a[(*(slice(None),) * axis, 0)],
        tensor.grid and (*tensor.grid[before], *tensor.grid[behind]),
    )


def expanded(tensor: LazyTensor, axis: int) -> LazyTensor:
    """Return the tensor with one axis more, of length 1."""

    def inner(array: "np.ndarray", region: Region) -> "np.ndarray":
        rest = (slice(None),) * axis
        return array[(*rest, None)][(*rest, region[axis])]

    return rearranged(
        tensor,
        (*tensor.shape[:axis], 1, *tensor.shape[axis:]),
        lambda r: (*r[:axis], *r[axis + 1 :]),
        inner,
        tensor.grid and (*tensor.grid[:axis], 1, *tensor.grid[axis:]),
    )


def cut(tensor: LazyTensor, axis: int, start: int, stop: int) -> LazyTensor:
    """Return entries ``start`` to ``stop`` of an axis."""

    def outer(r: Region) -> Region:
        along = slice(r[axis].start + start, r[axis].stop + start)
        return (*r[:axis], along, *r[axis + 1 :])

    shape = (*tensor.shape[:axis], stop - start, *tensor.shape[axis + 1 :])
    return rearranged(tensor, shape, outer, lambda a, _: a, tensor.grid)


def stacked(tensors: Sequence[LazyTensor]) -> LazyTensor:
    """Return tensors of one shape and dtype, stacked along a new first axis."""
    first = tensors[0]

    def read(region: Region) -> "np.ndarray":
        import numpy as np

        out = np.empty(shape_of(region), numpy_dtype(first.dtype))
        for row, tensor in zip(out, tensors[region[0]], strict=True):
            fill(row, tensor.read(region[1:]))
        return out

    grid = next((t.grid for t in tensors if t.grid is not None), None)
    return LazyTensor((len(tensors), *first.shape), first.dtype, read, grid=grid and (1, *grid))


def changed(tensor: LazyTensor, change: "Callable[[np.ndarray], np.ndarray]") -> LazyTensor:
    """Return the tensor with its values changed one by one."""

    def read(region: Region) -> "np.ndarray":
        import numpy as np

        values = tensor.read(region)
        out = np.empty(values.shape, values.dtype)
        rows = max(1, _TOGETHER // max(1, math.prod(values.shape[1:])))
        for start in range(0, len(values), rows):
            out[start : start + rows] = change(values[start : start + rows])
        return out

    return LazyTensor(tensor.shape, tensor.dtype, read, grid=tensor.grid)


def by_rows(
    shape: Shape, dtype: str, rows: "Callable[[int, int], np.ndarray]", **facts: Any
) -> LazyTensor:
    """Return a tensor whose rows are computed by ``rows(start, stop)``, with all columns."""

    def read(region: Region) -> "np.ndarray":
        first, *others = region
        return rows(first.start, first.stop)[(slice(None), *others)]

    return LazyTensor(shape, dtype, read, **facts)


class Kept:
    """A cache of the ``count`` blocks that were read last, so that parameters in one block read it
    once. It serves tensors whose blocks hold several entries of the first axis."""

    def __init__(self, count: int = 2):
        self._count = count
        self._blocks: OrderedDict[tuple[int, int], np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, tensor: LazyTensor) -> LazyTensor:
        """Return the tensor with reads through the cache."""
        grid, shape = tensor.grid, tensor.shape
        if grid is None or len(shape) < 2 or grid[0] == 1 or grid[1:] != shape[1:]:
            return tensor

        def read(region: Region) -> "np.ndarray":
            first, last = region[0].start // grid[0], (region[0].stop - 1) // grid[0]
            if first != last:
                return tensor.read(region)
            start = first * grid[0]
            with self._lock:
                block = self._blocks.pop((id(tensor), start), None)
                if block is None:
                    if len(self._blocks) >= self._count:
                        self._blocks.popitem(last=False)
                    block = tensor.rows(start, start + grid[0])
                self._blocks[id(tensor), start] = block
            inside = slice(region[0].start - start, region[0].stop - start)
            return block[(inside, *region[1:])]

        return dataclasses.replace(tensor, read=read)


def numpy_dtype(name: str) -> "np.dtype":
    """Return numpy's dtype of a name, such as ``"bfloat16"``, which ml_dtypes adds to it."""
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, name, name))


def torch_tensor(array: "np.ndarray") -> "torch.Tensor":
    """Return a contiguous tensor over the memory of an array, or over a copy if that is read-only
    or has strides."""
    import torch

    if not array.flags.writeable:
        array = array.copy()
    dtype = getattr(torch, array.dtype.name)
    if array.dtype.isbuiltin != 1:  # a dtype of ml_dtypes, which torch takes as integers
        array = array.view(f"u{array.itemsize}")
    return torch.from_numpy(array).view(dtype).contiguous()


def shape_of(region: Region) -> Shape:
    """Return the shape of a region."""
    return tuple(part.stop - part.start for part in region)


def regions(shape: Shape, grid: Shape) -> Iterator[Region]:
    """Yield the regions of an array that the blocks of a grid hold, in C order."""
    starts = (range(0, n, step) for n, step in zip(shape, grid, strict=True))
    for corner in itertools.product(*starts):
        parts = zip(corner, grid, shape, strict=True)
        yield tuple(slice(at, min(at + step, n)) for at, step, n in parts)


def chunk_shape(shape: Shape, item_size: int, limit: int = CHUNK_BYTES) -> Shape:
    """Return the largest chunks of at most ``limit`` bytes that are contiguous in C order.

    They have one entry along the leading axes, some along one axis, and all of the others; sizes
    are balanced, so that the last is not much smaller.
    """
    if not shape:
        return ()
    sizes = [max(1, n) for n in shape]  # zarr has no chunks of size 0
    inner, axis = item_size, len(sizes) - 1
    while axis and inner * sizes[axis] <= limit:
        inner *= sizes[axis]
        axis -= 1
    count = math.ceil(sizes[axis] / max(1, limit // inner))
    return (1,) * axis + (math.ceil(sizes[axis] / count), *sizes[axis + 1 :])


def part_chunks(shape: Shape, parts: Shape, item_size: int, limit: int = CHUNK_BYTES) -> Shape:
    """Return the shape of chunks that no boundary between ``parts`` cuts. ``parts`` are counts that
    divide each dimension. Chunks beside each other take at most ``limit`` bytes, if possible."""
    part = [n // count for n, count in zip(shape, parts, strict=True)]
    chunk, inner = list(part), item_size * math.prod(shape)
    for axis, size in enumerate(shape):
        inner //= size
        rows = max(limit // inner, 1)
        chunk[axis] = max(n for n in range(1, part[axis] + 1) if part[axis] % n == 0 and n <= rows)
        if chunk[axis] > 1 or rows > 1:
            break
    return tuple(chunk)


def pieces_of(array: "np.ndarray", nbytes: int = PIECE_BYTES) -> "Iterator[np.ndarray]":
    """Yield an array in contiguous pieces of its leading axis, of about ``nbytes``."""
    rows = max(1, nbytes // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        yield contiguous(array[start : start + rows])


def together(
    one: "Iterable[np.ndarray]", other: "Iterable[np.ndarray]"
) -> "Iterator[tuple[np.ndarray, np.ndarray]]":
    """Yield equal numbers of rows of two arrays of one length, which come in pieces."""
    import numpy as np

    left, right = map(np.atleast_1d, one), map(np.atleast_1d, other)
    x, y = next(left, None), next(right, None)
    while x is not None and y is not None:
        rows = min(len(x), len(y))
        yield x[:rows], y[:rows]
        x = x[rows:] if rows < len(x) else next(left, None)
        y = y[rows:] if rows < len(y) else next(right, None)


def same_bits(one: LazyTensor, other: LazyTensor) -> bool:
    """Return whether two tensors are equal in shape, dtype and every bit, by reading pieces."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    pairs = together(one.pieces(), other.pieces())
    return all(bytes_of(x) == bytes_of(y) for x, y in pairs)


def flattened(array: "np.ndarray", nbytes: int) -> "Iterator[np.ndarray]":
    """Yield the elements of an array in C order, as consecutive contiguous flat arrays: a
    contiguous array as one view, another in copies of at most ``nbytes`` bytes."""
    if array.flags.c_contiguous or array.nbytes <= nbytes:
        yield contiguous(array).reshape(-1)
        return
    rows = max(1, len(array) * nbytes // array.nbytes)
    for start in range(0, len(array), rows):
        part = array[start : start + rows]
        yield from flattened(part[0] if len(part) == 1 and part.nbytes > nbytes else part, nbytes)


def contiguous(array: "np.ndarray") -> "np.ndarray":
    """Return the array, or a copy in C order if it has strides."""
    import numpy as np

    if array.flags.c_contiguous:
        return array
    out = np.empty(array.shape, array.dtype)
    fill(out, array)
    return out


def fill(out: "np.ndarray", values: "np.ndarray") -> None:
    """Copy values of any strides into an array of their shape.

    Transposed matrices are copied four times as fast as by numpy: in bands of a few columns, so
    that the source's cache lines are used before the cache drops them.
    """
    if out.ndim != 2:
        out[...] = values
        return
    for start in range(0, out.shape[1], _TILE):
        out[:, start : start + _TILE] = values[:, start : start + _TILE]


def drop_pages(array: "np.ndarray") -> None:
    """Release the memory of an array over a file that is mapped read-only; leave other arrays
    alone. The array may be read again."""
    import numpy as np

    owner = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, mmap.mmap) or array.flags.writeable or not array.flags.c_contiguous:
        return
    begin = array.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE  # first page that holds nothing else
    whole = (begin + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if whole > 0 and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED, first, whole)


def bytes_of(piece: "np.ndarray") -> memoryview:
    """Return the bytes of an array in C order, without a copy if they are stored in that order."""
    import numpy as np

    return np.ascontiguousarray(piece).view(np.uint8).data


def not_finite(piece: "np.ndarray") -> int:
    """Return the number of values that are NaN or infinite."""
    import numpy as np

    # numpy is slow with bfloat16. NaN and infinity are the largest bit patterns: as signed numbers
    # without the sign bit, as unsigned numbers with it. Nothing is allocated.
    if piece.dtype.name == "bfloat16" and piece.size:
        positive, negative = piece.view(np.int16).max(), piece.view(np.uint16).max()
        if positive < 0x7F80 and negative < 0xFF80:
            return 0
    return int(np.sum(~np.isfinite(piece)))


def are_naturals(values: object) -> TypeGuard[list[int] | tuple[int, ...]]:
    """Return whether the object is a list or tuple of integers from 0 to 2**63 - 1."""
    return isinstance(values, list | tuple) and all(
        type(n) is int and 0 <= n < 1 << 63 for n in values
    )
