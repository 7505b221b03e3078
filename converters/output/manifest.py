"""The proof that comes with every output: what each parameter's bytes hash to, and where from."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import griffin_eval
from griffin_eval.config import GriffinConfig

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
