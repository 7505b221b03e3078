"""Merges adapters into the parameters of a model, a piece at a time, in float32.

A parameter W becomes W + Σ w s B A over the adapters, with their weights w and scales s: what
``add_weighted_adapter`` of peft, with ``combination_type="cat"``, makes of several. It is rounded
to the dtype that W is stored in once, at the end.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

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

_TOGETHER = 1 << 18  # elements that are changed at a time, few enough to stay in the cache
_TILE_ROWS = 16
_TILE_WORK = 1 << 18  # multiplications in a product, up to which OpenBLAS has no use for threads
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38, "float64": 1.797e308}

Pieces = Iterator["np.ndarray"]
# Changes rows in place: their array, the number of the first one, and the numbers of the group that
# they are of.
Step = Callable[["np.ndarray", int, slice], None]


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
    for start, piece in _numbered(stored()):
        result = np.empty_like(piece)
        for rows, values in _changed(piece, start, spec, steps, wide):
            if magnitudes is not None:
                values *= magnitudes
            _check_range(spec.name, values, piece[rows], dtype)
            result[rows] = values
        del piece
        yield result


def _numbered(pieces: Pieces) -> Iterator[tuple[int, "np.ndarray"]]:
    """Pieces, each with the number of its first row."""
    start = 0
    for piece in pieces:
        yield start, piece
        start += len(piece)


def _changed(
    piece: "np.ndarray", start: int, spec: ParamSpec, steps: Sequence[Step], wide: str
) -> Iterator[tuple[slice, "np.ndarray"]]:
    """Rows of a piece after all steps, in a buffer that is used again.

    Which rows are changed together depends on the parameter alone, and a product is computed for
    all of them even if some are not asked for: so no bit depends on the size of pieces.

    Args:
        piece: rows of the base's parameter.
        start: number of the first one.
        spec: of the parameter.
        steps: what is done to them, in order.
        wide: dtype to compute in.
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
    group = max(_TOGETHER, spec.size // spec.shape[0])
    return factors + 3 * wide * group + min(piece, spec.size * ITEM_BYTES[dtype])


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


def _step(change: Change, spec: ParamSpec, wide: str) -> Step | None:
    """What a change does to rows of a parameter, but to replace all; None for nothing else."""
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
    left, right = _factors(change, len(spec.shape), wide, spec.shape)
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


def _multiply(left: "np.ndarray", right: "np.ndarray", out: "np.ndarray") -> None:
    """The product of two matrices, in tiles that OpenBLAS gives to one thread each: several would
    wait for each other, and for other workers, longer than they compute."""
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
    stored: Callable[[], Pieces],
    wide: str,
) -> "np.ndarray | None":
    """The factors of an embedding's columns in DoRA, whose norms are over all rows."""
    import numpy as np

    change = next((c for c in changes if c.rows and c.magnitude is not None), None)
    if change is None:
        return None
    assert change.magnitude is not None
    squares = np.zeros(spec.shape[1])
    for start, piece in _numbered(stored()):
        for _, values in _changed(piece, start, spec, steps, wide):
            squares += np.einsum("ij,ij->j", values, values, dtype=np.float64)
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
