"""Cuts arrays into chunks of equal shapes."""

import itertools
import math
from collections.abc import Iterator

# Stock Orbax makes one chunk of every array, and compressing one takes three times its size. With
# 32 MiB, two cores are busy with a single array, and the writer takes 200 to 400 MiB, of which
# about 200 are what malloc keeps. Smaller ones are no faster and make more files.
CHUNK = 32 << 20

Region = tuple[slice, ...]  # a part of an array: a slice of each dimension


def chunk_shape(shape: tuple[int, ...], item_size: int, limit: int = CHUNK) -> tuple[int, ...]:
    """The largest chunks of at most ``limit`` bytes that are contiguous in C order.

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


def part_chunks(
    shape: tuple[int, ...], parts: tuple[int, ...], item_size: int, limit: int = CHUNK
) -> tuple[int, ...]:
    """Chunks of which none lies in two parts of an array, and of which those beside each other,
    with one entry or some along the first axes, take at most ``limit`` bytes if they can.

    Args:
        shape: of the array.
        parts: along each dimension, which they divide.
        item_size: bytes of an element.
        limit: bytes that are in memory at a time.
    """
    part = [n // count for n, count in zip(shape, parts, strict=True)]
    chunk, inner = list(part), item_size * math.prod(shape)
    for axis, size in enumerate(shape):
        inner //= size
        rows = max(limit // inner, 1)
        chunk[axis] = max(n for n in range(1, part[axis] + 1) if part[axis] % n == 0 and n <= rows)
        if chunk[axis] > 1 or rows > 1:
            break
    return tuple(chunk)


def regions(shape: tuple[int, ...], grid: tuple[int, ...]) -> Iterator[Region]:
    """The parts of an array that chunks of a grid hold, in C order."""
    starts = (range(0, n, step) for n, step in zip(shape, grid, strict=True))
    for corner in itertools.product(*starts):
        parts = zip(corner, grid, shape, strict=True)
        yield tuple(slice(at, min(at + step, n)) for at, step, n in parts)
