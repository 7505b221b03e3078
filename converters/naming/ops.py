"""The layouts of foreign tensors, as operations that can be undone."""

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
