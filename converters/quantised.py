"""Quantised parameters, dequantised as their own libraries do it."""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from griffin_eval.converters.tensors import LazyTensor, Shape, by_rows, numpy_dtype

if TYPE_CHECKING:
    import numpy as np

_TOGETHER = 1 << 18


class PackedRows(NamedTuple):
    """A matrix [O, I] in fewer bits, of which every row has a row of each array.

    Attributes:
        elements: uint8 [O, I * bits / 8] in the order in which they are stored, or int8 [O, I].
        scales: [O, S], each of I / S elements.
        shifts: [O, S] of MLX, None of bitsandbytes.
        table: float32 [256, 8 / bits], values of the elements of a byte; None where bits are 8 or
            do not divide 8.
    """

    bits: int
    elements: "np.ndarray"
    scales: "np.ndarray"
    shifts: "np.ndarray | None" = None
    table: "np.ndarray | None" = None


@dataclasses.dataclass(frozen=True)
class Quantised:
    """How a parameter is stored in fewer bits.

    Attributes:
        codec: ``bitsandbytes``, ``mlx`` or ``gguf``.
        scheme: How it is stored, in a few words.
        bits: Bits that an element takes in the files, scales included.
        packed_rows: Returns the stored arrays unchanged, except for scales in 8 bits, which are
            dequantised; None for anything but a matrix in rows of whole bytes, and for blocks of
            other libraries.
    """

    codec: str
    scheme: str
    bits: float
    packed_rows: Callable[[], PackedRows | None] = lambda: None


def dequantised(
    shape: Shape,
    dtype: str,
    unit: int,
    values: "Callable[[int, int], np.ndarray]",
    quantised: Quantised,
    together: int = _TOGETHER,
) -> LazyTensor:
    """Return a parameter of one or more dimensions that is dequantised while it is read.

    Args:
        unit: Elements in C order that can be dequantised alone: a row, or a block.
        values: Returns the elements of units ``first`` to ``last``; the last unit may be shorter.
        together: Elements that are dequantised at a time, so that they stay in a cache.
    """
    unit = max(1, unit)

    def rows(start: int, stop: int) -> "np.ndarray":
        import numpy as np

        out = np.empty((stop - start, *shape[1:]), numpy_dtype(dtype))
        flat, begin = out.reshape(-1), start * math.prod(shape[1:])
        end, step = begin + flat.size, max(1, together // unit)
        with np.errstate(all="ignore"):  # non-finite values are counted later
            for first in range(begin // unit, -(-end // unit), step):
                last = min(first + step, -(-end // unit))
                low, high = max(begin, first * unit), min(end, last * unit)
                found = values(first, last)[low - first * unit : high - first * unit]
                flat[low - begin : high - begin] = found
        return out

    return by_rows(shape, dtype, rows, quantised=quantised)


def bits_of(stored: int, shape: Shape) -> float:
    """Return the bits per element of a tensor of a shape that takes ``stored`` bytes."""
    return 8 * stored / max(1, math.prod(shape))
