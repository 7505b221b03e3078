"""Decides what adapters do to each parameter together, and whether the output head stays tied."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.adapters.adapter import Adapter
from griffin_eval.converters.adapters.changes import Change, changes_of, vocabulary_of
from griffin_eval.converters.adapters.merge import factors
from griffin_eval.converters.naming.tables import EMBEDDING, HEAD
from griffin_eval.converters.tensors import same_bits
from griffin_eval.errors import CheckpointError


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
    vocab_size = config.vocab_size
    for adapter in adapters:
        own = dataclasses.replace(config, vocab_size=vocabulary_of(adapter, config))
        if own.vocab_size != config.vocab_size:
            vocab_size = own.vocab_size
        for name, change in changes_of(adapter, own).items():
            if change.shared:  # a copy of the base's own matrix, which peft saves along
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
        if any(change.value is not None for change in changes):
            found[name] = changes
        elif changes or matrix:
            found[name] = matrix + changes
    return dataclasses.replace(config, tie_embeddings=False)


def _without_shared(changes: Iterable[Change]) -> list[Change]:
    own = [dataclasses.replace(c, value=None, shared=False) if c.shared else c for c in changes]
    return [c for c in own if (c.value, c.a, c.tokens) != (None, None, None)]


def _same_values(one: Change, other: Change) -> bool:
    assert one.value is not None and other.value is not None
    return _same(one.adapter, one.value, other.adapter, other.value)


def _same(one: Adapter, name: str, other: Adapter, other_name: str) -> bool:
    return same_bits(one.container.tensors[name], other.container.tensors[other_name])


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
            matrices = zip(factors(one, 2, "float32"), factors(other, 2, "float32"), strict=True)
            if not all(np.array_equal(x, y) for x, y in matrices):
                return False
    return True
