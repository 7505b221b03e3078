"""The layouts of foreign tensors, as operations that can be undone, and changes of their values."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from griffin_eval.converters.tensors import (
    LazyTensor,
    Shape,
    expanded,
    filled,
    index,
    stacked,
    transposed,
)

if TYPE_CHECKING:
    import numpy as np


class Op(NamedTuple):
    """A reversible change of layout.

    Attributes:
        name: Name, for plans and messages.
        to_canonical: Returns the canonical tensors that a foreign one holds.
        to_foreign: Returns the foreign tensor that holds canonical ones.
        rank: Rank of the foreign tensor; None for any.
        parts: Number of canonical tensors.
    """

    name: str
    to_canonical: Callable[[LazyTensor], tuple[LazyTensor, ...]]
    to_foreign: Callable[..., LazyTensor]
    rank: int | None = None
    parts: int = 1

    def canonical_shapes(self, foreign: Shape) -> tuple[Shape, ...]:
        """Return the shapes of the canonical tensors; IndexError if the foreign one lacks an
        axis."""
        return tuple(tensor.shape for tensor in self.to_canonical(_of_shape(foreign)))

    def foreign_shape(self, *canonical: Shape) -> Shape:
        """Return the shape of the foreign tensor; IndexError if a canonical one lacks an axis."""
        return self.to_foreign(*map(_of_shape, canonical)).shape


def _of_shape(shape: Shape) -> LazyTensor:
    """Return a tensor of zeros, of which only the shape matters."""
    return filled(shape, "float32")


SAME = Op("as it is", lambda x: (x,), lambda x: x)
TRANSPOSE = Op("transpose", lambda x: (transposed(x),), transposed)  # any number of axes
TAPS = Op(  # (K, L) <-> (L, 1, K)
    "taps last",
    lambda x: (expanded(transposed(x), 1),),
    lambda x: transposed(index(x, 0, axis=1)),
    rank=2,
)
SPLIT = Op(  # (2, W, E) <-> gate (E, W), up (E, W)
    "split, transpose",
    lambda x: (transposed(index(x, 0)), transposed(index(x, 1))),
    lambda gate, up: stacked([transposed(gate), transposed(up)]),
    rank=3,
    parts=2,
)
SPLIT_BIAS = Op(  # (2, 1, 1, E) <-> gate (E), up (E)
    "split",
    lambda x: (_bias(x, 0), _bias(x, 1)),
    lambda gate, up: expanded(expanded(stacked([gate, up]), 1), 1),
    rank=4,
    parts=2,
)
ONE_BLOCK = Op(  # (L, L), a dense gate <-> (1, L, L), a gate of one block; its bias (L) <-> (1, L)
    "one block", lambda x: (expanded(transposed(x), 0),), lambda x: transposed(index(x, 0))
)
LAST_AXIS = Op(  # (L, 1, K, 1) <-> (L, 1, K)
    "last axis of one", lambda x: (index(x, 0, axis=-1),), lambda x: expanded(x, len(x.shape))
)


def _bias(both: LazyTensor, part: int) -> LazyTensor:
    return index(index(index(both, part), 0), 0)


FACTORS: dict[str, Callable[[int], float]] = {  # by name, of a width
    "sqrt(width)": math.sqrt,
    "1/sqrt(width)": lambda width: 1 / math.sqrt(width),
}


MINUS_ONE, SCALE_BY = "minus one", "scale by"


class Change(NamedTuple):
    """A change from a tensor's values to a parameter's: ``minus one``, or ``scale by`` a number or
    one of ``FACTORS``."""

    name: str
    factor: float | str = 1.0

    def of(self, width: int) -> "Change":
        """Return the change in a model of a width."""
        factor = self.factor
        return self._replace(factor=FACTORS[factor](width)) if isinstance(factor, str) else self

    def apply(self, values: "np.ndarray") -> "np.ndarray":
        """Return the changed values in their dtype. Differences are computed in float32 or wider,
        so that in 16 and 32 bits they are exact but for one rounding; products in float64."""
        import numpy as np

        if self.name == MINUS_ONE:
            wide = np.float64 if values.dtype == np.float64 else np.float32
            return (values.astype(wide) - 1).astype(values.dtype)
        with np.errstate(over="ignore"):  # non-finite values are counted later
            return (values.astype(np.float64) * float(self.factor)).astype(values.dtype)
