"""The proof that comes with every output: what each parameter's bytes hash to, and where from."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffin_eval
from griffin_eval.config import GriffinConfig
from griffin_eval.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

    from griffin_eval.converters.checkpoint import Checkpoint

MANIFEST_FILE = "griffin_manifest.json"


def write_manifest(
    folder: Path,
    config: GriffinConfig,
    tensors: dict[str, dict[str, Any]],
    source: dict[str, Any],
    target: str,
    notes: dict[str, Any],
) -> None:
    """Writes the manifest of a converted checkpoint.

    Args:
        folder: folder of the output.
        config: config of the model.
        tensors: ``sha256``, ``shape``, ``dtype``, and ``cast_from`` if cast, by canonical name.
        source: path, format and layout of what was converted.
        target: format of the output.
        notes: further decisions, such as a slice of the vocabulary.
    """
    content = {
        "griffin_eval": griffin_eval.__version__,
        "format": target,
        "source": source,
        "config": dataclasses.asdict(config),
        **notes,
        "tensors": tensors,
    }
    (folder / MANIFEST_FILE).write_text(json.dumps(content, indent=1) + "\n")


def recorded(folder: Path) -> dict[str, dict[str, Any]]:
    """What the manifest of a checkpoint says of its parameters, by canonical name: ``sha256`` and
    ``dtype`` of each. Empty if there is no manifest.

    Args:
        folder: of the checkpoint.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return {}
    try:
        tensors = json.loads(path.read_text(encoding="utf-8"))["tensors"]
        return {
            str(name): {"sha256": str(entry["sha256"]), "dtype": str(entry["dtype"])}
            for name, entry in tensors.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged ({type(error).__name__}), so that the weights cannot be checked: "
            "put the file back; or remove it, and nothing is checked"
        ) from None


def mismatch(folder: Path, name: str, dtype: str, sha256: str, entry: dict[str, Any]) -> str | None:
    """A sentence where a parameter is not what the manifest says, else None.

    Args:
        folder: of the checkpoint.
        name: canonical name.
        dtype: that it is stored in.
        sha256: of its bytes in canonical layout.
        entry: from `recorded`.
    """
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
    """Compares every parameter of a checkpoint with its own manifest.

    Args:
        checkpoint: that is open.
        progress: called with the number of bytes that were read.

    Returns:
        How many parameters the manifest names, and a sentence for each that differs.

    Raises:
        CheckpointError: the manifest is damaged, or there is none.
    """
    entries = recorded(checkpoint.folder)
    if not entries:
        raise CheckpointError(
            f"{checkpoint.folder} has no {MANIFEST_FILE} to be checked against: name another "
            "checkpoint to compare it with"
        )
    problems = []
    for name, entry in entries.items():
        if name not in checkpoint.dtypes:
            problems.append(f"{checkpoint.folder}: {name} is in {MANIFEST_FILE}, and not there")
            continue
        sha = hashlib.sha256()
        for piece in checkpoint.pieces(name):
            sha.update(bytes_of(piece))
            progress(piece.nbytes)
        found = mismatch(checkpoint.folder, name, checkpoint.dtypes[name], sha.hexdigest(), entry)
        problems += [] if found is None else [found]
    return len(entries), problems


def bytes_of(piece: "np.ndarray") -> memoryview:
    """The bytes of an array in C order, which are not copied if they lie so."""
    import numpy as np

    return np.ascontiguousarray(piece).view(np.uint8).data
