"""Files: untrusted JSON, folders, atomic writing, and size limits of caches."""

import errno
import fnmatch
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from griffin_eval.errors import CheckpointError
from griffin_eval.messages import DAMAGED

ABANDONED = 3600  # seconds after which a temporary file in a cache counts as abandoned
_MAX_JSON = 100_000_000  # bytes


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or raise CheckpointError."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe or a device may never end
            raise CheckpointError(f"{path} is not a regular file: put a file of JSON in its place")
        if (size := status.st_size) > _MAX_JSON:
            raise ValueError(f"{size} bytes, more than the {_MAX_JSON} that are allowed")
        return parse_json(read_file(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: expected a JSON object, found {error}; {DAMAGED}") from None


def read_file(path: Path) -> bytes:
    """Return the content of a small file, or raise CheckpointError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: its name appears once all its bytes are on the disk. After an
    OSError nothing is left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # Its permissions follow the umask, unlike those of a file from tempfile.
        with unfinished.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def over_limit(files: Iterable[Path], limit: int) -> list[Path]:
    """Return the files to remove from a cache, so that the others take at most ``limit`` bytes.

    The least recently used (read or written) files come first. Files whose names begin with a dot
    are temporary: they do not count, and are returned once abandoned. Links and files that another
    process has removed are skipped.
    """
    finished, removed = [], []
    for path in files:
        try:
            status = path.lstat()
        except OSError:
            continue
        used = max(status.st_atime, status.st_mtime)
        if not stat.S_ISREG(status.st_mode):
            continue
        if not path.name.startswith("."):
            finished.append((used, status.st_size, path))
        elif used < time.time() - ABANDONED:
            removed.append(path)
    total = sum(nbytes for _, nbytes, _ in finished)
    for _, nbytes, path in sorted(finished):
        if total <= limit:
            break
        removed.append(path)
        total -= nbytes
    return removed


def list_folder(path: Path, pattern: str = "*") -> list[str]:
    """Return the sorted names in a folder that match a shell pattern. Unlike ``Path.glob``, this
    raises CheckpointError for an unreadable folder."""
    try:
        return sorted(fnmatch.filter(os.listdir(path), pattern))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def files_within(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, in any order; none if it does not exist.
    Unlike ``Path.rglob``, this raises CheckpointError for an unreadable folder."""

    def refused(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}")

    for parent, _, files in os.walk(folder, onerror=refused):
        yield from (Path(parent, file) for file in files)


def absolute_path(path: str | Path) -> Path:
    """Return the absolute path of a file without ``..``. Other links stay unresolved, so that a
    folder's parent is the one that the user sees."""
    path = Path(path).absolute()
    return Path(os.path.realpath(path)) if ".." in path.parts else path


def exists(path: str | Path, *, follow_links: bool = True) -> bool:
    """Return whether a path exists. Without ``follow_links``, a dangling link exists. Unlike
    ``os.path.exists``, this raises OSError for an inaccessible path."""
    try:
        os.stat(path, follow_symlinks=follow_links)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: not a file name
        return False
    except OSError as error:
        if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP):
            raise
        return False
    return True


def parse_json(text: bytes, parse_int: Callable[[str], int] = int) -> dict[str, Any]:
    """Return the JSON object in UTF-8 text. ``parse_int`` converts the digits of an integer.

    Anything else raises ValueError with a phrase that follows "found".
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = {}
        for key, item in pairs:
            if key in value:
                raise ValueError(f"the key {key!r} twice")
            value[key] = item
        return value

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_int=parse_int)
    except UnicodeDecodeError as error:
        raise ValueError(f"bytes that are not UTF-8, at {error.start}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON, at character {error.pos} ({error.msg})") from None
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if b"\\u" in text and re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False)):
        raise ValueError("half of a surrogate pair, which no text can hold")
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}")
    return value
