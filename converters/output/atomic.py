"""Puts a converted checkpoint in its place whole or not at all, and streams arrays into its files.

Everything is written in a hidden sibling of the destination, ``.NAME.partial``, on the same disk:
``new`` is what will become the destination, and ``old``, on file systems that cannot swap two
names, is what was there before.
"""

import errno
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from griffin_eval.converters.containers.orbax.find import (
    COMMITTED,
    MANIFEST,
    MSGPACK,
    PROCESS,
    STEP_METADATA,
    TREE_METADATA,
    looks_like_orbax,
)
from griffin_eval.converters.files import writing
from griffin_eval.converters.output.manifest import MANIFEST_FILE
from griffin_eval.converters.source.companions import COMPANIONS, TEMPLATES
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
        import fcntl

        if self._partial.is_symlink() or not self._partial.is_dir():
            raise ArgumentError(f"{self._partial} is in the way: expected no such file; remove it")
        if strangers := set(os.listdir(self._partial)) - {_NEW, _OLD, _JOB}:
            raise ArgumentError(
                f"{self._partial} holds {min(strangers)!r}, which no conversion wrote: move it away"
            )
        self._lock = os.open(self._partial, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.path.samestat(os.fstat(self._lock), os.stat(self._partial))
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                return  # a network disk without locks
            if error.errno not in (errno.EWOULDBLOCK, errno.ENOENT):
                raise
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
        raise ArgumentError(f"{to} came into being meanwhile: remove it or name another") from None


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


# Files that only a checkpoint has.
_WEIGHTS = re.compile(
    r"(model|consolidated|adapter_model)([-_.]\d+)?(-of-\d+)?\.safetensors(\.index\.json)?"
    r"|pytorch_model([-_.]\d+)?(-of-\d+)?\.bin(\.index\.json)?|adapter_model\.bin"
    rf"|{re.escape(MANIFEST_FILE)}"
)
# Weights under any other name: one such file is a checkpoint, several are a collection.
_OTHER_WEIGHTS = re.compile(rf".*\.(safetensors|pt|pth|ckpt|gguf)|{MSGPACK}_\d+")
_BESIDE = re.compile(
    r"config\.json|adapter_config\.json|quantize_config\.json|preprocessor_config\.json"
    r"|processor_config\.json|chat_template\.json|vocab\.(json|txt)|merges\.txt"
    r"|(spiece|sentencepiece\.bpe|tokenizer)\.(model|vocab)"
    # The state of a trainer, as transformers and accelerate save it beside weights.
    r"|trainer_state\.json|training_args\.bin|(all|train|eval)_results\.json"
    r"|(optimizer|scheduler|scaler)\.(pt|bin)|rng_state(_\d+)?\.pth|random_states_\d+\.pkl"
    # Pages and settings of a repository on the hub.
    r"|README(_source)?\.md|(LICENSE|LICENCE|NOTICE|USE_POLICY)(\.(md|txt))?"
    r"|\.gitattributes|\.gitignore|\.DS_Store"
)
_ORBAX = re.compile(
    rf"{TREE_METADATA}|{STEP_METADATA}|{re.escape(MANIFEST)}|{MSGPACK}"
    rf"|{re.escape(COMMITTED)}|_sharding|_strings\.json|orbax\.checkpoint"
)
_ITEM_FILES = re.compile(rf"{_ORBAX.pattern}|metadata|metrics")
_DATA, _PROCESSES = re.compile(r"[0-9a-f]{32}"), re.compile(r"process_\d+")
_ARRAY_FILES = re.compile(r"\.zarray|\.zattrs|\.zgroup|zarr\.json|c|\d+(\.\d+)*")
_STEP = re.compile(r"(.*[_-])?\d+")
# First bytes of an archive of torch.save, of its older files and of GGUF.
_MAGIC = (b"PK\x03\x04", b"\x80\x02\x8a\n", b"GGUF")


def is_weights_file(path: Path) -> bool:
    """Return whether a file holds weights, by the ending of its name and its first bytes."""
    if not path.is_file() or not _OTHER_WEIGHTS.fullmatch(path.name):
        return False
    with open(path, "rb") as file:
        start = file.read(9)
    return not start or start.startswith(_MAGIC) or start[8:] == b"{"


def holds_checkpoint(folder: Path) -> bool:
    """Return whether a folder contains weights, Orbax's metadata or a manifest."""
    names = os.listdir(folder)
    return looks_like_orbax(folder) or any(
        _WEIGHTS.fullmatch(name) or _OTHER_WEIGHTS.fullmatch(name) for name in names
    )


def strangers(folder: Path) -> list[str]:
    """Return the names in a folder that are not part of a checkpoint, sorted.

    Files of a checkpoint are those that this package writes, and those that transformers, Orbax,
    torch and the hub's client write beside weights. An unknown folder is returned as one name.
    """
    names, others = [], []
    is_step = os.path.isfile(folder / STEP_METADATA)
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if entry.is_dir():
                names += _in_folder(entry, name, is_step=is_step)
            elif not entry.is_file() and not entry.is_symlink():
                names.append(name)
            elif _OTHER_WEIGHTS.fullmatch(name) and not _is_known(name):
                others.append(name)
            elif not _is_known(name):
                names.append(name)
    return sorted([*names, *others] if len(others) > 1 else names)


def _is_known(name: str) -> bool:
    known = (_WEIGHTS, _BESIDE, _ORBAX)
    return name in COMPANIONS or any(pattern.fullmatch(name) for pattern in known)


def _in_folder(entry: os.DirEntry[str], name: str, *, is_step: bool) -> Iterator[str]:
    """Yield the strangers in a subfolder of a checkpoint, with their paths. ``is_step``: the
    subfolder lies in a step of Orbax, so that it may be an item of any name."""
    path = Path(entry.path)
    if entry.is_symlink():
        yield f"{name}/"
    elif entry.name == "d":
        yield from _other_files(path, name, _DATA)
    elif entry.name == "array_metadatas":
        yield from _other_files(path, name, _PROCESSES)
    elif entry.name == TEMPLATES:
        yield from _other_files(path, name, re.compile(r".*\.jinja"))
    elif entry.name == ".cache":  # written by the hub's client
        yield from (f"{name}/{each}" for each in os.listdir(path) if each != "huggingface")
    else:
        inside = set(os.listdir(path))
        is_item = bool(inside & {TREE_METADATA, MANIFEST}) and not _STEP.fullmatch(entry.name)
        if inside & {".zarray", "zarr.json"}:
            yield from _other_files(path, name, _ARRAY_FILES, folders=re.compile(r"c|\d+"))
        elif is_item or entry.name.startswith(PROCESS) or (is_step and inside):
            with os.scandir(path) as entries:
                for each in entries:
                    if each.is_dir():
                        yield from _in_folder(each, f"{name}/{each.name}", is_step=is_step)
                    elif not _ITEM_FILES.fullmatch(each.name):
                        yield f"{name}/{each.name}"
        else:
            yield f"{name}/"


def _other_files(
    path: Path, name: str, known: re.Pattern[str], folders: re.Pattern[str] | None = None
) -> Iterator[str]:
    """Yield files and subfolders whose names do not match ``known`` and ``folders``."""
    with os.scandir(path) as entries:
        for entry in entries:
            within = f"{name}/{entry.name}"
            if not entry.is_dir(follow_symlinks=False):
                if not known.fullmatch(entry.name):
                    yield within
            elif folders is not None and folders.fullmatch(entry.name):
                yield from _other_files(Path(entry.path), within, known, folders)
            else:
                yield f"{within}/"
