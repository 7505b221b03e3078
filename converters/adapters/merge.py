"""Merges adapters into the parameters of a model, a piece at a time, in float32.

A parameter W becomes W + Σ w s B A over the adapters, with their weights w and scales s: the result
of peft's ``add_weighted_adapter`` with ``combination_type="cat"``. The sum is rounded once, at the
end, to the dtype that W is stored in.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.adapters.adapter import Adapter
from griffin_eval.converters.adapters.changes import Change, changes_of, vocabulary_of
from griffin_eval.converters.adapters.peft_layers import merged_parameter
from griffin_eval.converters.naming.tables import EMBEDDING, HEAD
from griffin_eval.converters.tensors import (
    LazyTensor,
    by_rows,
    bytes_of,
    numpy_dtype,
    same_bits,
    together,
)
from griffin_eval.errors import CheckpointError
from griffin_eval.layout import ParamSpec


class Merge(NamedTuple):
    """The config of the merged model and, by canonical name, the changes of each parameter in
    their order."""

    config: GriffinConfig
    changes: Mapping[str, Sequence[Change]]


def plan_merge(
    adapters: Sequence[Adapter], config: GriffinConfig, equal: Callable[[str, Change], bool]
) -> Merge:
    """Decide what adapters do to each parameter.

    Args:
        config: Config of the base.
        equal: Returns whether a base's parameter, by name, is equal to its replacement in every
            bit.

    Raises:
        CheckpointError: an adapter does not fit the model, or one that does more than add is
            weighted or combined with others.
    """
    by_name: dict[str, list[Change]] = {}
    vocab_size = config.vocab_size
    for adapter in adapters:
        own = dataclasses.replace(config, vocab_size=vocabulary_of(adapter, config))
        if own.vocab_size != config.vocab_size:
            vocab_size = own.vocab_size
        for name, change in changes_of(adapter, own).items():
            if change.shared:  # maybe only peft's copy of the base's matrix
                if equal(EMBEDDING if config.tie_embeddings else name, change):
                    change = dataclasses.replace(change, value=None, shared=False)
                    if change.a is None:
                        continue
            by_name.setdefault(name, []).append(change)
    for name, changes in by_name.items():
        for change in changes:
            _check_alone(name, change, len(adapters))
    config = dataclasses.replace(config, vocab_size=vocab_size)
    if config.tie_embeddings:
        config = _decide_head(by_name, config)
    return Merge(config, by_name)


def _check_alone(name: str, change: Change, adapters: int) -> None:
    if change.adds or (adapters == 1 and change.adapter.weight == 1):
        return
    what = f"is a {change.adapter.config.method}" if change.by_peft else "is a DoRA"
    if not change.magnitude and not change.by_peft:
        what = f"replaces values of {name} (modules_to_save, biases or tokens)"
    raise CheckpointError(
        f"{change.adapter.folder} {what}, of which there are no weighted sums: give this adapter "
        "alone and without a weight"
    )


def _decide_head(by_name: dict[str, list[Change]], config: GriffinConfig) -> GriffinConfig:
    """Untie the output head in the config if it differs from the embedding after all changes."""
    rows, head = by_name.pop(EMBEDDING, []), by_name.pop(HEAD, [])
    shared = [change for change in (*rows, *head) if change.shared]
    if len(shared) == 2 and not _same(shared[0], shared[1], "value"):
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
            by_name[EMBEDDING] = matrix + rows
        return config
    for name, changes in ((EMBEDDING, rows), (HEAD, head)):
        if any(change.value is not None for change in changes):
            by_name[name] = changes
        elif changes or matrix:
            by_name[name] = matrix + changes
    return dataclasses.replace(config, tie_embeddings=False)


def _without_shared(changes: Iterable[Change]) -> list[Change]:
    own = [dataclasses.replace(c, value=None, shared=False) if c.shared else c for c in changes]
    return [c for c in own if (c.value, c.a, c.tokens) != (None, None, None)]


def _same(one: Change, other: Change, field: str) -> bool:
    """Return whether a field of two changes names tensors with equal bits, or no tensors."""
    names = getattr(one, field), getattr(other, field)
    if None in names:
        return names == (None, None)
    first, second = (change.adapter.container.tensors for change in (one, other))
    return same_bits(first[names[0]], second[names[1]])


def _same_changes(rows: Sequence[Change], head: Sequence[Change]) -> bool:
    """Return whether embedding and output head have equal changes in every bit."""
    if len(rows) != len(head):
        return False
    for one, other in zip(rows, head, strict=True):
        if (one.a is None) != (other.a is None) or one.magnitude or other.magnitude:
            return False
        alike = one.ids == other.ids and one.scale == other.scale
        if not alike or not all(_same(one, other, field) for field in ("value", "tokens")):
            return False
        if one.a is not None:
            matrices = zip(factors(one, 2, "float32"), factors(other, 2, "float32"), strict=True)
            if not all(np.array_equal(x, y) for x, y in matrices):
                return False
    return True


_TOGETHER = 1 << 18  # elements that are changed at a time, few enough to stay in the cache
_TILE_ROWS = 16
_TILE_WORK = 1 << 18  # multiplications up to which OpenBLAS uses a single thread
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38, "float64": 1.797e308}

# In-place change of rows: takes the rows, the index of the first one, and the slice of the group
# of rows that they belong to.
Step = Callable[["np.ndarray", int, slice], None]


def merged(stored: LazyTensor, spec: ParamSpec, changes: Sequence[Change]) -> LazyTensor:
    """Return a parameter with the changes of adapters, whose matrices live as long as the result.
    Reading the result raises CheckpointError if an adapter holds NaN, or a sum does not fit into
    the dtype."""
    dtype = stored.dtype
    if any(change.by_peft for change in changes):
        return _merged_by_peft(stored, spec, changes[0])
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
    def magnitudes() -> np.ndarray | None:
        return _column_factors(spec, changes, steps(), stored, wide)

    def rows(start: int, stop: int) -> np.ndarray:
        piece, factors = stored.rows(start, stop), magnitudes()
        result = np.empty(piece.shape, piece.dtype)
        for part, values in _changed(piece, start, spec, steps(), wide):
            if factors is not None:
                values *= factors
            _check_range(spec.name, values, piece[part], dtype)
            result[part] = values
        return result

    return by_rows(spec.shape, dtype, rows, grid=stored.grid)


def _merged_by_peft(stored: LazyTensor, spec: ParamSpec, change: Change) -> LazyTensor:
    """Return a parameter that is merged whole whenever a part of it is read."""

    def rows(start: int, stop: int) -> np.ndarray:
        base = stored.read(stored.whole)
        wide = base.astype(np.float32)
        values = merged_parameter(change.adapter, spec.name, wide, change.by_peft)
        _check_range(spec.name, values, base, stored.dtype)
        return values[start:stop].astype(base.dtype)

    return by_rows(spec.shape, stored.dtype, rows, grid=spec.shape)


def _changed(
    piece: np.ndarray, start: int, spec: ParamSpec, steps: Sequence[Step], wide: str
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield slices of a piece's rows with their values after all steps, in a reused buffer.

    The groups of rows that are changed together depend on the parameter alone, and products are
    computed for whole groups: so no bit of the result depends on the size of pieces.
    """
    group = max(1, _TOGETHER * spec.shape[0] // spec.size)
    buffer = np.empty((min(group, len(piece)), *piece.shape[1:]), wide)
    stop = start + len(piece)
    for first in range(start // group * group, stop, group):
        begin, end = max(start, first), min(stop, first + group)
        rows = slice(begin - start, end - start)
        values = buffer[: end - begin]
        values[...] = piece[rows]
        with np.errstate(over="ignore", invalid="ignore"):  # `_check_range` reports it
            for step in steps:
                step(values, begin, slice(first, min(first + group, spec.shape[0])))
        yield rows, values


def _check_range(name: str, values: np.ndarray, piece: np.ndarray, dtype: str) -> None:
    """Refuse sums that a dtype cannot hold, unless the base's own values are not finite."""
    if not values.size:
        return
    largest = max(values.max(), -values.min())  # NaN if one of them is
    if not largest <= _LARGEST[dtype] and np.isfinite(piece).all():
        raise CheckpointError(f"{name}: the sum with the adapter does not fit into {dtype}")


def _replaced(change: Change, dtype: str) -> LazyTensor:
    """Return the tensor that replaces a parameter, in the parameter's dtype."""
    assert change.value is not None
    tensor = change.adapter.container.tensors[change.value]

    def rows(start: int, stop: int) -> np.ndarray:
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
    """Return the in-place update of a parameter's rows, or None if the change replaces them all."""
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
) -> tuple[np.ndarray, np.ndarray]:
    """Return the two factors whose product a change adds; for a stack of matrices, stacks."""
    assert change.a is not None and change.b is not None
    a, b = (change.adapter.array(name, wide) for name in (change.a, change.b))
    if change.rows:
        return np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    if rank == 3:  # peft's layout of the experts' factors
        stacked = shape[0]
        b = b.reshape(shape[1], -1, stacked).transpose(2, 0, 1)
        return np.ascontiguousarray(b), a.reshape(stacked, -1, shape[2])
    return b, a


def _multiply(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """Multiply two matrices in tiles so small that OpenBLAS computes each with one thread: several
    threads would wait for each other, and for other workers, longer than they compute."""
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
) -> np.ndarray | None:
    """Return DoRA's factors of an embedding's columns, or None without DoRA. The norms in them are
    over all rows."""
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


def _check_norms(change: Change, norms: np.ndarray) -> None:
    if not norms.all():
        raise CheckpointError(
            f"{change.adapter.folder}: a row or column that {change.magnitude} scales is zero in "
            "the base, so that DoRA would divide by zero"
        )


def holds(stored: LazyTensor, change: Change) -> bool:
    """Return whether a base's parameter equals its replacement, cast to its dtype, in every bit."""
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
