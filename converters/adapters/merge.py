"""Merges adapters into the parameters of a model, a piece at a time, in float32.

A parameter W becomes W + Σ w s B A over the adapters, with their weights w and scales s: what
``add_weighted_adapter`` of peft, with ``combination_type="cat"``, makes of several. It is rounded
to the dtype that W is stored in once, at the end.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from griffin_eval.converters.adapters.changes import Change
from griffin_eval.converters.tensors import LazyTensor, by_rows, bytes_of, numpy_dtype, together
from griffin_eval.errors import CheckpointError
from griffin_eval.layout import ParamSpec

if TYPE_CHECKING:
    import numpy as np

_TOGETHER = 1 << 18  # elements that are changed at a time, few enough to stay in the cache
_TILE_ROWS = 16
_TILE_WORK = 1 << 18  # multiplications in a product, up to which OpenBLAS has no use for threads
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38, "float64": 1.797e308}

# Changes rows in place: their array, the number of the first one, and the numbers of the group that
# they are of.
Step = Callable[["np.ndarray", int, slice], None]


def merged(stored: LazyTensor, spec: ParamSpec, changes: Sequence[Change]) -> LazyTensor:
    """Return a parameter with the changes of adapters, whose matrices are kept as long as it is.
    Reading it raises CheckpointError if an adapter holds NaN, or a sum does not fit into the
    dtype."""
    dtype = stored.dtype
    value = next((change for change in changes if change.value is not None), None)
    if value is not None:
        stored = _replaced(value, dtype)
    wide = "float64" if dtype == "float64" else "float32"
    if not any(change.added or change.tokens or change.a for change in changes):
        return stored

    @functools.cache
    def steps() -> list[Step]:
        return [step for change in changes if (step := _step(change, spec, wide)) is not None]

    @functools.cache
    def magnitudes() -> "np.ndarray | None":
        return _column_factors(spec, changes, steps(), stored, wide)

    def rows(start: int, stop: int) -> "np.ndarray":
        import numpy as np

        piece, factors = stored.rows(start, stop), magnitudes()
        result = np.empty(piece.shape, piece.dtype)
        for part, values in _changed(piece, start, spec, steps(), wide):
            if factors is not None:
                values *= factors
            _check_range(spec.name, values, piece[part], dtype)
            result[part] = values
        return result

    return by_rows(spec.shape, dtype, rows, grid=stored.grid)


def _changed(
    piece: "np.ndarray", start: int, spec: ParamSpec, steps: Sequence[Step], wide: str
) -> Iterator[tuple[slice, "np.ndarray"]]:
    """Rows of a piece after all steps, in a buffer that is used again.

    Which rows are changed together depends on the parameter alone, and a product is computed for
    all of them even if some are not asked for: so no bit depends on the size of pieces.
    """
    import numpy as np

    group = max(1, _TOGETHER * spec.shape[0] // spec.size)
    buffer = np.empty((min(group, len(piece)), *piece.shape[1:]), wide)
    stop = start + len(piece)
    for first in range(start // group * group, stop, group):
        begin, end = max(start, first), min(stop, first + group)
        rows = slice(begin - start, end - start)
        values = buffer[: end - begin]
        values[...] = piece[rows]
        with np.errstate(over="ignore", invalid="ignore"):  # said later, with the name
            for step in steps:
                step(values, begin, slice(first, min(first + group, spec.shape[0])))
        yield rows, values


def _check_range(name: str, values: "np.ndarray", piece: "np.ndarray", dtype: str) -> None:
    """Refuses sums that a dtype cannot hold, unless the base's own values are not finite."""
    import numpy as np

    if not values.size:
        return
    largest = max(values.max(), -values.min())  # NaN if one of them is
    if not largest <= _LARGEST[dtype] and np.isfinite(piece).all():
        raise CheckpointError(f"{name}: the sum with the adapter does not fit into {dtype}")


def _replaced(change: Change, dtype: str) -> LazyTensor:
    """What takes the place of a parameter, in the parameter's dtype."""
    assert change.value is not None
    tensor = change.adapter.container.tensors[change.value]

    def rows(start: int, stop: int) -> "np.ndarray":
        import numpy as np

        piece = tensor.rows(start, stop)
        with np.errstate(over="ignore"):
            cast = piece.astype(numpy_dtype(dtype), copy=False)
        if np.isfinite(piece).all() and not np.isfinite(cast).all():
            raise CheckpointError(
                f"{change.adapter.folder}: values of {change.value} do not fit into {dtype}"
            )
        return cast

    return by_rows(tensor.shape, dtype, rows, grid=tensor.grid)


def _step(change: Change, spec: ParamSpec, wide: str) -> Step | None:
    """The change of rows of a parameter in place; None for a change that replaces all."""
    import numpy as np

    scale = np.dtype(wide).type(change.scale)
    if change.added is not None:
        bias = change.adapter.array(change.added, wide)

        def add(values: np.ndarray, start: int, group: slice) -> None:
            values += scale * bias[start : start + len(values)]

        return add
    if change.tokens is not None:
        rows = change.adapter.array(change.tokens, wide)
        ids = np.array(change.ids, np.int64)

        def put(values: np.ndarray, start: int, group: slice) -> None:
            here = (ids >= start) & (ids < start + len(values))
            values[ids[here] - start] = rows[here]

        return put
    if change.a is None:
        return None
    left, right = factors(change, len(spec.shape), wide, spec.shape)
    by_row = None
    if change.magnitude is not None and not change.rows:
        by_row = change.adapter.array(change.magnitude, wide)

    def add_product(values: np.ndarray, start: int, group: slice) -> None:
        product = np.empty((group.stop - group.start, *spec.shape[1:]), wide)
        if left.ndim == 2:
            _multiply(left[group], right, product)
        else:
            for matrices in zip(left[group], right[group], product, strict=True):
                _multiply(*matrices)
        product *= scale
        values += product[start - group.start :][: len(values)]
        if by_row is not None:
            norms = np.sqrt(np.einsum("ij,ij->i", values, values))
            _check_norms(change, norms)
            values *= (by_row[start : start + len(values)] / norms)[:, None]

    return add_product


def factors(
    change: Change, rank: int, wide: str, shape: tuple[int, ...] = ()
) -> tuple["np.ndarray", "np.ndarray"]:
    """Return both factors of what is added, such that it is their product; of stacks, a stack
    each."""
    import numpy as np

    assert change.a is not None and change.b is not None
    a, b = (change.adapter.array(name, wide) for name in (change.a, change.b))
    if change.rows:
        return np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    if rank == 3:  # as peft lays out those of experts
        stacked = shape[0]
        b = b.reshape(shape[1], -1, stacked).transpose(2, 0, 1)
        return np.ascontiguousarray(b), a.reshape(stacked, -1, shape[2])
    return b, a


def _multiply(left: "np.ndarray", right: "np.ndarray", out: "np.ndarray") -> None:
    """The product of two matrices, in tiles that OpenBLAS gives to one thread each: several
    would wait for each other, and for other workers, longer than they compute."""
    import numpy as np

    columns = max(1, _TILE_WORK // (_TILE_ROWS * max(1, left.shape[1])))
    for i in range(0, len(left), _TILE_ROWS):
        for j in range(0, right.shape[1], columns):
            rows, tile = slice(i, i + _TILE_ROWS), slice(j, j + columns)
            np.matmul(left[rows], right[:, tile], out=out[rows, tile])


def _column_factors(
    spec: ParamSpec,
    changes: Sequence[Change],
    steps: Sequence[Step],
    stored: LazyTensor,
    wide: str,
) -> "np.ndarray | None":
    """The factors of an embedding's columns in DoRA, whose norms are over all rows."""
    import numpy as np

    change = next((c for c in changes if c.rows and c.magnitude is not None), None)
    if change is None:
        return None
    assert change.magnitude is not None
    squares, start = np.zeros(spec.shape[1]), 0
    for piece in stored.pieces():
        for _, values in _changed(piece, start, spec, steps, wide):
            squares += np.einsum("ij,ij->j", values, values, dtype=np.float64)
        start += len(piece)
    norms = np.sqrt(squares).astype(wide)
    _check_norms(change, norms)
    return change.adapter.array(change.magnitude, wide) / norms


def _check_norms(change: Change, norms: "np.ndarray") -> None:
    if not norms.all():
        raise CheckpointError(
            f"{change.adapter.folder}: a row or column that {change.magnitude} scales is zero in "
            "the base, so that DoRA would divide by zero"
        )


def holds(stored: LazyTensor, change: Change) -> bool:
    """Whether the base's parameter has the bits of what takes its place, once that is cast."""
    import numpy as np

    assert change.value is not None
    theirs = change.adapter.container.tensors[change.value]
    if theirs.shape != stored.shape:
        return False
    dtype = numpy_dtype(stored.dtype)
    with np.errstate(over="ignore"):
        return all(
            bytes_of(other.astype(dtype, copy=False)) == bytes_of(one)
            for one, other in together(stored.pieces(), theirs.pieces())
        )
