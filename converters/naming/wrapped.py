"""Undoes the changes that wrapping a model makes to the names of its tensors.

torch.compile, DistributedDataParallel, FSDP and trainers put the model into a module or dict, whose
name then stands in front of every name or in the middle of some. A model saved without its output
layer lacks the name in front. Of two names of one tied matrix some tools keep either.
"""

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

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
# The last one is the counter of torch.optim.swa_utils.AveragedModel.
_STATES = ("optimizers.", "scheduler.", "lr_scheduler.", "scaler.", "rng", "n_averaged")
_LAST_NORM = "model.final_norm.weight"  # in every model, once

_Table = Sequence[NameRule]
_Renaming = dict[str, str]  # the old name of every tensor by its new name


def unwrapped(
    container: Container,
    kind: str,
    tables: Sequence[_Table],
    *,
    tied: bool,
    path: Path,
    has_items: bool,
) -> Container:
    """Return a container whose tensors have the names of a known naming, if these are certain.

    Args:
        kind: Name of the container's kind in `griffin_eval.converters.containers.registry`.
        tables: Names of the parameters in all formats of that kind.
        tied: Whether the model's output head may be the embedding.
        has_items: Whether the option ``item`` can choose a part of the container.

    Raises:
        CheckpointError: the parameters lie below a name beside other tensors.
    """
    names, notes = {name: name for name in container.tensors}, []
    separator = "/" if kind == "orbax" else "."
    names = _without_wrappers(names, separator, notes)
    if kind == "torch":
        names = _without_state(names, notes)
    norms = [foreign_name(table, _LAST_NORM) for table in tables]
    if not any(norm in names for norm in norms):
        bare = _LAST_NORM.removeprefix("model.")
        prefixes = _prefixes(names, norms) or _prefixes(names, [bare])
        if prefixes:
            _check_prefixes(names, prefixes, container, path, has_items)
            notes.append(f"names read without the prefix {prefixes[0]!r}")
            names = {name.removeprefix(prefixes[0]): old for name, old in names.items()}
        if tied:
            names = _with_prefix(names, tables, separator, notes)
    if tied:
        names = _with_embedding(names, tables, notes)
    if not notes:
        return container
    said = ", ".join(notes)
    logger.info("%s: %s", path, said)
    others = sorted(container.tensors.keys() - names.values(), key=natural_key)
    return dataclasses.replace(
        container,
        tensors=in_natural_order({n: container.tensors[old] for n, old in names.items()}),
        layout=f"{container.layout}, {said}",
        left_out=container.left_out | dict.fromkeys(others, "state of a training"),
    )


def _without_wrappers(names: _Renaming, separator: str, notes: list[str]) -> _Renaming:
    new: _Renaming = {}
    removed: dict[str, None] = {}
    for name in names:
        parts = name.split(separator)
        removed |= dict.fromkeys(part for part in parts if part in _WRAPPERS)
        new[separator.join(part for part in parts if part not in _WRAPPERS)] = name
    if not removed or len(new) < len(names):
        return names
    notes.append(f"names read without {' and '.join(removed)}")
    return new


def _prefixes(names: Iterable[str], norms: Iterable[str]) -> list[str]:
    """Return the prefixes before the names of last norms."""
    found = [
        name.removesuffix(norm)
        for name in names
        for norm in norms
        if name.endswith((f".{norm}", f"/{norm}"))
    ]
    return sorted(dict.fromkeys(found), key=natural_key)


def _check_prefixes(
    names: _Renaming, prefixes: Sequence[str], container: Container, path: Path, has_items: bool
) -> None:
    """Raise CheckpointError if there are several prefixes, or names without the only one."""
    (prefix, *others) = prefixes
    beside = [name for name in names if not name.startswith(prefix)]
    if not beside and not others:
        return
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


def _without_state(names: _Renaming, notes: list[str]) -> _Renaming:
    """Drop the state that a trainer saves beside the model, as for an Orbax tree."""
    model = {
        name: old
        for name, old in names.items()
        if not is_optimizer((name.partition(".")[0],)) and not name.startswith(_STATES)
    }
    if len(model) in (0, len(names)):
        return names
    notes.append("state of a training left out")
    return model


def _with_prefix(
    names: _Renaming, tables: Sequence[_Table], separator: str, notes: list[str]
) -> _Renaming:
    """Add the prefix that a model saved without its output layer lacks."""
    canonical = any(table in (CANONICAL, CANONICAL_PATHS) for table in tables)
    prefix = f"model{separator}"
    bare = {separator.join(name.split(".")[1:]) for name in (_LAST_NORM, EMBEDDING)}
    head = separator.join(HEAD.split("."))
    if not canonical or not bare <= names.keys() or head in names:
        return names
    notes.append(f"names read with the prefix {prefix!r}")
    return {prefix + name: old for name, old in names.items()}


def _with_embedding(names: _Renaming, tables: Sequence[_Table], notes: list[str]) -> _Renaming:
    """Name the one matrix of a tied model after the embedding."""
    for table in tables:
        ops = {rule.canonical: rule.op for rule in table}
        head, embedding = foreign_name(table, HEAD), foreign_name(table, EMBEDDING)
        alone = head in names and embedding not in names
        if foreign_name(table, _LAST_NORM) not in names or not alone:
            continue
        if ops[(HEAD,)] == ops[(EMBEDDING,)]:
            notes.append(f"{head!r} read as the embedding, to which it is tied")
            return {embedding if name == head else name: old for name, old in names.items()}
    return names
