"""The layouts of foreign tensors, as operations that can be undone, and changes of their values."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from griffin_eval.converters.arrays.pieces import fill

if TYPE_CHECKING:
    import numpy as np


Shape = tuple[int, ...]


class Op(NamedTuple):
    """A reversible change of layout.

    Attributes:
        name: for plans and messages.
        to_canonical: foreign array -> its canonical arrays.
        to_foreign: canonical arrays -> the foreign array.
        canonical_shapes: foreign shape -> canonical shapes.
        foreign_shape: canonical shapes -> foreign shape.
        rank: rank of the foreign array; None for any.
        parts: number of canonical arrays.
    """

    name: str
    to_canonical: Callable[["np.ndarray"], tuple["np.ndarray", ...]]
    to_foreign: Callable[..., "np.ndarray"]
    canonical_shapes: Callable[[Shape], tuple[Shape, ...]]
    foreign_shape: Callable[..., Shape]
    rank: int | None = None
    parts: int = 1


def _stack(*parts: "np.ndarray") -> "np.ndarray":
    import numpy as np

    out = np.empty((len(parts), *parts[0].shape), parts[0].dtype)
    for i, part in enumerate(parts):
        fill(out[i], part)
    return out


SAME = Op("as it is", lambda x: (x,), lambda x: x, lambda s: (s,), lambda s: s)
TRANSPOSE = Op(  # the axes in reverse, however many
    "transpose", lambda x: (x.T,), lambda x: x.T, lambda s: (s[::-1],), lambda s: s[::-1]
)
TAPS = Op(  # (K, L) <-> (L, 1, K)
    "taps last",
    lambda x: (x.T[:, None],),
    lambda x: x[:, 0].T,
    lambda s: ((s[1], 1, s[0]),),
    lambda s: (s[2], s[0]),
    2,
)
SPLIT = Op(  # (2, W, E) <-> gate (E, W), up (E, W)
    "split, transpose",
    lambda x: (x[0].T, x[1].T),
    lambda gate, up: _stack(gate.T, up.T),
    lambda s: (s[:0:-1], s[:0:-1]),
    lambda gate, up: (2, *gate[::-1]),
    3,
    2,
)
SPLIT_BIAS = Op(  # (2, 1, 1, E) <-> gate (E), up (E)
    "split",
    lambda x: (x[0, 0, 0], x[1, 0, 0]),
    lambda gate, up: _stack(gate, up)[:, None, None],
    lambda s: (s[3:], s[3:]),
    lambda gate, up: (2, 1, 1, *gate),
    4,
    2,
)
ONE_BLOCK = Op(  # (L, L), a dense gate <-> (1, L, L), a gate of one block; its bias (L) <-> (1, L)
    "one block",
    lambda x: (x.T[None],),
    lambda x: x[0].T,
    lambda s: ((1, *s[::-1]),),
    lambda s: s[:0:-1],
)
LAST_AXIS = Op(  # (L, 1, K, 1) <-> (L, 1, K)
    "last axis of one",
    lambda x: (x[..., 0],),
    lambda x: x[..., None],
    lambda s: (s[:-1],),
    lambda s: (*s, 1),
)
FACTORS: dict[str, Callable[[int], float]] = {  # by name, of a width
    "sqrt(width)": math.sqrt,
    "1/sqrt(width)": lambda width: 1 / math.sqrt(width),
}


class Change(NamedTuple):
    """A change of the values of a tensor, which gives those of a parameter.

    Attributes:
        name: ``minus one`` or ``scale by``.
        factor: of the latter; a text is one of ``FACTORS``.
    """

    name: str
    factor: float | str = 1.0

    def of(self, width: int) -> "Change":
        """The change in a model of a width."""
        factor = self.factor
        return self._replace(factor=FACTORS[factor](width)) if isinstance(factor, str) else self

    def apply(self, values: "np.ndarray") -> "np.ndarray":
        """The changed values: computed in float32 or wider, rounded once to the dtype they had.

        What is subtracted from 16 or 32 bits is the exact difference, rounded; a product is taken
        in float64.
        """
        import numpy as np

        if self.name == "minus one":
            wide = np.float64 if values.dtype == np.float64 else np.float32
            return (values.astype(wide) - 1).astype(values.dtype)
        with np.errstate(over="ignore"):  # what is not finite is counted later
            return (values.astype(np.float64) * float(self.factor)).astype(values.dtype)
