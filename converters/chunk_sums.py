"""Checksums of the chunks of an array, with which readers of a part can check that part."""

import math
from typing import Any, NamedTuple

import numpy as np
import xxhash

from griffin_eval.converters.tensors import Region, are_naturals, bytes_of, regions

HASH = "xxh3_64"  # runs at memory speed; a second SHA-256 would take as long as the first


class ChunkSums(NamedTuple):
    """The checksum of each chunk of an array.

    Attributes:
        shape: Shape of the array.
        grid: Shape of a chunk; the last ones along an axis may be smaller.
        sums: XXH3 (64 bits) of the bytes of every chunk in hexadecimal digits; bytes and chunks in
            C order.
    """

    shape: tuple[int, ...]
    grid: tuple[int, ...]
    sums: tuple[str, ...]

    @classmethod
    def of_record(cls, shape: Any, record: Any) -> "ChunkSums":
        """Read a manifest's entry; ValueError, KeyError or TypeError if it is none."""
        grid, sums = record["shape"], tuple(record[HASH].split())
        if not are_naturals(shape) or not are_naturals(grid) or len(shape) != len(grid):
            raise ValueError
        counts = [-(-n // size) for n, size in zip(shape, grid, strict=True) if size]
        if len(counts) < len(grid) or math.prod(counts) != len(sums):
            raise ValueError
        return cls(tuple(shape), tuple(grid), sums)

    def record(self) -> dict[str, Any]:
        """Return a manifest's entry."""
        return {"shape": list(self.grid), HASH: " ".join(self.sums)}

    def check(self, array: np.ndarray, part: Region) -> tuple[list[int], int]:
        """Compare a part of the array, at the region ``part``, with the checksums of the chunks in
        it.

        Returns:
            The numbers of the chunks that differ, and the bytes of the chunks that lie in it as a
                whole; others cannot be checked.
        """
        wrong, nbytes = [], 0
        for number, region in enumerate(regions(self.shape, self.grid)):
            pairs = list(zip(region, part, strict=True))
            if any(chunk.start < cut.start or chunk.stop > cut.stop for chunk, cut in pairs):
                continue
            inside = (slice(r.start - cut.start, r.stop - cut.start) for r, cut in pairs)
            chunk = array[tuple(inside)]
            nbytes += chunk.nbytes
            if xxhash.xxh3_64(bytes_of(chunk)).hexdigest() != self.sums[number]:
                wrong.append(number)
        return wrong, nbytes


class ChunkSummer:
    """Computes `ChunkSums` of an array that comes in pieces along its first axis."""

    def __init__(self, shape: tuple[int, ...], grid: tuple[int, ...]):
        self._shape, self._grid = shape, grid
        self._beside = list(regions(shape[1:], grid[1:]))  # chunks of the same rows
        self._open: list[Any] = []  # their hashes so far
        self._rows, self._sums = 0, []

    def update(self, piece: np.ndarray) -> None:
        """Add the next rows to the checksums."""
        while len(piece):
            left = self._grid[0] - self._rows % self._grid[0]
            band, piece = piece[:left], piece[left:]
            self._open = self._open or [xxhash.xxh3_64() for _ in self._beside]
            for one, columns in zip(self._open, self._beside, strict=True):
                one.update(bytes_of(band[:, *columns]))
            self._rows += len(band)
            if self._rows % self._grid[0] == 0 or self._rows == self._shape[0]:
                self._sums += [one.hexdigest() for one in self._open]
                self._open = []

    def result(self) -> ChunkSums:
        """Return the checksums, once all rows were given."""
        return ChunkSums(self._shape, self._grid, tuple(self._sums))
