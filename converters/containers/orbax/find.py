"""Finds the arrays' folder in a trainer's output, and the parameters within its tree.

Orbax saves a tree of arrays as an *item*, a folder with ``_METADATA``. ``CheckpointManager`` keeps
items in *steps*, and steps in a root: ``root/12000/default``. Nothing here reads an array; only
names and JSON are looked at.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from griffin_eval.converters.containers.container import natural_key
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.json_files import absolute_path, read_json
from griffin_eval.messages import DAMAGED, brief, did_you_mean, listed

TREE_METADATA, STEP_METADATA = "_METADATA", "_CHECKPOINT_METADATA"
COMMITTED = "commit_success.txt"
MANIFEST, MSGPACK = "manifest.ocdbt", "checkpoint"
PROCESS = "ocdbt.process_"

Keys = tuple[str, ...]

_STEP = re.compile(r"(?:.*[_-])?(\d{1,18})")
_TEMPORARY = (".orbax-checkpoint-tmp", ".orbax-tmp")
# Part of the name that Orbax, and some releases of transformers, give to a save in progress. The
# number that follows, such as the time, is no step.
_SAVING = re.compile(r"(?:.*[._-])?tmp(?:[._-].*)?")
_ALL_STORED = "store_array_data_equal_to_fill_value"
_OPTIMIZER = re.compile(r"(opt|optim|optimizer)(_?states?)?|param_states", re.IGNORECASE)
_RANDOM = re.compile(r"(.*_)?(rngs?|prng|key|seed)(_.*)?", re.IGNORECASE)
# Keys of parameters. Beside other keys, they show that a tree holds more than a single model.
_COPY = re.compile(r"(.*_)?(params|ema|swa|polyak)(_.*)?", re.IGNORECASE)
_AVERAGE = re.compile(r"(.*_)?(ema|swa|polyak)(_.*)?", re.IGNORECASE)
_MODEL_ITEMS = re.compile(r"(train_?)?state|default|model|pytree", re.IGNORECASE)
_WRAPPERS = frozenset({"params", "state", "train_state", "target", "default"})
_NNX_LEAVES = ("value", "raw_value")


class OrbaxLocation(NamedTuple):
    """The location of the arrays of a checkpoint.

    Attributes:
        folder: Folder of the item; the file itself, if all is in one msgpack file.
        subtree: Keys that ``item=`` asks for within it.
        step, item: Names of the folders of the step and the item, if there are any.
        skipped: Names of newer steps that were not finished.
        others: Names of the other items.
    """

    folder: Path
    subtree: Keys = ()
    step: str | None = None
    item: str | None = None
    skipped: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


class Leaf(NamedTuple):
    """A leaf of the metadata: keys, Orbax's word for its type, and the shape of a part."""

    keys: Keys
    kind: str
    write_shape: tuple[int, ...] | None = None


def looks_like_orbax(path: str | Path) -> bool:
    """Return whether a folder is an item, step or root of steps of Orbax, or holds flax's msgpack.
    Only names and the first byte of a msgpack file are looked at."""
    path = Path(path)
    if path.is_file():
        return path.name.startswith(MSGPACK) and _is_msgpack(path)
    return path.is_dir() and bool(
        _is_item(path) or _items(path) or _steps(path) or _leftovers(path)
    )


def locate(path: str | Path, item: str | None = None) -> OrbaxLocation:
    """Find the item at a path: in a root, within the latest finished step; if named, by its name.

    Args:
        path: Item, step or root of steps.
        item: Name of an item, of a subtree, or both: ``state/ema_params``.

    Raises:
        CheckpointError: there is no checkpoint.
        ArgumentError: several items are equally likely, or the named one is absent.
    """
    path = Path(path)
    keys = tuple(key for key in (item or "").split("/") if key)
    folder_name = absolute_path(path).name
    if any(mark in folder_name for mark in _TEMPORARY):
        raise CheckpointError(f"{path} is a save that was cut off: name a finished one")
    try:
        if path.is_file() or _is_item(path):
            return OrbaxLocation(path, keys)
        if not path.is_dir():
            raise CheckpointError(f"{path}: expected an Orbax checkpoint, found no such folder")
        step, skipped = (folder_name if number_of(folder_name) is not None else None), ()
        if not _items(path) and (steps := _steps(path)):
            *newer, path = _latest(path, steps)
            step, skipped = path.name, tuple(folder.name for folder in newer)
            if path.is_file() or _is_item(path):
                return OrbaxLocation(path, keys, step, None, skipped)
        if items := _items(path):
            name = _choose_item(path, sorted(items, key=natural_key), keys)
            rest = keys[1:] if keys and keys[0] == name else keys
            others = tuple(other for other in items if other != name)
            return OrbaxLocation(items[name], rest, step, name, skipped, others)
        if leftovers := _leftovers(path):
            raise CheckpointError(
                f"{path} holds no finished step, only {listed(leftovers)}, left by saves that were "
                "cut off: name a folder with a finished step"
            )
        found = listed(sorted(child.name for child in path.iterdir())) or "nothing"
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    raise CheckpointError(
        f"{path}: expected an Orbax checkpoint ({TREE_METADATA}, or step folders with it), found "
        f"{found}"
    )


def step_number(folder: Path) -> int | None:
    """Return the step that a finished checkpoint's folder is named after; None for any other
    folder, such as one whose save was cut off or has not ended."""
    number = number_of(absolute_path(folder).name)
    return number if number is not None and _is_finished(folder) else None


class Tree(NamedTuple):
    """The content of ``_METADATA``. ``sparse``: chunks that hold only the fill value may be
    absent, as in zarr3 by versions of Orbax that do not note that they store all chunks."""

    leaves: list[Leaf]
    zarr3: bool
    sparse: bool


def read_tree(folder: Path) -> Tree:
    """Read ``_METADATA``; CheckpointError if it is malformed."""
    path = folder / TREE_METADATA
    raw = read_json(path)
    entries, zarr3 = raw.get("tree_metadata"), raw.get("use_zarr3", False)
    stored = raw.get(_ALL_STORED, False)
    if not isinstance(entries, dict) or not isinstance(zarr3, bool):
        raise CheckpointError(
            f"{path}: expected an object 'tree_metadata' and a boolean 'use_zarr3', found "
            f"{brief(entries)} and {brief(zarr3)}; {DAMAGED}"
        )
    if not isinstance(stored, bool):
        raise CheckpointError(
            f"{path}: expected a boolean '{_ALL_STORED}', found {brief(stored)}; {DAMAGED}"
        )
    leaves, problems = [], []
    for name, entry in entries.items():
        try:
            leaves.append(_leaf(entry))
        except (TypeError, KeyError, ValueError, AttributeError):
            problems.append(f"{brief(name)} is {brief(entry)}")
    if problems:
        raise CheckpointError(f"{path}: malformed leaves: {listed(problems)}; {DAMAGED}")
    return Tree(leaves, zarr3, zarr3 and not stored)


def choose_root(source: str, keys: Iterable[Keys], prefix: Keys = ()) -> Keys:
    """Find the parameters in a tree: its root, or below ``params`` and the like.

    Args:
        source: Name of the item, for the message.
        keys: Keys of every floating-point array that is not of an optimizer.
        prefix: Keys that ``item=`` has to begin with, for the message.

    Raises:
        ArgumentError: there are several sets of parameters.
    """
    paths, root = list(keys), ()
    while True:
        depth = len(root)
        inner = [path for path in paths if len(path) > depth + 1]
        tops = list(dict.fromkeys(path[depth] for path in paths))
        nested = {path[depth] for path in inner}
        copies = [top for top in tops if top in nested and _COPY.fullmatch(top)]
        if len(tops) == 1 and tops[0] in nested and (tops[0] in _WRAPPERS or copies):
            chosen = tops[0]
        elif copies == ["params"]:
            chosen = "params"
        elif copies:
            paths = ("/".join((*prefix, *root, top)) for top in tops)
            options = listed(paths, lambda path: f"item={path}")
            raise ArgumentError(f"{source} holds several sets of parameters; choose one: {options}")
        else:
            return root
        root = (*root, chosen)
        paths = [path for path in paths if path[depth] == chosen]


def is_optimizer(keys: Keys) -> bool:
    """Return whether a leaf belongs to the state of an optimizer."""
    return any(_OPTIMIZER.fullmatch(key) for key in keys)


def not_a_parameter(keys: Keys, dtype: str, shape: tuple[int, ...]) -> str:
    """Return why an array that is not floating point is not a parameter."""
    if any(_RANDOM.fullmatch(key) for key in keys):
        return f"{dtype}, state of random numbers"
    return f"{dtype}, a counter" if not shape else f"{dtype}, not floating point"


def strip_leaves(keys: Collection[Keys]) -> dict[Keys, str]:
    """Return the names of leaves: keys joined by "/", without the last key ``value`` (or
    ``raw_value``) that NNX adds."""
    for ending in _NNX_LEAVES:
        if keys and all(len(path) > 1 and path[-1] == ending for path in keys):
            return {path: "/".join(path[:-1]) for path in keys}
    return {path: "/".join(path) for path in keys}


def subtree_problem(source: str, subtree: Keys, keys: Iterable[Keys]) -> ArgumentError:
    """Return the error of an ``item=`` that is not in the tree."""
    paths, known = list(keys), ()
    for i in range(len(subtree)):  # find the longest part that exists
        if any(path[: i + 1] == subtree[: i + 1] for path in paths):
            known = subtree[: i + 1]
    below = dict.fromkeys("/".join(p[: len(known) + 1]) for p in paths if p[: len(known)] == known)
    wanted = "/".join(subtree)
    return ArgumentError(
        f"{source} has no item {wanted!r}{did_you_mean(wanted, below)}: expected one of "
        f"{listed(sorted(below, key=natural_key))}"
    )


def _leaf(entry: Mapping[str, Any]) -> Leaf:
    # Orbax writes list indices and integer keys as strings; other writers may not.
    keys = tuple(str(part["key"]) for part in entry["key_metadata"])
    value = entry["value_metadata"]
    kind, shape = value["value_type"], value.get("write_shape")
    if not keys or not isinstance(kind, str) or any("\0" in key for key in keys):
        raise ValueError
    if value.get("skip_deserialize"):
        kind = kind if kind in ("None", "Dict", "List") else "skipped"
    if shape is not None and not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError
    return Leaf(keys, kind, None if shape is None else tuple(shape))


def _choose_item(step: Path, names: list[str], keys: Keys) -> str:
    if keys and keys[0] in names:
        return keys[0]
    models = [n for n in names if not _OPTIMIZER.fullmatch(n) and not _RANDOM.fullmatch(n)]
    if len(models) == 1:
        return models[0]
    if keys:
        raise ArgumentError(
            f"{step} has no item {keys[0]!r}{did_you_mean(keys[0], names)}: expected one of "
            f"{listed(names)}"
        )
    likely = [n for n in models if _COPY.fullmatch(n) or _MODEL_ITEMS.fullmatch(n)]
    if len(likely) == 1:
        if not _AVERAGE.fullmatch(likely[0]):
            return likely[0]
        likely = models  # the weights have another name
    options = listed(likely or names, lambda name: f"item={name}")
    raise ArgumentError(f"{step} holds several items; choose one: {options}")


def _latest(root: Path, steps: Mapping[Path, int]) -> list[Path]:
    """Return the steps from the newest one back to the latest finished one, which comes last."""
    newest = []
    for path in sorted(steps, key=lambda path: (steps[path], path.name), reverse=True):
        newest.append(path)
        if _is_finished(path):
            return newest
    raise CheckpointError(
        f"{root} holds no step whose save was finished: {listed(path.name for path in newest)}; "
        "name a step to read it nevertheless"
    )


def _is_finished(step: Path) -> bool:
    try:
        metadata = json.loads((step / STEP_METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # Orbax did not always write it
        metadata = None
    if isinstance(metadata, dict) and "commit_timestamp_nsecs" in metadata:
        return metadata["commit_timestamp_nsecs"] is not None
    return not _lacks_commit(step)


def _lacks_commit(step: Path) -> bool:
    """Return whether a step lacks the file that marks an earlier one as finished: later steps of a
    run have it if earlier ones do. (Old releases of Orbax wrote it in stores that cannot rename
    folders, later ones everywhere.)"""
    number = number_of(step.name)
    if number is None or os.path.isfile(step / COMMITTED):
        return False
    try:
        siblings = os.listdir(step.parent)
    except OSError:
        return False
    return any(
        (earlier := number_of(name)) is not None
        and earlier < number
        and os.path.isfile(step.parent / name / COMMITTED)
        for name in siblings
    )


def _steps(root: Path) -> dict[Path, int]:
    """Return the folders or files of a root's steps, finished or not, and their numbers. Beside
    steps that are named by a number alone, others, such as ``backup_20260102``, are no steps."""
    steps = {}
    for child in root.iterdir():
        number = number_of(child.name)
        if number is not None and _holds_arrays(child):
            steps[child] = number
    return {path: n for path, n in steps.items() if path.name.isdecimal()} or steps


def number_of(name: str) -> int | None:
    """Return the step number in the name of a folder or file, or None if the name has none."""
    match = _STEP.fullmatch(name)
    return None if match is None or _SAVING.fullmatch(name) else int(match[1])


def _leftovers(root: Path) -> list[str]:
    """Return the names of Orbax's temporary folders in a folder, sorted."""
    return sorted(
        child.name
        for child in root.iterdir()
        if any(mark in child.name for mark in _TEMPORARY) and _holds_arrays(child)
    )


def _holds_arrays(step: Path) -> bool:
    return bool(_is_item(step) or _items(step)) if step.is_dir() else _is_msgpack(step)


def _items(step: Path) -> dict[str, Path]:
    if not step.is_dir():
        return {}
    items = {
        child.name: child
        for child in step.iterdir()
        if child.is_dir()
        and not (child.is_symlink() and child.resolve().parent == step.resolve())  # "latest"
        and not child.name.startswith(PROCESS)
        and not any(mark in child.name for mark in _TEMPORARY)
        and not (_STEP.fullmatch(child.name) and number_of(child.name) is None)
        and _is_item(child)
    }
    # "12000" and "checkpoint_12000" alone are steps that hold their arrays without an item.
    return items if any(number_of(name) is None for name in items) else {}


def _is_item(folder: Path) -> bool:
    """Return whether a folder holds arrays that Orbax wrote, or their remains."""
    if not folder.is_dir():
        return False
    if (folder / TREE_METADATA).is_file() or (folder / MANIFEST).is_file():
        return True
    if (folder / MSGPACK).is_file() and _is_msgpack(folder / MSGPACK):
        return True
    return any(
        child.name.startswith(PROCESS) and (child / MANIFEST).is_file()
        for child in folder.iterdir()
    )


def _is_msgpack(path: Path) -> bool:
    """Return whether a file begins with a msgpack map, as flax's files do."""
    if not path.name.startswith(MSGPACK) or not path.is_file():
        return False
    with open(path, "rb") as handle:
        first = handle.read(1)
    return bool(first) and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF))
