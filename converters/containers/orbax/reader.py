"""Reads the parameters of an Orbax checkpoint, whatever trainer wrote it, in bounded memory.

tensorstore reads the arrays; jax and Orbax are not needed. Names of parameters mean nothing here:
this module only finds the part of a tree that holds parameters, and lists all other entries.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from griffin_eval.converters.containers.container import Container, in_natural_order
from griffin_eval.converters.containers.orbax.find import (
    MANIFEST,
    MSGPACK,
    TREE_METADATA,
    Keys,
    Leaf,
    choose_root,
    is_optimizer,
    locate,
    not_a_parameter,
    read_tree,
    strip_leaves,
    subtree_problem,
)
from griffin_eval.converters.containers.orbax.msgpack import PLACEHOLDER, read_msgpack
from griffin_eval.converters.containers.orbax.remote import advice, reason, shown
from griffin_eval.converters.containers.orbax.store import Store
from griffin_eval.converters.tensors import FLOATS, LazyTensor, Region
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import files_within
from griffin_eval.messages import listed

_ARRAYS = ("jax.Array", "np.ndarray")


def open_orbax(folder: str | Path, *, item: str | None = None) -> Container:
    """Open the parameters of an item, a step or a root of steps; of a root, the latest finished
    step.

    Opening reads and checks all metadata, and no array. The name of a parameter is its keys
    joined by "/", below the root of the parameters; keys of lists, and numbers, are strings; the
    last key ``value`` that NNX adds is left away.

    Args:
        folder: Item, step or root of steps; or a msgpack file of flax.
        item: Item, subtree, or both, such as ``ema_params`` or ``state/params``.

    Raises:
        CheckpointError: no checkpoint, or something missing or damaged; naming folder, file or
            key.
        ArgumentError: several sets of parameters of equal standing, or no such item.
        MissingExtraError: tensorstore is not installed.
    """
    location = locate(folder, item)
    arrays, others, layout, places = _open(location.folder, location.subtree)
    left_out = {f"item {name}": "another item" for name in location.others}
    left_out |= {"/".join(keys): why for keys, why in others.items()}
    floats = {keys: array for keys, array in arrays.items() if array.dtype in FLOATS}
    for keys, array in arrays.items():
        if keys not in floats:
            left_out["/".join(keys)] = not_a_parameter(keys, array.dtype, array.shape)
    asked = location.subtree
    if location.item and location.others:
        asked = (location.item, *asked)
    below = [keys[len(location.subtree) :] for keys in floats]
    keys_of_root = (*location.subtree, *choose_root(str(location.folder), below, asked))
    root = "/".join(keys_of_root)
    chosen = {}
    for keys in floats:
        if keys[: len(keys_of_root)] == keys_of_root:
            chosen[keys] = keys[len(keys_of_root) :]
        else:
            left_out["/".join(keys)] = f"not in {root}"
    if not chosen:
        within = f" in {root}" if root else ""
        raise CheckpointError(
            f"{location.folder} holds no floating-point arrays{within}: found "
            f"{listed(left_out) or 'nothing'}"
        )
    names = strip_leaves(list(chosen.values()))
    tensors: dict[str, LazyTensor] = {}
    for keys, short in chosen.items():
        name = names[short]
        if name in tensors:
            raise CheckpointError(f"{location.folder} holds two arrays that are called {name!r}")
        tensors[name] = _guarded(location.folder, name, floats[keys])
    if root:
        layout.append(f"{root} root")
    if location.step is not None:
        layout.append(f"step {location.step}")
    if location.skipped:
        layout.append(f"unfinished: {', '.join(location.skipped)}")
    if location.item is not None:
        layout.append(f"item {location.item}")
    return Container(
        in_natural_order(tensors),
        ", ".join(layout),
        lambda: _files(location.folder, places),
        left_out,
        root,
    )


def _files(folder: Path, places: Sequence[str]) -> Iterable[Path]:
    if folder.is_file():
        return [folder]
    # Nothing else: a conversion may write into a folder within this one.
    named = [folder / name for name in (TREE_METADATA, MANIFEST, MSGPACK)]
    stored = (path for place in places for path in files_within(folder / place))
    return [*filter(Path.is_file, named), *stored]


def _guarded(folder: Path, name: str, array: LazyTensor) -> LazyTensor:
    """Return the array with reads whose failures are CheckpointErrors in sentences."""

    def read(region: Region) -> np.ndarray:
        try:
            return array.read(region)
        except (ValueError, OSError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{shown(folder)}: {name!r} cannot be read: {reason(error)}{advice(error)}"
            ) from None
        except MemoryError:
            raise CheckpointError(
                f"{folder}: {name!r}, {array.dtype} of shape {array.shape}, does not fit into "
                "memory, if its shape is true"
            ) from None

    return dataclasses.replace(array, read=read)


def _open(
    folder: Path, subtree: Keys
) -> tuple[dict[Keys, LazyTensor], dict[Keys, str], list[str], list[str]]:
    """Open the arrays of a subtree.

    Returns:
        Arrays by their keys; leaves that can be left out unopened, each with the reason; words
        about how arrays are stored; and the names of the folders that hold them.
    """
    inside: dict[Keys, LazyTensor] = {}
    stored: dict[Keys, str] = {}
    kinds: dict[Keys, Leaf] = {}
    zarr3 = sparse = False
    aggregate = folder if folder.is_file() else folder / MSGPACK
    if (folder / TREE_METADATA).is_file():
        leaves, zarr3, sparse = read_tree(folder)
        kinds = {leaf.keys: leaf for leaf in leaves}
        if len(kinds) < len(leaves):
            raise CheckpointError(f"{folder / TREE_METADATA} names a leaf twice")
    elif aggregate.is_file():
        for keys, value in read_msgpack(aggregate).items():
            kind = "scalar" if value is not None else "None"
            if isinstance(value, LazyTensor):
                inside[keys], kind = value, "np.ndarray"
            elif isinstance(value, str) and value.startswith(PLACEHOLDER):
                stored[keys], kind = value.removeprefix(PLACEHOLDER), "np.ndarray"
            kinds[keys] = Leaf(keys, kind)
    else:
        raise CheckpointError(
            f"{folder}: {TREE_METADATA} is missing, and without it names of arrays are ambiguous: "
            "download or save the folder again"
        )
    if subtree and not any(keys[: len(subtree)] == subtree for keys in kinds):
        raise subtree_problem(str(folder), subtree, kinds)
    wanted, others = [], {}
    for keys, leaf in kinds.items():
        if keys[: len(subtree)] != subtree:
            others[keys] = f"not in {'/'.join(subtree)}"
        elif is_optimizer(keys[len(subtree) :]):
            others[keys] = "state of an optimizer"
        elif leaf.kind not in _ARRAYS:
            others[keys] = "empty" if leaf.kind in ("None", "Dict", "List") else leaf.kind
        else:
            wanted.append(keys)
    where = {k: stored.get(k, ".".join(k)) for k in wanted if k not in inside}
    arrays = {keys: inside[keys] for keys in wanted if keys in inside}
    layout, places = ["msgpack"], []
    if where or not inside:
        store = Store(folder, zarr3, sparse)
        layout = ["OCDBT" if store.ocdbt else "a folder per array", store.driver]
        opened = store.open(list(where.values()))
        places = store.places(where.values())
        arrays |= {keys: opened[name] for keys, name in where.items()}
    lies = [
        f"{'/'.join(keys)!r} as {kinds[keys].write_shape}, stored {array.shape}"
        for keys, array in arrays.items()
        if not _agree(kinds[keys].write_shape, array.shape)
    ]
    if lies:
        raise CheckpointError(
            f"{folder / TREE_METADATA} disagrees with the arrays: {listed(lies)}; they belong to "
            "different checkpoints, or are damaged"
        )
    return arrays, others, layout, places


def _agree(part: tuple[int, ...] | None, shape: tuple[int, ...]) -> bool:
    """Return whether the shape that one device wrote can be the shape of a part of an array."""
    return part is None or (
        len(part) == len(shape) and all(p <= max(1, n) for p, n in zip(part, shape, strict=True))
    )
