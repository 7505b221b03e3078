"""Merges adapters into the parameters of a model, a piece at a time, in float32.

A parameter W becomes W + Σ w s B A over the adapters, with their weights w and scales s: the result
of peft's ``add_weighted_adapter`` with ``combination_type="cat"``. The sum is rounded once, at the
end, to the dtype that W is stored in.

The change of each parameter is read off the names and shapes of an adapter's tensors. peft names
them after the modules of transformers' RecurrentGemma, as the parameters of a model are named here:
``base_model.model.`` + module + the kind of tensor.
"""

import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.adapters.adapter import ADAPTER_CONFIG, Adapter
from griffin_eval.converters.naming.tables import EMBEDDING, HEAD
from griffin_eval.converters.tensors import (
    FLOATS,
    LazyTensor,
    Shape,
    by_rows,
    bytes_of,
    numpy_dtype,
    same_bits,
    together,
)
from griffin_eval.errors import CheckpointError
from griffin_eval.layout import ParamSpec, param_specs
from griffin_eval.messages import brief, listed

logger = logging.getLogger(__name__)

_PREFIX = "base_model.model."
_A, _B, _B_BIAS = "lora_A.weight", "lora_B.weight", "lora_B.bias"
_ROWS_A, _ROWS_B = "lora_embedding_A", "lora_embedding_B"
_MAGNITUDE, _TOKENS = "lora_magnitude_vector", "token_adapter.trainable_tokens_delta"
_FACTORS = (_A, _B, _B_BIAS, _ROWS_A, _ROWS_B, _MAGNITUDE)
_MAX_DEPTH = 4  # wrappers of a module
_EMBEDDING_MODULE, _HEAD_MODULE = EMBEDDING.removesuffix(".weight"), HEAD.removesuffix(".weight")


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of one parameter by an adapter. Names are of tensors of the adapter.

    Attributes:
        value: Tensor that replaces the parameter.
        shared: Whether ``value`` is a matrix shared by the embedding and the output head.
        a, b: Factors of the added product, ``scale`` B A.
        rows: Whether the product is transposed, for rows of an embedding: ``scale`` (B A)ᵀ.
        added: Tensor that is added times ``scale``.
        scale: Factor, with the adapter's weight in it.
        magnitude: Magnitudes of the rows of a linear map, or of the columns of an embedding.
        tokens: Tensor that replaces the rows ``ids``.
    """

    adapter: Adapter
    value: str | None = None
    shared: bool = False
    a: str | None = None
    b: str | None = None
    rows: bool = False
    added: str | None = None
    scale: float = 1.0
    magnitude: str | None = None
    tokens: str | None = None
    ids: tuple[int, ...] = ()

    @property
    def adds(self) -> bool:
        """Whether the change is a mere sum, which can be weighted and combined with others."""
        return self.value is self.magnitude is self.tokens is None


def changes_of(adapter: Adapter, config: GriffinConfig) -> dict[str, Change]:
    """Return the changes of a model by an adapter, by canonical name; CheckpointError with
    everything that is wrong with its tensors.

    The output head goes by its name, also where it is tied to the embedding.
    """
    reading = _Reading(adapter, config)
    changes = reading.changes()
    if reading.problems:
        raise CheckpointError(f"{adapter.file}: {'; '.join(reading.problems)}")
    return changes


def vocabulary_of(adapter: Adapter, config: GriffinConfig) -> int:
    """Return the number of rows that the embedding has once an adapter is merged.

    An adapter trained after the vocabulary was resized holds the whole resized matrix. If embedding
    and head are two matrices and the adapter holds only one, the size stays, and the adapter is
    refused later.
    """
    rows: dict[str, int] = {}
    for name, tensor in adapter.container.tensors.items():
        parameter = re.sub(r"(\.token_adapter)?\.base_layer", "", name.removeprefix(_PREFIX))
        if parameter in (EMBEDDING, HEAD) and tensor.shape[1:] == (config.width,):
            rows[parameter] = tensor.shape[0]
    trained = [name for name in rows if adapter.config.saves(name.removesuffix(".weight"))]
    both = rows.keys() == {EMBEDDING, HEAD}
    one = config.tie_embeddings and (not trained or adapter.config.ties)
    if len(set(rows.values())) == 1 and (both or one):
        return next(iter(rows.values()))
    return config.vocab_size


class _Reading:
    """One pass over an adapter's tensors, which are looked up by the names that changes of
    parameters have; any tensor left over is refused. ``problems`` lists a clause for each fault."""

    def __init__(self, adapter: Adapter, config: GriffinConfig):
        self.problems: list[str] = []
        self._adapter, self._config, self._tied = adapter, adapter.config, config.tie_embeddings
        self._tensors = adapter.container.tensors
        self._shapes: dict[str, Shape] = {n: s.shape for n, s in param_specs(config).items()}
        self._shapes.setdefault(HEAD, self._shapes[EMBEDDING])
        self._left = dict.fromkeys(self._tensors)
        self._found: dict[str, list[Change]] = {}  # by parameter
        self._adapted: set[str] = set()  # modules
        self._misshapen: list[str] = []
        self._unclear: dict[str, list[str]] = {}  # patterns of α by module

    def changes(self) -> dict[str, Change]:
        """Return the changes by canonical name."""
        for parameter, shape in self._shapes.items():
            self._read_values(parameter, shape)
        for module in dict.fromkeys(name.rpartition(".")[0] for name in self._shapes):
            self._read_module(module)
        changes = {name: self._combined(name, found) for name, found in self._found.items()}
        self._expect_all(changes)
        if self._left:
            self.problems.insert(
                0,
                f"{len(self._left)} tensors that are no part of a LoRA of this model "
                f"({listed(self._left, repr)})",
            )
        if self._misshapen:
            advice = "adapter and base do not belong together"
            modules = tuple(f"'{_PREFIX}{m}." for m in (_EMBEDDING_MODULE, _HEAD_MODULE))
            if all(each.startswith(modules) for each in self._misshapen):
                advice = (
                    "if the vocabulary was resized before the adapter was trained, save the "
                    "adapter again with both matrices (save_embedding_layers=True)"
                )
            self.problems.append(
                f"{len(self._misshapen)} of another shape ({listed(self._misshapen)}): {advice}"
            )
        others = [f"{n!r} is {t.dtype}" for n, t in self._tensors.items() if t.dtype not in FLOATS]
        if others:
            self.problems.append(
                f"{len(others)} that are not {', '.join(FLOATS)}: {listed(others)}"
            )
        if self._unclear:
            logger.warning(
                "%s: several keys of alpha_pattern with different values fit one module (%s): the "
                "first one in the file counts, and peft sorts them when it saves, so that it may "
                "have trained with another; keep only the one that it was trained with",
                self._adapter.folder / ADAPTER_CONFIG,
                listed(self._unclear, lambda m: f"{m}: {', '.join(map(brief, self._unclear[m]))}"),
            )
        return changes

    def _has(self, bare: str) -> bool:
        return _PREFIX + bare in self._left

    def _take(self, bare: str, shape: Shape) -> str:
        """Return the full name of a tensor, note a wrong shape, and mark it as used."""
        del self._left[_PREFIX + bare]
        if (found := self._tensors[_PREFIX + bare].shape) != shape:
            self._misshapen.append(f"'{_PREFIX}{bare}' is {found}, expected {shape}")
        return _PREFIX + bare

    def _change(self, parameter: str, change: Change) -> None:
        self._found.setdefault(parameter, []).append(change)

    def _read_values(self, parameter: str, shape: Shape) -> None:
        """Find the tensor that replaces a parameter: its own, or a copy within a wrapper."""
        module, _, kind = parameter.rpartition(".")
        whole = parameter in (EMBEDDING, HEAD)
        places = {parameter: whole and not self._config.saves(module)}
        places |= {f"{module}.{'base_layer.' * n}{kind}": whole for n in range(1, _MAX_DEPTH)}
        places |= {f"{module}.token_adapter.base_layer.{kind}": True} if whole else {}
        if self._has(parameter):  # peft also saves copies of modules trained in full
            for wrapper in ("modules_to_save", "original_module"):
                self._left.pop(f"{_PREFIX}{module}.{wrapper}.{kind}", None)
        for bare, shared in places.items():
            if self._has(bare):
                value = self._take(bare, shape)
                self._change(parameter, Change(self._adapter, value=value, shared=shared))

    def _read_module(self, module: str) -> None:
        """Find the changes by the tensors of one module."""
        # Parameters that peft adapts directly. It wraps the first one first, so that the last
        # one is outside.
        targeted = [
            name
            for name in self._shapes
            if name.rpartition(".")[0] == module and _ends(name, self._config.target_parameters)
        ]
        if self._has(f"{module}.{_TOKENS}") and f"{module}.weight" in (EMBEDDING, HEAD):
            self._adapted.add(module)
            self._read_tokens(module)
        for depth, parameter in enumerate(targeted[::-1] or [f"{module}.weight"]):
            place = f"{module}.{'base_layer.' * depth}"
            parts = [part for part in _FACTORS if self._has(place + part)]
            if not parts:
                continue
            self._adapted.add(module)
            if module.endswith(".conv_1d") and not targeted:
                self.problems.append(
                    f"{module} is a convolution of each channel by itself, and its adapter mixes "
                    "channels, so that no weight can hold it"
                )
                for part in parts:
                    del self._left[_PREFIX + place + part]
            elif len(self._shapes.get(parameter, ())) in ((2, 3) if targeted else (2,)):
                self._read_factors(module, place, parameter, parts, targeted=bool(targeted))

    def _read_factors(
        self, module: str, place: str, parameter: str, parts: Sequence[str], *, targeted: bool
    ) -> None:
        adapted = parameter if targeted else module  # the name that rank patterns match
        rank, scale = self._config.rank_of(adapted), self._config.scale_of(adapted)
        scale *= self._adapter.weight
        if unclear := self._config.unclear_alphas(adapted):
            self._unclear[adapted] = unclear
        rows, shape = module == _EMBEDDING_MODULE and not targeted, self._shapes[parameter]
        stacked, out, inp = (1, *shape) if len(shape) == 2 else shape
        if rows:
            wanted: dict[str, Shape] = {_ROWS_A: (rank, out), _ROWS_B: (inp, rank)}
        else:
            wanted = {_A: (rank * stacked, inp), _B: (out, rank * stacked)}
        if self._config.magnitudes and not targeted:
            wanted[_MAGNITUDE] = (inp,) if rows else (out,)
        if self._config.bias and not targeted and not rows:
            wanted[_B_BIAS] = (out,)
        if missing := sorted(wanted.keys() - set(parts)):
            self.problems.append(f"{module} lacks {' and '.join(missing)}")
            for part in wanted.keys() & set(parts):
                del self._left[_PREFIX + place + part]
            return
        names = {part: self._take(place + part, wanted[part]) for part in sorted(wanted)}
        a, b = (names[part] for part in ((_ROWS_A, _ROWS_B) if rows else (_A, _B)))
        magnitude = names.get(_MAGNITUDE)
        change = Change(self._adapter, a=a, b=b, rows=rows, scale=scale, magnitude=magnitude)
        self._change(parameter, change)
        if _B_BIAS in names and f"{module}.bias" not in self._shapes:
            self.problems.append(f"{module} has no bias that {_B_BIAS} could be added to")
        elif _B_BIAS in names:
            bias = Change(self._adapter, added=names[_B_BIAS], scale=scale)
            self._change(f"{module}.bias", bias)

    def _read_tokens(self, module: str) -> None:
        parameter, tokens = f"{module}.weight", self._config.tokens
        ids = next((i for m, i in tokens.items() if module.endswith(m)), ())
        if not ids and parameter == HEAD and self._tied:  # follows the embedding
            ids = next((i for m, i in tokens.items() if _EMBEDDING_MODULE.endswith(m)), ())
        vocab, width = self._shapes[parameter]
        if len(set(ids)) < len(ids) or any(i >= vocab for i in ids):
            self.problems.append(
                f"trainable_token_indices of {module} must be different ids below {vocab}"
            )
        name = self._take(f"{module}.{_TOKENS}", (len(ids), width))
        self._change(parameter, Change(self._adapter, tokens=name, ids=ids))

    def _combined(self, parameter: str, changes: Sequence[Change]) -> Change:
        """Return the single change of a parameter. Two changes are compatible only if they are a
        value and an addition to it, or a copy of the base's matrix and new rows of that copy."""
        values = [change for change in changes if change.value is not None]
        others = [change for change in changes if change.value is None]
        rows_of_new = values and others and others[0].tokens and not values[0].shared
        if max(len(values), len(others)) > 1 or rows_of_new:
            self.problems.append(f"{parameter} is changed in two ways")
        if values and others:
            return dataclasses.replace(others[0], value=values[0].value, shared=values[0].shared)
        return changes[0]

    def _expect_all(self, changes: dict[str, Change]) -> None:
        """Check that every module and parameter named in the config has tensors."""
        config, both = self._config, (_EMBEDDING_MODULE, _HEAD_MODULE)
        modules = [n.removesuffix(".weight") for n, s in self._shapes.items() if len(s) == 2]
        named = [m for m in modules if _ends(m, config.target_modules or ())]
        # peft trains modules that modules_to_save also names as a whole, without factors.
        lacking = [m for m in named if m not in self._adapted and not self._saved(m)]
        if config.ties:  # embedding and head are one matrix
            lacking = [m for m in lacking if m not in both]
        if lacking:
            self.problems.append(
                f"nothing for {len(lacking)} modules that target_modules names ({listed(lacking)})"
            )
        for parameter in self._shapes:
            if self._saved(parameter.rpartition(".")[0]) and parameter not in changes:
                self.problems.append(f"no {parameter}, though modules_to_save names it")
        for module in both:
            change = changes.get(f"{module}.weight")
            follows = module == _HEAD_MODULE and EMBEDDING in changes
            if not module.endswith(tuple(config.tokens)) or follows:
                continue
            if change is None or change.tokens is None:
                self.problems.append(
                    f"no {_TOKENS} of {module}, though trainable_token_indices names it"
                )

    def _saved(self, module: str) -> bool:
        """Return whether a module was trained in full, by itself or within another one."""
        around = [module[: m.start()] for m in re.finditer(r"\.|$", module)]
        return any(map(self._config.saves, around))


def _ends(name: str, endings: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in endings)


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
    found: dict[str, list[Change]] = {}
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
            found.setdefault(name, []).append(change)
    for name, changes in found.items():
        for change in changes:
            _check_alone(name, change, len(adapters))
    config = dataclasses.replace(config, vocab_size=vocab_size)
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
    """Untie the output head in the config if it differs from the embedding after all changes."""
    rows, head = found.pop(EMBEDDING, []), found.pop(HEAD, [])
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
            found[EMBEDDING] = matrix + rows
        return config
    for name, changes in ((EMBEDDING, rows), (HEAD, head)):
        if any(change.value is not None for change in changes):
            found[name] = changes
        elif changes or matrix:
            found[name] = matrix + changes
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
