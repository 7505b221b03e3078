"""Results files of lm-eval that are whole or absent, whenever a run ends."""

import functools
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lm_eval.loggers.evaluation_tracker import eval_logger
from lm_eval.utils import make_table

from griffin_eval.errors import BadInput


def whole_or_absent(save: Callable[..., None]) -> Callable[..., None]:
    """A method of lm-eval's EvaluationTracker that writes files below its ``output_path``, made to
    write them into a hidden folder beside it first. Each then appears under its name with all its
    bytes, which are on the disk. Runs of other models write as they always did.

    The method raises `BadInput` if the files cannot be written, which lm-eval only logs. The table
    of results is printed before.
    """

    @functools.wraps(save)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        source = self.general_config_tracker.model_source
        if not self.output_path or not str(source).startswith("griffin"):
            return save(self, *args, **kwargs)
        chosen = self.output_path
        is_file = Path(chosen).suffix == ".json"  # of which lm-eval puts the time into the name
        final = Path(chosen).parent if is_file else Path(chosen)
        there = next(folder for folder in (final, *final.absolute().parents) if folder.is_dir())
        try:
            with (
                tempfile.TemporaryDirectory(prefix=".griffin-eval-", dir=there) as folder,
                _Failures() as failures,
            ):
                self.output_path = str(Path(folder, Path(chosen).name)) if is_file else folder
                try:
                    save(self, *args, **kwargs)
                finally:
                    self.output_path = chosen
                files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
                # An upload to the hub may fail after the files are whole.
                if failures.errors and (failures.of_disk or not files):
                    raise failures.errors[0]
                for file in files:
                    _appear(file, final / file.relative_to(folder))
        except OSError as error:
            _print_table(kwargs.get("results", args[0] if args else None))
            reason = error.strerror or error
            raise BadInput(f"{chosen}: the results are not saved: {reason}") from error

    return wrapper


class _Failures(logging.Handler):
    """The errors that lm-eval's tracker catches and logs while it writes."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.errors: list[BaseException] = []

    @property
    def of_disk(self) -> bool:
        """Whether one of them is the operating system's; those of a connection have no number."""
        return any(isinstance(error, OSError) and error.errno for error in self.errors)

    def emit(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if error is not None and error not in self.errors:
            self.errors.append(error)

    def __enter__(self) -> "_Failures":
        eval_logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        eval_logger.removeHandler(self)


def _appear(source: Path, destination: Path) -> None:
    """Move a file to its name once its bytes are on the disk."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    destination.parent.mkdir(parents=True, exist_ok=True)
    source.replace(destination)


def _print_table(results: Any) -> None:
    """Print aggregated results that cannot be saved; not the answers of a task."""
    if isinstance(results, dict) and "results" in results:
        print(make_table(results))
