"""Where compiled programs of JAX are kept between processes, and how much of the disk they take.

Evaluation keeps executables (`griffin_eval.runners.compiled_jax`), training and accelerators use
JAX's own cache, which has no limit by itself. Both share one here.

What is kept is run when it is read. So it is used only where nobody else can have written it.
"""

import contextlib
import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from griffin_eval.json_files import over_limit

LIMIT = 1 << 30  # bytes of both folders, 1 GiB

logger = logging.getLogger(__name__)
_refused: set[Path] = set()  # folders of which a warning has been given


def home() -> Path:
    """The folder of everything that is kept, unless the user has chosen another one for JAX."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches, "griffin_eval")


def is_ours(path: Path, found: os.stat_result | None = None) -> bool:
    """Whether a file or folder is missing, or belongs to this user and nobody else can write it.

    Of each folder where that is not so one path is named in the log, once in a process.

    Args:
        found: what the system says of it, if that is known.
    """
    try:
        found = found or path.stat()
    except OSError:  # which reading or writing it will name
        return True
    ours = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    folder = path if stat.S_ISDIR(found.st_mode) else path.parent
    if not ours and folder not in _refused:
        _refused.add(folder)
        logger.warning(
            "compiled programs in %s are not used: another user owns it or may write to it "
            "(remove it, or chmod go-w what is yours)",
            path,
        )
    return ours


def make_folder(folder: Path) -> None:
    """Makes a folder into which nobody else can look, if it is missing.

    Raises:
        OSError: the system refuses.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def hold_limit(folders: Sequence[Path], limit: int = LIMIT) -> None:
    """Remove the files used least recently until the others take at most ``limit`` bytes.

    Several processes may do this at once; one that misses a file compiles again.

    Args:
        folders: Folders in which all files are kept programs.
        limit: Bytes of all their files together.
    """
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
                path.parent.rmdir()  # refused unless it is empty
