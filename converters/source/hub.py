"""Downloads a checkpoint from the hub: only one of the formats that a repository holds."""

import contextlib
import glob
import hashlib
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath

from griffin_eval.converters.configs.huggingface import CONFIG_FILE
from griffin_eval.converters.containers.container import ContainerKind
from griffin_eval.converters.containers.orbax.find import number_of
from griffin_eval.converters.containers.registry import CONTAINERS, any_of
from griffin_eval.converters.files import reading
from griffin_eval.converters.source.companions import COMPANIONS, TEMPLATES
from griffin_eval.errors import CheckpointError
from griffin_eval.messages import first_line, listed

logger = logging.getLogger(__name__)

_SHA256 = re.compile("[0-9a-f]{64}")
# Endings of configs, manifests, indexes, tokenizers and the card.
_BESIDE = (".json", ".jinja", ".model", "README.md")


def download(repository: str, revision: str | None = None, subfolder: str | None = None) -> Path:
    """Return the folder of a checkpoint in huggingface_hub's cache, downloaded if it is not
    there.

    The repository's files are listed first, and files of the listed commit are fetched. If the
    hub cannot be reached, files that were downloaded before are used.

    Args:
        revision: Branch, tag or commit; by default the repository's default branch.
        subfolder: Folder that holds the checkpoint; by default the root, or the only one that
            holds one.

    Raises:
        CheckpointError: no checkpoint or several in the repository, or a download that failed,
            with what to do.
    """
    what = repository if revision is None else f"{repository} at revision {revision!r}"
    within = "" if subfolder is None else _path(PurePosixPath(subfolder))
    with _sentences(what):
        return _download(repository, revision, within, what)


def download_files(repository: str, revision: str | None, names: Collection[str]) -> Path:
    """Return a folder with files of the root of a repository, of which some may be absent,
    downloaded if they are not in the cache; CheckpointError, with what to do, if that failed."""
    with _sentences(repository):
        return _fetch(repository, revision, names)


@contextlib.contextmanager
def _sentences(what: str) -> Iterator[None]:
    """Turn the many kinds of errors of the hub's client, its transport and its storage into a
    CheckpointError, without a traceback of the client."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        message = f"{what} could not be downloaded: {_reason(error)}"
        raise CheckpointError(message) from None


def choose(files: Iterable[str], within: str, what: str) -> tuple[str, list[str]]:
    """Decide which files of a repository to fetch.

    Args:
        files: Paths of everything in it.
        within: Folder that was asked for; "" looks at the root, then below it.
        what: Name of the repository, for messages.

    Returns:
        The folder of the checkpoint, and the files that it consists of, companions included.

    Raises:
        CheckpointError: there is no checkpoint, or there are several of equal standing.
    """
    folders: dict[str, list[str]] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        folders.setdefault(_path(path.parent), []).append(path.name)
    whole = [kind for kind in CONTAINERS.values() if kind.is_folder]  # with all folders below
    items = {f for f, names in folders.items() if any(kind.recognises(names) for kind in whole)}
    if within and not any(_inside(folder, within) for folder in folders):
        below = sorted(folder for folder in folders if folder)
        raise CheckpointError(
            f"{what} has no subfolder {within!r}: expected one of {listed(below) or 'none'}"
        )
    found: dict[str, ContainerKind] = {}
    for copies in (False, True):  # copies only where there is nothing else
        for folder, names in folders.items():
            recognised = (k for k in CONTAINERS.values() if k.is_copy <= copies)
            kind = next((kind for kind in recognised if kind.recognises(names)), None)
            if kind is not None and _inside(folder, within):
                found[folder] = kind
        if found:
            break
    chosen = within
    if within not in found:
        inner = [f for f in found if any(f != item and _inside(f, item) for item in items)]
        candidates = [folder for folder in found if folder not in inner]
        if not candidates:
            paths = (_path(PurePosixPath(f, n)) for f in folders for n in folders[f])
            there = listed(path for path in paths if _inside(path, within)) or "nothing"
            raise CheckpointError(
                f"{what} holds no checkpoint: expected {any_of(CONTAINERS.values())}, found {there}"
            )
        if len(candidates) > 1:
            options = listed(sorted(candidates), lambda folder: f"subfolder={folder}")
            raise CheckpointError(f"{what} holds several checkpoints; choose one: {options}")
        (chosen,) = candidates
    names, kind = folders[chosen], found[chosen]
    if kind.is_folder:
        wanted = [PurePosixPath(f, n) for f in folders if _inside(f, chosen) for n in folders[f]]
    else:
        weights = kind.weight_files(names, f"{what}, {chosen}" if chosen else what)
        wanted = [PurePosixPath(chosen, n) for n in names if n in weights or n.endswith(_BESIDE)]
        templates = _path(PurePosixPath(chosen, TEMPLATES))
        wanted += [PurePosixPath(templates, n) for n in folders.get(templates, ())]
    if chosen:
        above = _path(PurePosixPath(chosen).parent)
        wanted += [PurePosixPath(above, n) for n in folders.get(above, ()) if n in COMPANIONS]
    for step in (PurePosixPath(chosen), PurePosixPath(chosen).parent):  # an item may be in a step
        run = _path(step.parent)
        if number_of(step.name) is not None and CONFIG_FILE in folders.get(run, ()):
            wanted.append(PurePosixPath(run, CONFIG_FILE))
    return chosen, list(map(_path, wanted))


def hub_sha256(path: Path) -> str | None:
    """Return the hub's SHA-256 of a large file in its cache, which is the cached file's name; None
    for other files."""
    try:
        blob = Path(os.readlink(path))
    except (OSError, ValueError):
        return None
    return blob.name if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name) else None


def check_files(paths: Iterable[Path]) -> None:
    """Raise CheckpointError if a file in the hub's cache is not the hub's, by its SHA-256, or
    cannot be read; other files are not read."""
    for path in paths:
        stated = hub_sha256(path)
        if stated is None:
            continue
        with reading(path), open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != stated:
            raise CheckpointError(
                f"{path} has the SHA-256 {found[:12]}…, and the hub says {stated[:12]}…: the file "
                f"is damaged; remove {path.resolve()} and download it again"
            )


def _download(repository: str, revision: str | None, within: str, what: str) -> Path:
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        info = hub.HfApi().model_info(repository, revision=revision)
    except (errors.RevisionNotFoundError, errors.HFValidationError):
        raise
    except Exception as error:  # the transport's classes differ between versions
        snapshot, files = _cached(repository, revision, error)
        if not isinstance(error, errors.OfflineModeIsEnabled):
            logger.warning("%s is read from the cache: %s", what, _reason(error))
        folder, wanted = choose(files, within, what)
    else:
        folder, wanted = choose([f.rfilename for f in info.siblings or ()], within, what)
        snapshot = _fetch(repository, revision, wanted)  # by name, so that the cache knows it
        if snapshot.name != info.sha:  # the branch has moved since
            snapshot = _fetch(repository, info.sha, wanted)
    if missing := [file for file in wanted if not (snapshot / file).is_file()]:
        raise CheckpointError(
            f"{what} is incomplete in the hub's cache, and the hub cannot be reached: "
            f"{len(missing)} of {len(wanted)} files are missing ({listed(missing)}); download it "
            "again with a network"
        )
    return snapshot / folder


def _fetch(repository: str, revision: str | None, files: Iterable[str]) -> Path:
    import huggingface_hub as hub
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs | {"disable": None})  # shown on a terminal only

    exactly = [glob.escape(file) for file in files]
    return Path(
        hub.snapshot_download(repository, revision=revision, allow_patterns=exactly, tqdm_class=Bar)
    )


def _cached(repository: str, revision: str | None, error: Exception) -> tuple[Path, list[str]]:
    """Return the cached snapshot and the names of its repository's files; raise ``error``, or an
    error caused by it, if nothing is cached."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        snapshot = Path(
            hub.snapshot_download(  # only find its folder
                repository, revision=revision, local_files_only=True, ignore_patterns=["*"]
            )
        )
    except errors.LocalEntryNotFoundError as absent:
        if isinstance(error, errors.HfHubHTTPError):
            raise error from None
        raise absent from error
    if hasattr(hub, "get_cached_repo_tree"):  # older clients keep no tree
        with contextlib.suppress(errors.CachedRepoTreeNotFoundError):  # partial download
            tree = hub.get_cached_repo_tree(repository, revision=revision)
            return snapshot, [file.path for file in tree]
    paths = (path.relative_to(snapshot) for path in snapshot.rglob("*") if path.is_file())
    return snapshot, [path.as_posix() for path in paths]


def _inside(path: str, folder: str) -> bool:
    return not folder or path == folder or path.startswith(f"{folder}/")


def _path(path: PurePosixPath) -> str:
    return "" if path == PurePosixPath() else str(path)


def _reason(error: BaseException) -> str:
    from huggingface_hub import errors

    said = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, errors.GatedRepoError):
        return "access to it has to be granted: ask for it on its page, then run 'hf auth login'"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such model, here or on the hub, or it is private: run 'hf auth login'"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the model has no such branch, tag or commit"
    if isinstance(error, errors.LocalEntryNotFoundError):
        cause = error.__cause__ or error
        return (
            "it is no folder, it is not in the hub's cache, and the hub cannot be reached "
            f"({type(cause).__name__}: {first_line(cause)})"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return f"the hub refused, {said}"
    if isinstance(error, errors.HFValidationError):
        return f"it is no hub id ({said})"
    return f"{said}; run the command again: what has arrived is kept"
