"""Puts a converted checkpoint in its place whole or not at all.

Everything is written in a hidden sibling of the destination, ``.NAME.partial``, on the same disk:
``new`` is what will become the destination, and ``old``, on file systems that cannot swap two
names, is what was there before.
"""

import errno
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from griffin_eval.converters.files import lock_folder, writing
from griffin_eval.converters.output.replaceable import holds_checkpoint, is_weights_file, strangers
from griffin_eval.errors import ArgumentError, BadInput
from griffin_eval.json_files import exists
from griffin_eval.messages import listed

_NEW, _OLD = "new", "old"
_JOB = "job"  # a file that version 0.1 wrote there
_AT_FDCWD, _NO_REPLACE, _EXCHANGE = -100, 1, 2  # constants of renameat2(2)


class SafeOutput:
    """A context manager that yields a folder to write into, and on success moves that to
    ``destination``.

    After a kill at any moment the destination is absent, the old one whole, or the new one
    whole, and a rerun clears what was left. Where the file system can swap two names in one step
    (Linux: ext4, XFS, Btrfs, tmpfs), replacing has no gap. Elsewhere (NFS, macOS) two renames
    follow each other; after a kill between them the destination is absent, and the next run with
    the same destination puts the old one back before anything else.

    Args:
        destination: Folder to make. Missing parent folders are made.
        overwrite: Whether to replace an existing destination that is a checkpoint's file, or a
            folder with nothing but a checkpoint's files in it.
        protect: Paths that replacing the destination must not remove, such as the source.

    Raises:
        ArgumentError: the destination exists, or must not be replaced.
        BadInput: another process is writing it, or the system refuses; naming file and reason.
    """

    def __init__(
        self,
        destination: str | Path,
        *,
        overwrite: bool = False,
        protect: Iterable[str | Path] = (),
    ):
        given = Path(os.path.abspath(os.path.expanduser(destination)))
        # Links among the parents are followed once, here, so that later moves are within one disk.
        self.destination = Path(os.path.realpath(given.parent)) / given.name
        if not self.destination.name:
            raise ArgumentError(f"{destination} cannot be an output: name a folder or file in it")
        self._partial = self.destination.parent / f".{self.destination.name}.partial"
        self.path = self._partial / _NEW
        self._overwrite = overwrite
        self._protect = [".", os.path.expanduser("~"), *protect]
        self._lock: int | None = None
        self._moved_old = False

    def __enter__(self) -> Path:
        with writing(self.destination):
            try:
                self._begin()
            except BaseException:
                self._unlock()
                raise
        return self.path

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                with writing(self.destination):
                    self._commit()
        finally:
            try:
                if self._moved_old:
                    with writing(self.destination):
                        self._put_old_back()
                self._discard()
            finally:
                self._unlock()

    def _begin(self) -> None:
        if exists(self._partial, follow_links=False):
            self._acquire()
            self._heal()
        self._check_destination()
        if self._lock is None:
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            self._partial.mkdir(exist_ok=True)
            try:
                self._acquire()
            except OSError:
                with suppress(OSError):  # it may not be empty
                    self._partial.rmdir()
                raise
        try:
            self.path.mkdir()
        except OSError:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise

    def _discard(self) -> None:
        for _ in range(20):  # a thread of a library may still create a file there
            shutil.rmtree(self._partial, ignore_errors=True)
            if not self._partial.exists():
                return
            time.sleep(0.05)

    def _acquire(self) -> None:
        """Lock the partial folder until this process ends, so that two cannot write into it."""
        if self._partial.is_symlink() or not self._partial.is_dir():
            raise ArgumentError(f"{self._partial} is in the way: expected no such file; remove it")
        if strangers := set(os.listdir(self._partial)) - {_NEW, _OLD, _JOB}:
            raise ArgumentError(
                f"{self._partial} holds {min(strangers)!r}, which no conversion wrote: move it away"
            )
        try:
            self._lock = lock_folder(self._partial)
            same = os.path.samestat(os.fstat(self._lock), os.stat(self._partial))
        except (BlockingIOError, FileNotFoundError):
            same = False
        if not same:  # locked, or just removed by the process that locked it
            raise BadInput(f"another process is writing {self.destination}: wait until it ends")

    def _heal(self) -> None:
        """Undo or finish the work of a killed run on the destination."""
        self._put_old_back()
        for name in (_OLD, _NEW, _JOB):
            path = self._partial / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _put_old_back(self) -> None:
        old = self._partial / _OLD
        if exists(old, follow_links=False) and not exists(self.destination, follow_links=False):
            os.rename(old, self.destination)

    def _check_destination(self) -> None:
        to = self.destination
        if not exists(to, follow_links=False):
            return
        if not self._overwrite:
            raise ArgumentError(f"{to} already exists: remove it, name another, or overwrite it")
        if to.is_symlink():
            raise ArgumentError(f"{to} is a link, which is not overwritten: name what it points to")
        kept = [p for p in self._protect if Path(os.path.realpath(p)).is_relative_to(to)]
        if kept:
            raise ArgumentError(f"{to} is not overwritten, since that would remove {kept[0]}")
        if to.is_dir():
            if next(to.iterdir(), None) and not holds_checkpoint(to):
                raise ArgumentError(
                    f"{to} is not overwritten, since it is no checkpoint's folder: name another"
                )
            if others := strangers(to):
                raise ArgumentError(
                    f"{to} is not overwritten, since that would remove what is not part of a "
                    f"checkpoint: {listed(others)}; move it away, or name another folder"
                )
        elif not is_weights_file(to):
            raise ArgumentError(
                f"{to} is not overwritten, since it is no checkpoint's file: name another"
            )

    def _commit(self) -> None:
        _sync_tree(self.path)
        to = self.destination
        if not exists(to, follow_links=False):
            _rename_to_new(self.path, to)
        else:
            self._check_destination()  # something may have appeared there since
            if not _renameat2(self.path, to, _EXCHANGE):
                self._moved_old = True
                os.rename(to, self._partial / _OLD)
                os.rename(self.path, to)
        _sync(to.parent)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_disk(bytes_needed: int, path: str | Path) -> None:
    """Raise BadInput if the disk of a path, which need not exist, has fewer bytes free than are
    needed."""
    there = Path(os.path.abspath(os.path.expanduser(path)))
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if bytes_needed > free:
        raise BadInput(
            f"{path} needs {bytes_needed / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free on its "
            "disk: free some, or name another disk"
        )


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(path: Path) -> None:
    for folder, _, names in os.walk(path):
        for name in names:
            _sync(os.path.join(folder, name))
        _sync(folder)
    if path.is_file():
        _sync(path)


def _rename_to_new(source: Path, to: Path) -> None:
    """Rename a path to a name that must not exist; never replace an existing one."""
    try:
        if not _renameat2(source, to, _NO_REPLACE):
            if exists(to, follow_links=False):
                raise FileExistsError
            os.rename(source, to)
    except FileExistsError:
        raise ArgumentError(f"{to} was created meanwhile: remove it or name another") from None


def _renameat2(source: Path, to: Path, flags: int) -> bool:
    """Call renameat2(2), which Python lacks; False where the system or the disk does not have
    it."""
    import ctypes

    with suppress(AttributeError):
        call = ctypes.CDLL(None, use_errno=True).renameat2
        if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(to), flags) == 0:
            return True
        code = ctypes.get_errno()
        if code not in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
            raise OSError(code, os.strerror(code), str(to))
    return False
