"""The folder of compiled JAX programs that are kept between processes, and its size limit.

Evaluation keeps executables (`griffin_eval.runners.compiled_jax`); training and accelerators use
JAX's own cache, which has no limit itself. Both share one here.

Reading a program can run any code, so files that another user could have written are not used.
"""

import contextlib
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from griffin_eval.json_files import over_limit

LIMIT = 1 << 30  # maximum bytes of both folders, 1 GiB

logger = logging.getLogger(__name__)
_refused: set[Path] = set()  # folders that were warned about


def home() -> Path:
    """Return the package's cache folder. (The user may choose another one for JAX.)"""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches, "griffin_eval")


def is_ours(path: Path, status: os.stat_result | None = None) -> bool:
    """Return whether a file or folder is missing, or only this user owns and can write it. Log one
    path of each other folder. ``status`` is ``path.stat()`` if it is known."""
    try:
        status = status or path.stat()
    except OSError:  # reading or writing it will name the error
        return True
    ours = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    folder = path if stat.S_ISDIR(status.st_mode) else path.parent
    if not ours and folder not in _refused:
        _refused.add(folder)
        logger.warning(
            "compiled programs in %s are not used: another user owns it or may write to it "
            "(remove it, or chmod go-w what is yours)",
            path,
        )
    return ours


def make_folder(folder: Path) -> None:
    """Create a folder that nobody else can read, if it is missing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def hold_limit(folders: Sequence[Path], limit: int = LIMIT) -> None:
    """Remove the least recently used files until the others take at most ``limit`` bytes. Several
    processes may do this at once; a process that misses a file compiles again."""
    files = [
        Path(parent, name)
        for folder in filter(is_ours, folders)
        for parent, _, names in os.walk(folder)
        for name in names
    ]
    for path in over_limit(files, limit):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            if path.parent not in folders:
                path.parent.rmdir()  # fails unless it is empty
