"""Merges adapters into the parameters of a model, a piece at a time, in float32.

A parameter W becomes W + Σ w s B A over the adapters, with their weights w and scales s: what
``add_weighted_adapter`` of peft, with ``combination_type="cat"``, makes of several. It is rounded
to the dtype that W is stored in once, at the end.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.adapters.adapter import Adapter
from griffin_eval.converters.adapters.changes import Change, changes_of
from griffin_eval.converters.arrays.dtypes import ITEM_BYTES, numpy_dtype
from griffin_eval.converters.arrays.pieces import CHUNK_BYTES, bytes_of, chunks
from griffin_eval.converters.naming.tables import EMBEDDING, HEAD
from griffin_eval.errors import CheckpointError
from griffin_eval.layout import ParamSpec

if TYPE_CHECKING:
    import numpy as np

_ROWS = 128  # of a product that are computed together, wherever a piece begins or ends
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38, "float64": 1.797e308}

Pieces = Iterator["np.ndarray"]


class Merge(NamedTuple):
    """What adapters make of a model.

    Attributes:
        config: of the merged model.
        changes: by canonical name, what is done to the parameters that change, in its order.
    """

    config: GriffinConfig
    changes: Mapping[str, Sequence[Change]]


def plan_merge(
    adapters: Sequence[Adapter], config: GriffinConfig, equal: Callable[[str, Change], bool]
) -> Merge:
    """Decides what adapters do to each parameter.

    Args:
        adapters: one or several.
        config: of the base.
        equal: whether the parameter of that name in the base has the bits of what takes its place.

    Raises:
        CheckpointError: an adapter does not fit the model; several that do more than to add
            something, or one of these with a weight.
    """
    found: dict[str, list[Change]] = {}
    for adapter in adapters:
        for name, change in changes_of(adapter, config).items():
            if change.shared:  # a copy of the base's own matrix, which peft saves along
                if equal(EMBEDDING if config.tie_embeddings else name, change):
                    change = dataclasses.replace(change, value=None, shared=False)
                    if change.a is None:
                        continue
            found.setdefault(name, []).append(change)
    for name, changes in found.items():
        for change in changes:
            _check_alone(name, change, len(adapters))
    if config.tie_embeddings:
        config = _decide_head(found, config)
    return Merge(config, found)


def _check_alone(name: str, change: Change, adapters: int) -> None:
    if change.adds or (adapters == 1 and change.adapter.weight == 1):
        return
    what = "is a DoRA"
    if not change.magnitude:
        what = f"replaces values of {name} (modules_to_save, biases or tokens)"
    raise CheckpointError(
        f"{change.adapter.folder} {what}, of which there are no weighted sums: give this adapter "
        "alone and without a weight"
    )


def _decide_head(found: dict[str, list[Change]], config: GriffinConfig) -> GriffinConfig:
    """Finds out whether the output head is still the embedding once both are changed."""
    rows, head = found.pop(EMBEDDING, []), found.pop(HEAD, [])
    shared = [change for change in (*rows, *head) if change.shared]
    if len(shared) == 2 and not _same_values(*shared):
        raise CheckpointError(
            f"{shared[0].adapter.folder} holds {shared[0].value} and {shared[1].value}, two copies "
            "of one matrix of its base, which differ"
        )
    matrix = [Change(shared[0].adapter, value=shared[0].value)] if shared else []
    rows, head = (_without_shared(changes) for changes in (rows, head))
    follows = not head and all(c.tokens or c.adapter.config.ties for c in rows)
    if any(c.tokens for c in rows) and head and not all(c.tokens for c in head):
        raise CheckpointError(
            f"{rows[0].adapter.folder}: the output head has an adapter, and follows the tokens of "
            "the embedding: it is changed in two ways"
        )
    if follows or _same_changes(rows, head):
        if rows or matrix:
            found[EMBEDDING] = matrix + rows
        return config
    for name, changes in ((EMBEDDING, rows), (HEAD, head)):
        if changes or matrix:
            found[name] = matrix + changes
    return dataclasses.replace(config, tie_embeddings=False)


def _without_shared(changes: Iterable[Change]) -> list[Change]:
    own = [dataclasses.replace(c, value=None, shared=False) if c.shared else c for c in changes]
    return [c for c in own if (c.value, c.a, c.tokens) != (None, None, None)]


def _same_values(one: Change, other: Change) -> bool:
    assert one.value is not None and other.value is not None
    return _same(one.adapter, one.value, other.adapter, other.value)


def _same(one: Adapter, name: str, other: Adapter, other_name: str) -> bool:
    import numpy as np

    a, b = one.container.numpy(name), other.container.numpy(other_name)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return all(
        np.array_equal(x.view(np.uint8), y.view(np.uint8))
        for x, y in zip(chunks(a), chunks(b), strict=True)
    )


def _same_changes(rows: Sequence[Change], head: Sequence[Change]) -> bool:
    """Whether embedding and output head are changed alike, to the bit."""
    import numpy as np

    if len(rows) != len(head):
        return False
    for one, other in zip(rows, head, strict=True):
        if (one.value is None) != (other.value is None) or (one.a is None) != (other.a is None):
            return False
        if one.ids != other.ids or one.scale != other.scale or one.magnitude or other.magnitude:
            return False
        pairs = [(one.value, other.value), (one.tokens, other.tokens)]
        if not all(
            x is None or (y is not None and _same(one.adapter, x, other.adapter, y))
            for x, y in pairs
        ):
            return False
        if one.a is not None:
            factors = zip(_factors(one, 2, "float32"), _factors(other, 2, "float32"), strict=True)
            if not all(np.array_equal(x, y) for x, y in factors):
                return False
    return True


def merged(
    spec: ParamSpec,
    dtype: str,
    changes: Sequence[Change],
    stored: Callable[[], Pieces],
    nbytes: int = CHUNK_BYTES,
) -> Pieces:
    """A parameter with the changes of adapters, in contiguous pieces of its leading axis.

    Args:
        spec: of the parameter.
        dtype: that it is stored in, and given in.
        changes: of the parameter.
        stored: reads the base's parameter in pieces; it may be called twice.
        nbytes: bytes of the pieces of what takes the base's place.

    Raises:
        CheckpointError: an adapter holds NaN, or a sum does not fit into the dtype.
    """
    import numpy as np

    into = numpy_dtype(dtype)
    value = next((change for change in changes if change.value is not None), None)
    if value is not None:
        stored = _replaced(value, into, nbytes)
    wide = "float64" if dtype == "float64" else "float32"
    steps = [_step(change, spec, wide) for change in changes]
    steps = [step for step in steps if step is not None]
    if not steps:
        yield from stored()
        return
    magnitudes = _column_factors(spec, changes, steps, stored, wide)
    start = 0
    for piece in stored():
        values = piece.astype(wide)
        for step in steps:
            with np.errstate(over="ignore", invalid="ignore"):  # said below, with the name
                step(values, start)
        if magnitudes is not None:
            values *= magnitudes
        _check_range(spec.name, values, piece, dtype)
        result = values.astype(into, copy=False)
        start += len(piece)
        del piece, values
        yield result


def _check_range(name: str, values: "np.ndarray", piece: "np.ndarray", dtype: str) -> None:
    """Refuses sums that a dtype cannot hold, unless the base's own values are not finite."""
    import numpy as np

    if not values.size:
        return
    largest = max(values.max(), -values.min())  # NaN if one of them is
    if not largest <= _LARGEST[dtype] and np.isfinite(piece).all():
        raise CheckpointError(f"{name}: the sum with the adapter does not fit into {dtype}")


def merging_bytes(spec: ParamSpec, dtype: str, changes: Sequence[Change], piece: int) -> int:
    """Bytes of memory that `merged` takes beside the pieces that it reads.

    Args:
        spec, dtype, changes: as of `merged`.
        piece: bytes of the pieces.
    """
    wide = 8 if dtype == "float64" else 4
    factors = 0
    for change in changes:
        names = [
            n for n in (change.a, change.b, change.added, change.tokens, change.magnitude) if n
        ]
        for name in names:
            tensor = change.adapter.container.tensors[name]
            factors += 2 * wide * (tensor.nbytes // ITEM_BYTES[tensor.dtype])
    elements = min(piece // ITEM_BYTES[dtype], spec.size)
    rows = _ROWS * (spec.size // spec.shape[0])
    return factors + wide * (2 * elements + rows) + 2 * elements * ITEM_BYTES[dtype]


def _replaced(change: Change, dtype: "np.dtype", nbytes: int) -> Callable[[], Pieces]:
    def read() -> Pieces:
        import numpy as np

        assert change.value is not None
        for piece in change.adapter.container.pieces(change.value, nbytes):
            with np.errstate(over="ignore"):
                cast = piece.astype(dtype, copy=False)
            if np.isfinite(piece).all() and not np.isfinite(cast).all():
                raise CheckpointError(
                    f"{change.adapter.folder}: values of {change.value} do not fit into {dtype}"
                )
            yield cast

    return read


def _step(change: Change, spec: ParamSpec, wide: str) -> Callable[["np.ndarray", int], None] | None:
    """A function that changes rows of a parameter, given as an array and the first one's number."""
    import numpy as np

    scale = np.dtype(wide).type(change.scale)
    if change.added is not None:
        bias = change.adapter.array(change.added, wide)

        def add(values: np.ndarray, start: int) -> None:
            values += scale * bias[start : start + len(values)]

        return add
    if change.tokens is not None:
        rows = change.adapter.array(change.tokens, wide)
        ids = np.array(change.ids, np.int64)

        def put(values: np.ndarray, start: int) -> None:
            here = (ids >= start) & (ids < start + len(values))
            values[ids[here] - start] = rows[here]

        return put
    if change.a is None:
        return None
    left, right = _factors(change, len(spec.shape), wide, spec.shape)
    by_row = None
    if change.magnitude is not None and not change.rows:
        by_row = change.adapter.array(change.magnitude, wide)

    def add_product(values: np.ndarray, start: int) -> None:
        _add_product(values, left, right, scale, start)
        if by_row is not None:
            norms = np.sqrt(np.einsum("ij,ij->i", values, values))
            _check_norms(change, norms)
            values *= (by_row[start : start + len(values)] / norms)[:, None]

    return add_product


def _factors(
    change: Change, rank: int, wide: str, shape: tuple[int, ...] = ()
) -> tuple["np.ndarray", "np.ndarray"]:
    """Both factors of what is added, such that it is their product; of stacks, a stack each."""
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


def _add_product(
    values: "np.ndarray", left: "np.ndarray", right: "np.ndarray", scale: Any, start: int
) -> None:
    """Adds rows of a product. The rows are computed in the same groups whatever is asked for, so
    that no bit depends on the size of pieces."""
    if left.ndim == 3:
        values += (left[start : start + len(values)] @ right[start : start + len(values)]) * scale
        return
    stop = start + len(values)
    for first in range(start // _ROWS * _ROWS, stop, _ROWS):
        product = left[first : first + _ROWS] @ right
        product *= scale
        begin, end = max(start, first), min(stop, first + _ROWS)
        values[begin - start : end - start] += product[begin - first : end - first]


def _column_factors(
    spec: ParamSpec,
    changes: Sequence[Change],
    steps: Sequence[Callable[["np.ndarray", int], None]],
    stored: Callable[[], Pieces],
    wide: str,
) -> "np.ndarray | None":
    """The factors of an embedding's columns in DoRA, whose norms are over all rows."""
    import numpy as np

    change = next((c for c in changes if c.rows and c.magnitude is not None), None)
    if change is None:
        return None
    assert change.magnitude is not None
    squares, start = np.zeros(spec.shape[1]), 0
    for piece in stored():
        values = piece.astype(wide)
        for step in steps:
            step(values, start)
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


def holds(stored: Pieces, dtype: str, change: Change) -> bool:
    """Whether the base's parameter has the bits of what takes its place, once that is cast.

    Args:
        stored: pieces of the base's parameter.
        dtype: that it is stored in.
        change: with a value.
    """
    import numpy as np

    assert change.value is not None
    start = 0
    for piece in stored:
        theirs = change.adapter.container.slice(change.value, start, start + len(piece))
        with np.errstate(over="ignore"):
            theirs = theirs.astype(numpy_dtype(dtype), copy=False)
        if not np.array_equal(bytes_of(theirs), bytes_of(piece)):
            return False
        start += len(piece)
    return True
