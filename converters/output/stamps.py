"""The files that a conversion reads: none of them may change meanwhile."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from griffin_eval.converters.configs.huggingface import CONFIG_FILE
from griffin_eval.errors import CheckpointError

if TYPE_CHECKING:
    from griffin_eval.converters.plan import Plan


def stamps_of(plan: "Plan") -> list[tuple[str, int, int]]:
    """Return name, size and time of change of every file that a conversion reads;
    CheckpointError if one of them cannot be looked at."""
    try:
        stats = [(str(path), os.stat(path)) for path in sorted(_files(plan))]
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from None
    return [(path, status.st_size, status.st_mtime_ns) for path, status in stats]


def check_unchanged(plan: "Plan", stamps: list[tuple[str, int, int]]) -> None:
    """Raise CheckpointError if a file of a conversion is not what it was."""
    if changed := sorted(set(stamps) ^ set(stamps_of(plan))):
        raise CheckpointError(
            f"{changed[0][0]} changed while it was read, so that nothing is written: wait until "
            "whatever writes it has ended, and convert it again"
        )


def _files(plan: "Plan") -> set[Path]:
    """The files that a conversion reads."""
    beside = [plan.source.folder / CONFIG_FILE, *plan.companions.values()]
    adapters = (path for adapter in plan.source.adapters for path in adapter.files)
    files = (*plan.source.container.files(), *beside, *adapters)
    return {path.resolve() for path in files if path.is_file()}
