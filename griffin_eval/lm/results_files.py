"""Results files of lm-eval that are whole or absent, whenever a run ends."""

import contextlib
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def whole_or_absent(save: Callable[..., None]) -> Callable[..., None]:
    """A method of lm-eval's EvaluationTracker that writes files below its ``output_path``, made to
    write them elsewhere first. Each then appears under its name with all its bytes, which are on
    the disk. Runs of other models write as they always did."""

    @functools.wraps(save)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        source = self.general_config_tracker.model_source
        if not self.output_path or not str(source).startswith("griffin"):
            return save(self, *args, **kwargs)
        chosen = self.output_path
        is_file = Path(chosen).suffix == ".json"  # of which lm-eval puts the time into the name
        final = Path(chosen).parent if is_file else Path(chosen)
        with tempfile.TemporaryDirectory(prefix="griffin-eval-") as folder:
            self.output_path = str(Path(folder, Path(chosen).name)) if is_file else folder
            try:
                save(self, *args, **kwargs)
            finally:
                self.output_path = chosen
            for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                _appear(file, final / file.relative_to(folder))

    return wrapper


def _appear(source: Path, destination: Path) -> None:
    """Copies a file; the copy has its name only when it is whole."""
    unfinished = destination.with_name(f".{destination.name}.unfinished")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, unfinished)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(destination)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        logger.error("the results are not saved in %s: %s", destination, error.strerror or error)
