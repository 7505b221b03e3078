"""Tells whether a folder holds nothing but a checkpoint, so that a conversion may replace it."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from griffin_eval.converters.containers.orbax.find import (
    COMMITTED,
    MANIFEST,
    MSGPACK,
    PROCESS,
    STEP_METADATA,
    TREE_METADATA,
    looks_like_orbax,
)
from griffin_eval.converters.output.manifest import MANIFEST_FILE
from griffin_eval.converters.source.companions import COMPANIONS, TEMPLATES

# Files that only a checkpoint has.
_WEIGHTS = re.compile(
    r"(model|consolidated|adapter_model)([-_.]\d+)?(-of-\d+)?\.safetensors(\.index\.json)?"
    r"|pytorch_model([-_.]\d+)?(-of-\d+)?\.bin(\.index\.json)?|adapter_model\.bin"
    rf"|{re.escape(MANIFEST_FILE)}"
)
# Weights under any other name: one such file is a checkpoint, several are a collection.
_OTHER_WEIGHTS = re.compile(rf".*\.(safetensors|pt|pth|ckpt|gguf)|{MSGPACK}_\d+")
_BESIDE = re.compile(
    r"config\.json|adapter_config\.json|quantize_config\.json|preprocessor_config\.json"
    r"|processor_config\.json|chat_template\.json|vocab\.(json|txt)|merges\.txt"
    r"|(spiece|sentencepiece\.bpe|tokenizer)\.(model|vocab)"
    # The state of a trainer, as transformers and accelerate save it beside weights.
    r"|trainer_state\.json|training_args\.bin|(all|train|eval)_results\.json"
    r"|(optimizer|scheduler|scaler)\.(pt|bin)|rng_state(_\d+)?\.pth|random_states_\d+\.pkl"
    # Pages and settings of a repository on the hub.
    r"|README(_source)?\.md|(LICENSE|LICENCE|NOTICE|USE_POLICY)(\.(md|txt))?"
    r"|\.gitattributes|\.gitignore|\.DS_Store"
)
_ORBAX = re.compile(
    rf"{TREE_METADATA}|{STEP_METADATA}|{re.escape(MANIFEST)}|{MSGPACK}"
    rf"|{re.escape(COMMITTED)}|_sharding|_strings\.json|orbax\.checkpoint"
)
_ITEM_FILES = re.compile(rf"{_ORBAX.pattern}|metadata|metrics")
_DATA, _PROCESSES = re.compile(r"[0-9a-f]{32}"), re.compile(r"process_\d+")
_ARRAY_FILES = re.compile(r"\.zarray|\.zattrs|\.zgroup|zarr\.json|c|\d+(\.\d+)*")
_STEP = re.compile(r"(.*[_-])?\d+")
# First bytes of an archive of torch.save, of its older files and of GGUF.
_MAGIC = (b"PK\x03\x04", b"\x80\x02\x8a\n", b"GGUF")


def is_weights_file(path: Path) -> bool:
    """Return whether a file holds weights, by the ending of its name and its first bytes."""
    if not path.is_file() or not _OTHER_WEIGHTS.fullmatch(path.name):
        return False
    with open(path, "rb") as file:
        start = file.read(9)
    return not start or start.startswith(_MAGIC) or start[8:] == b"{"


def holds_checkpoint(folder: Path) -> bool:
    """Return whether a folder contains weights, Orbax's metadata or a manifest."""
    names = os.listdir(folder)
    return looks_like_orbax(folder) or any(
        _WEIGHTS.fullmatch(name) or _OTHER_WEIGHTS.fullmatch(name) for name in names
    )


def strangers(folder: Path) -> list[str]:
    """Return the names in a folder that are not part of a checkpoint, sorted.

    Files of a checkpoint are those that this package writes, and those that transformers, Orbax,
    torch and the hub's client write beside weights. An unknown folder is returned as one name. If a
    folder holds several checkpoints, every file of weights is returned whose name is its author's
    choice, and every item of Orbax.
    """
    names, others = [], []
    is_step = os.path.isfile(folder / STEP_METADATA)
    is_item = any(os.path.isfile(folder / name) for name in (TREE_METADATA, MANIFEST, MSGPACK))
    known = is_item
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if entry.is_dir():
                if (is_item or not is_step) and _is_item(entry):
                    others.append(f"{name}/")
                names += _in_folder(entry, name, is_step=is_step)
            elif not entry.is_file() and not entry.is_symlink():
                names.append(name)
            elif _OTHER_WEIGHTS.fullmatch(name) and not _is_known(name):
                others.append(name)
            elif not _is_known(name):
                names.append(name)
            elif _WEIGHTS.fullmatch(name) and name != MANIFEST_FILE:
                known = True
    if len(others) + known > 1:
        names = [*others, *(name for name in names if not name.startswith(tuple(others)))]
    return sorted(names)


def _is_known(name: str) -> bool:
    known = (_WEIGHTS, _BESIDE, _ORBAX)
    return name in COMPANIONS or any(pattern.fullmatch(name) for pattern in known)


def _is_item(folder: os.DirEntry[str]) -> bool:
    """Return whether a subfolder is an item of Orbax."""
    if folder.is_symlink() or folder.name.startswith(PROCESS) or _STEP.fullmatch(folder.name):
        return False
    return not {TREE_METADATA, MANIFEST}.isdisjoint(os.listdir(folder.path))


def _in_folder(entry: os.DirEntry[str], name: str, *, is_step: bool) -> Iterator[str]:
    """Yield the strangers in a subfolder of a checkpoint, with their paths. ``is_step``: the
    subfolder lies in a step of Orbax, so that it may be an item of any name."""
    path = Path(entry.path)
    if entry.is_symlink():
        yield f"{name}/"
    elif entry.name == "d":
        yield from _other_files(path, name, _DATA)
    elif entry.name == "array_metadatas":
        yield from _other_files(path, name, _PROCESSES)
    elif entry.name == TEMPLATES:
        yield from _other_files(path, name, re.compile(r".*\.jinja"))
    elif entry.name == ".cache":  # written by the hub's client
        yield from (f"{name}/{each}" for each in os.listdir(path) if each != "huggingface")
    else:
        inside = set(os.listdir(path))
        if inside & {".zarray", "zarr.json"}:
            yield from _other_files(path, name, _ARRAY_FILES, folders=re.compile(r"c|\d+"))
        elif _is_item(entry) or entry.name.startswith(PROCESS) or (is_step and inside):
            with os.scandir(path) as entries:
                for each in entries:
                    if each.is_dir():
                        yield from _in_folder(each, f"{name}/{each.name}", is_step=is_step)
                    elif not _ITEM_FILES.fullmatch(each.name):
                        yield f"{name}/{each.name}"
        else:
            yield f"{name}/"


def _other_files(
    path: Path, name: str, files: re.Pattern[str], folders: re.Pattern[str] | None = None
) -> Iterator[str]:
    """Yield files and subfolders whose names do not match ``files`` and ``folders``."""
    with os.scandir(path) as entries:
        for entry in entries:
            within = f"{name}/{entry.name}"
            if not entry.is_dir(follow_symlinks=False):
                if not files.fullmatch(entry.name):
                    yield within
            elif folders is not None and folders.fullmatch(entry.name):
                yield from _other_files(Path(entry.path), within, files, folders)
            else:
                yield f"{within}/"
