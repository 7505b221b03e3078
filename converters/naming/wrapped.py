"""Undoes what wrapping a model does to the names of its tensors.

torch.compile, DistributedDataParallel, FSDP and trainers put the model into a module or dict, whose
name then stands in front of every name or in the middle of some. A model saved without its output
layer lacks the name in front. Of two names of one tied matrix some tools keep either.
"""

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from griffin_eval.converters.containers.container import Container, in_natural_order, natural_key
from griffin_eval.converters.containers.orbax.find import is_optimizer
from griffin_eval.converters.naming.tables import (
    CANONICAL,
    CANONICAL_PATHS,
    EMBEDDING,
    HEAD,
    NameRule,
    foreign_name,
)
from griffin_eval.errors import CheckpointError
from griffin_eval.messages import listed

logger = logging.getLogger(__name__)

# Modules of torch.compile, FSDP and activation checkpointing, within any name.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_STATES = ("optimizers.", "scheduler.", "lr_scheduler.", "scaler.", "rng")
_LAST_NORM = "model.final_norm.weight"  # in every model, once


_Table = Sequence[NameRule]


class _Renaming(NamedTuple):
    """The old name of every tensor by its new name, and phrases about what was done."""

    names: Mapping[str, str]
    notes: Sequence[str]


def unwrapped(
    container: Container,
    kind: str,
    tables: Sequence[_Table],
    *,
    tied: bool,
    path: Path,
    has_items: bool,
) -> Container:
    """Return a container with the names of a known naming, where that follows without doubt.

    Args:
        kind: Name of its kind in `griffin_eval.converters.containers.registry`.
        tables: Names of the parameters in the formats of its kind.
        tied: Whether the model's output head may be the embedding.
        has_items: Whether the option ``item`` chooses a part of it.

    Raises:
        CheckpointError: the parameters lie below a name beside other tensors.
    """
    renaming = _Renaming({name: name for name in container.tensors}, ())
    separator = "/" if kind == "orbax" else "."
    renaming = _without_wrappers(renaming, separator)
    if kind == "torch":
        renaming = _without_state(renaming)
    norms = [foreign_name(table, _LAST_NORM) for table in tables]
    if not any(norm in renaming.names for norm in norms):
        bare = _LAST_NORM.removeprefix("model.")
        prefixes = _prefixes(renaming.names, norms) or _prefixes(renaming.names, [bare])
        if prefixes:
            renaming = _without_prefix(renaming, prefixes, container, path, has_items)
        if tied:
            renaming = _with_prefix(renaming, tables, separator)
    if tied:
        renaming = _with_embedding(renaming, tables)
    if not renaming.notes:
        return container
    said = ", ".join(renaming.notes)
    logger.info("%s: %s", path, said)
    others = sorted(container.tensors.keys() - renaming.names.values(), key=natural_key)
    return dataclasses.replace(
        container,
        tensors=in_natural_order({n: container.tensors[old] for n, old in renaming.names.items()}),
        layout=f"{container.layout}, {said}",
        left_out=container.left_out | dict.fromkeys(others, "state of a training"),
    )


def _without_wrappers(renaming: _Renaming, separator: str) -> _Renaming:
    new: dict[str, str] = {}
    removed: dict[str, None] = {}
    for name in renaming.names:
        parts = name.split(separator)
        removed |= dict.fromkeys(part for part in parts if part in _WRAPPERS)
        new[separator.join(part for part in parts if part not in _WRAPPERS)] = name
    if not removed or len(new) < len(renaming.names):
        return renaming
    return _Renaming(new, [*renaming.notes, f"names read without {' and '.join(removed)}"])


def _prefixes(names: Iterable[str], norms: Iterable[str]) -> list[str]:
    """The texts in front of the name of a last norm."""
    found = [
        name.removesuffix(norm)
        for name in names
        for norm in norms
        if name.endswith((f".{norm}", f"/{norm}"))
    ]
    return sorted(dict.fromkeys(found), key=natural_key)


def _without_prefix(
    renaming: _Renaming, prefixes: Sequence[str], container: Container, path: Path, has_items: bool
) -> _Renaming:
    """Remove the prefix of every name; CheckpointError if there are several, or names without
    it."""
    (prefix, *others) = prefixes
    beside = [name for name in renaming.names if not name.startswith(prefix)]
    if not beside and not others:
        new = {name.removeprefix(prefix): old for name, old in renaming.names.items()}
        return _Renaming(new, [*renaming.notes, f"names read without the prefix {prefix!r}"])
    root = container.root
    items = ["/".join(filter(None, (root, each[:-1]))) for each in prefixes]
    if not has_items or (prefix.endswith(".") and (root or any("." in item for item in items))):
        advice = "save the state dict of the model alone"
    else:
        advice = f"choose {' or '.join(f'item={item}' for item in items)} (--item, item=)"
    if others:
        raise CheckpointError(
            f"{path} holds the parameters of several models, whose names begin with "
            f"{' and '.join(map(repr, prefixes))}: {advice}"
        )
    raise CheckpointError(
        f"{path} holds parameters whose names have the prefix {prefix!r}, beside other tensors "
        f"({listed(beside)}): {advice}"
    )


def _without_state(renaming: _Renaming) -> _Renaming:
    """Leave out what a trainer saves beside the model, as it is left out of an Orbax tree."""
    names = {n: old for n, old in renaming.names.items() if not _is_training_state(n)}
    if len(names) in (0, len(renaming.names)):
        return renaming
    return _Renaming(names, [*renaming.notes, "state of a training left out"])


def _is_training_state(name: str) -> bool:
    return is_optimizer((name.partition(".")[0],)) or name.startswith(_STATES)


def _with_prefix(renaming: _Renaming, tables: Sequence[_Table], separator: str) -> _Renaming:
    """Add the prefix that a model saved without its output layer lacks."""
    canonical = any(table in (CANONICAL, CANONICAL_PATHS) for table in tables)
    prefix = f"model{separator}"
    bare = {separator.join(name.split(".")[1:]) for name in (_LAST_NORM, EMBEDDING)}
    head = separator.join(HEAD.split("."))
    if not canonical or not bare <= renaming.names.keys() or head in renaming.names:
        return renaming
    new = {prefix + name: old for name, old in renaming.names.items()}
    return _Renaming(new, [*renaming.notes, f"names read with the prefix {prefix!r}"])


def _with_embedding(renaming: _Renaming, tables: Sequence[_Table]) -> _Renaming:
    """Name the one matrix of a tied model after the embedding."""
    for table in tables:
        ops = {rule.canonical: rule.op for rule in table}
        head, embedding = foreign_name(table, HEAD), foreign_name(table, EMBEDDING)
        alone = head in renaming.names and embedding not in renaming.names
        if foreign_name(table, _LAST_NORM) not in renaming.names or not alone:
            continue
        if ops[(HEAD,)] == ops[(EMBEDDING,)]:
            names = {embedding if name == head else name: n for name, n in renaming.names.items()}
            note = f"{head!r} read as the embedding, to which it is tied"
            return _Renaming(names, [*renaming.notes, note])
    return renaming
