"""The manifest of every output: the hash of each parameter's bytes, and the output's source."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffin_eval
from griffin_eval.config import GriffinConfig
from griffin_eval.converters.chunk_sums import ChunkSums
from griffin_eval.converters.containers.registry import CONTAINERS
from griffin_eval.converters.files import write_file
from griffin_eval.converters.formats import FORMATS, Format
from griffin_eval.converters.source.hub import hub_sha256
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import list_folder, parse_json, read_file
from griffin_eval.messages import is_sha256

if TYPE_CHECKING:
    from griffin_eval.converters.checkpoint import Checkpoint
    from griffin_eval.converters.inspection import Inspection

MANIFEST_FILE = "griffin_manifest.json"


def write_manifest(
    folder: Path,
    config: GriffinConfig,
    tensors: dict[str, dict[str, Any]],
    source: dict[str, Any],
    target: str,
    notes: dict[str, Any],
) -> None:
    """Write the manifest of a converted checkpoint.

    Args:
        tensors: ``sha256``, ``shape``, ``dtype``, ``chunks`` (`ChunkSums.record`), and
            ``cast_from`` if cast, by canonical name.
        source: Path, format and layout of what was converted.
        target: Format of the output.
        notes: Further decisions, such as a slice of the vocabulary.
    """
    content = {
        "griffin_eval": griffin_eval.__version__,
        "format": target,
        "source": source,
        "config": dataclasses.asdict(config),
        **notes,
        "tensors": tensors,
    }
    write_file(folder / MANIFEST_FILE, json.dumps(content, indent=1) + "\n")


def combined_sha256(hashes: Mapping[str, tuple[str, str]]) -> "hashlib._Hash":
    """Return one hash of a model: over names, dtypes and SHA-256 of its parameters, sorted by
    name."""
    lines = (f"{name} {dtype} {sha}\n" for name, (dtype, sha) in sorted(hashes.items()))
    return hashlib.sha256("".join(lines).encode())


def recorded(opened: "Checkpoint | Inspection") -> dict[str, dict[str, Any]]:
    """Return the entries of a checkpoint's manifest, by canonical name: ``sha256``, ``dtype``, and
    the `ChunkSums` ``chunks`` (None in a manifest of an older version).

    Empty if there is no manifest, or only that of another checkpoint in the folder.
    CheckpointError if it is damaged, or the folder cannot be listed.
    """
    path = opened.folder / MANIFEST_FILE
    if not path.is_file():
        return {}
    text = read_file(path)
    try:
        manifest = parse_json(text)
        tensors, target = manifest["tensors"], FORMATS.get(manifest.get("format", ""))
        entries = {
            str(name): {
                "sha256": str(entry["sha256"]),
                "dtype": str(entry["dtype"]),
                "chunks": ChunkSums.of_record(entry["shape"], entry["chunks"])
                if "chunks" in entry
                else None,
            }
            for name, entry in tensors.items()
        }
        if not entries:
            raise ValueError
        for entry in entries.values():
            if not is_sha256(entry["sha256"]) or not entry["dtype"].isidentifier():
                raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}), so that the weights cannot be checked: "
            "put the file back; or remove it, and nothing is checked"
        ) from None
    return {} if target is not None and _is_of_another(opened, target) else entries


def _is_of_another(opened: "Checkpoint | Inspection", target: Format) -> bool:
    """Return whether a manifest belongs to other weights in the folder than the opened file. In a
    folder without other weights it is taken as the file's own, whatever format it states: the
    file may have been converted from that."""
    if opened.path == opened.folder:
        return False
    kind, name = CONTAINERS[target.container], opened.path.name
    others = {n for n in list_folder(opened.folder) if n != name and kind.recognises([n])}
    if not others or opened.format is None or opened.format.container != target.container:
        return bool(others)
    written = set(kind.output_files({"": ((), "float32")}, 1).values())
    return name not in written and not written.isdisjoint(others)


def added(
    checkpoint: "Checkpoint | Inspection", entries: Mapping[str, dict[str, Any]]
) -> list[str]:
    """Return a sentence for each parameter in the files of a checkpoint that its manifest does
    not have; none if there is no manifest. An output head of its adapters is not in its files."""
    stored = (spec.name for binding in checkpoint.bindings for spec in binding.canonical)
    return [
        f"{checkpoint.folder}: {name} is not in {MANIFEST_FILE}: it was added after the checkpoint "
        "was converted"
        for name in stored
        if entries and name not in entries
    ]


def checksums(opened: "Checkpoint | Inspection") -> list[str]:
    """Return what the weights of a checkpoint can be checked against, in words; CheckpointError
    if the manifest is damaged."""
    entries, container = recorded(opened), opened.container
    sums = sum(tensor.crc32 is not None for tensor in container.tensors.values())
    files = sum(hub_sha256(path) is not None for path in container.files())
    return (
        [f"SHA-256 of {len(entries)} parameters in {MANIFEST_FILE}"] * bool(entries)
        + [f"CRC-32 of {sums} tensors in the file"] * bool(sums)
        + [f"SHA-256 of {files} files from the hub"] * bool(files)
    )


def mismatch(folder: Path, name: str, dtype: str, sha256: str, entry: dict[str, Any]) -> str | None:
    """Return a sentence if a parameter does not match the manifest, else None."""
    if dtype != entry["dtype"]:
        found = f"is {dtype}, and {MANIFEST_FILE} says {entry['dtype']}"
    elif sha256 != entry["sha256"]:
        found = f"has the SHA-256 {sha256[:12]}…, and {MANIFEST_FILE} says {entry['sha256'][:12]}…"
    else:
        return None
    return f"{folder}: {name} {found}: the file is damaged, or was changed after it was converted"


def check(
    checkpoint: "Checkpoint", progress: Callable[[int], None] = lambda nbytes: None
) -> tuple[int, list[str]]:
    """Compare every parameter of a checkpoint with all available checksums: the manifest's, the
    container's, and the hub's for files in its cache.

    Returns:
        How many parameters were compared, and a sentence for each that differs.

    Raises:
        CheckpointError: the manifest is damaged, or there is nothing to compare with; a file in
            the hub's cache is not the hub's.
    """
    entries = recorded(checkpoint)
    if not checksums(checkpoint):
        path = checkpoint.folder / MANIFEST_FILE
        found = f"{checkpoint.folder} has no {MANIFEST_FILE} to be checked against"
        if path.is_file():
            found = f"{checkpoint.path} has no checksums, and {path} is of other weights there"
        raise CheckpointError(f"{found}: name another checkpoint to compare it with")
    checkpoint.check_files()
    names = list(dict.fromkeys([*entries, *checkpoint.dtypes]))
    problems = added(checkpoint, entries)
    for name in names:
        if name not in checkpoint.dtypes:
            problems.append(f"{checkpoint.folder}: {name} is in {MANIFEST_FILE}, and not there")
            continue
        if entries and name not in entries:
            continue
        try:
            sha = checkpoint.sha256(name, seen=progress)
        except CheckpointError as error:  # the container's own checksum differs
            problems.append(str(error))
            continue
        if entries:
            dtype = checkpoint.dtypes[name]
            found = mismatch(checkpoint.folder, name, dtype, sha, entries[name])
            problems += [] if found is None else [found]
    return len(names), problems
