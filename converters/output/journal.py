"""The records that let a conversion that was cut off go on: its identity, and its journal."""

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffin_eval
from griffin_eval.converters.configs.huggingface import CONFIG_FILE
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import parse_json

if TYPE_CHECKING:
    from griffin_eval.converters.plan import Plan

JOURNAL_FILE = ".griffin_journal.json"


def stamps_of(plan: "Plan") -> list[tuple[str, int, int]]:
    """Name, size and time of change of every file that a conversion reads.

    Raises:
        CheckpointError: one of them cannot be looked at.
    """
    try:
        stats = [(str(path), os.stat(path)) for path in sorted(_files(plan))]
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from None
    return [(path, status.st_size, status.st_mtime_ns) for path, status in stats]


def check_unchanged(plan: "Plan", stamps: list[tuple[str, int, int]]) -> None:
    """Checks that the files of a conversion are what they were.

    Raises:
        CheckpointError: naming one that is not.
    """
    if changed := sorted(set(stamps) ^ set(stamps_of(plan))):
        raise CheckpointError(
            f"{changed[0][0]} changed while it was read, so that nothing is written: wait until "
            "whatever writes it has ended, and convert it again"
        )


def job_of(plan: "Plan", max_shard_size: int) -> str:
    """The identity of a conversion, as text: sources, options and the tool's version.

    Of the files of a source, names, sizes and times of change count, not their bytes.
    """
    source = plan.source
    return json.dumps(
        {
            "griffin_eval": griffin_eval.__version__,
            "files": stamps_of(plan),
            "read": [
                [
                    binding.foreign,
                    binding.entry,
                    binding.op.name,
                    [spec.name for spec in binding.canonical],
                ]
                for binding in source.bindings
            ],
            "format": plan.target.name,
            "config": dataclasses.asdict(plan.config),
            "writes": [[write.binding.foreign, write.dtype] for write in plan.writes],
            "notes": plan.notes,
            "max_shard_size": max_shard_size,
            "mesh": plan.mesh,
        },
        default=str,
    )


def _files(plan: "Plan") -> set[Path]:
    """The files that a conversion reads."""
    beside = [plan.source.folder / CONFIG_FILE, *plan.companions.values()]
    adapters = (path for adapter in plan.source.adapters for path in adapter.files)
    files = (*plan.source.container.files(), *beside, *adapters)
    return {path.resolve() for path in files if path.is_file()}


class Journal:
    """The manifest's entries for the tensors of the files that are finished.

    An entry is on the disk before its file gets its name, and after the file's data. So hashes
    are those of what was read from the source, and nothing has to be read again; a file that was
    touched since has no entry any more.

    Attributes:
        entries: for each file its ``tensors``, by canonical name, as in the manifest.
    """

    def __init__(self, folder: Path):
        self._path = folder / JOURNAL_FILE
        self.entries: dict[str, dict[str, Any]] = {}
        try:
            entries = parse_json(self._path.read_bytes())
        except (OSError, ValueError):  # none yet; it is replaced as a whole, so never a half
            return
        for file, entry in entries.items():
            path = folder / file
            if path.is_file() and _stamp(path) == entry["stamp"]:
                self.entries[file] = entry

    def add(self, file: str, written: Path, tensors: dict[str, dict[str, Any]]) -> None:
        """Notes a file whose data are on the disk, under the name ``written`` as yet."""
        self.entries[file] = {"stamp": _stamp(written), "tensors": tensors}
        new = self._path.with_suffix(".new")
        with open(new, "w", encoding="utf-8") as handle:
            json.dump(self.entries, handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(new, self._path)

    def remove(self) -> None:
        """Removes the journal: it is no part of a checkpoint."""
        self._path.unlink(missing_ok=True)


def _stamp(path: Path) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns]
