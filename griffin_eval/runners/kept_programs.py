"""Where compiled programs of JAX are kept between processes, and how much of the disk they take.

Evaluation keeps executables (`griffin_eval.runners.compiled_jax`), training and accelerators use
JAX's own cache, which has no limit by itself. Both share one here.
"""

import contextlib
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

LIMIT = 1 << 30  # bytes of both folders, 1 GiB
ABANDONED = 3600  # seconds after which an unfinished file is nobody's


class _Kept(NamedTuple):
    used: float
    nbytes: int
    path: Path


def home() -> Path:
    """The folder of everything that is kept, unless the user has chosen another one for JAX."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(caches, "griffin_eval")


def hold_limit(folders: Sequence[Path], limit: int = LIMIT) -> None:
    """Removes the files used least recently until the others take at most ``limit`` bytes.

    A file was used when it was last read, or made where the file system does not note that.
    Several processes may do this at once; one that misses a file compiles again.

    Args:
        folders: in which all files are kept programs.
        limit: in bytes.
    """
    kept = sorted((each for folder in folders for each in _files(folder)), reverse=True)
    total = 0
    for used, nbytes, path in kept:
        total += nbytes
        unfinished = path.name.startswith(".") and used < time.time() - ABANDONED
        if total > limit or unfinished:
            with contextlib.suppress(OSError):
                path.unlink()


def _files(folder: Path) -> list[_Kept]:
    found = []
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            with contextlib.suppress(OSError):  # another process was faster
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    used = max(status.st_atime, status.st_mtime)
                    found.append(_Kept(used, status.st_size, path))
    return found
