"""Resolves ``pretrained=``: a folder or file here, an object store, or a model on a hub."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from griffin_eval.arguments import is_hub_id
from griffin_eval.converters.adapters.adapter import ADAPTER_FILES
from griffin_eval.converters.configs.huggingface import CONFIG_FILE
from griffin_eval.converters.containers.orbax.find import looks_like_orbax
from griffin_eval.converters.containers.orbax.remote import fetch, is_remote
from griffin_eval.converters.containers.registry import CONTAINERS, any_of
from griffin_eval.converters.containers.safetensors.reader import leads_out
from griffin_eval.converters.source import kaggle
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import exists

FILES = (".pt", ".pth", ".bin", ".ckpt", ".gguf")  # endings of files that are whole checkpoints


def resolve_adapter(adapter: str, revision: str | None = None) -> Path:
    """Return the folder of an adapter, downloaded to huggingface_hub's cache if it is on the
    hub; CheckpointError, with what to do, if there is none."""
    folder = os.path.expanduser(adapter)
    if exists(folder):
        return Path(folder)
    if "/" in adapter and is_hub_id(adapter):
        from griffin_eval.converters.source.hub import download_files

        return download_files(adapter, revision, ADAPTER_FILES)
    raise CheckpointError(
        f"no such folder: {adapter!r}; expected an adapter as peft saves it, or a hub id"
    )


def resolve(pretrained: str, *, revision: str | None = None, subfolder: str | None = None) -> Path:
    """Return the path of a model, downloaded to huggingface_hub's cache if it is on the hub.

    For an Orbax checkpoint in an object store it is a temporary folder without the arrays.

    Args:
        pretrained: Folder, ``.pt`` or ``.gguf`` file, URL of an Orbax checkpoint
            (``gs://bucket/path`` or ``s3://bucket/path``), model of Kaggle
            (``kaggle:owner/model/framework/variation/version``), or hub id
            (``organisation/name``).
        revision: Branch, tag or commit of a hub id.
        subfolder: Folder within it that holds the model; on the hub not needed where only one
            does.

    Raises:
        CheckpointError: no such folder, a file, a revision of a local folder, or a download that
            failed, with what to do.
    """
    if subfolder is not None and leads_out(subfolder):
        raise CheckpointError(f"subfolder={subfolder!r} must be a path within the model's folder")
    if is_remote(pretrained):
        if revision is not None:
            raise CheckpointError(f"revision={revision!r} only applies to a hub id: {pretrained}")
        return fetch(pretrained if subfolder is None else f"{pretrained.rstrip('/')}/{subfolder}")
    if pretrained.startswith(kaggle.PREFIX):
        if revision is not None:
            raise CheckpointError(
                f"revision={revision!r} only applies to a hub id: write the version behind the "
                f"name, {pretrained}/{revision}"
            )
        return _within(kaggle.download(pretrained), subfolder, pretrained)
    expanded = os.path.expanduser(pretrained)  # Path.expanduser raises for an unknown user
    folder, mode = Path(expanded), 0
    try:
        mode = os.stat(expanded).st_mode
    except PermissionError as error:
        raise CheckpointError(f"{pretrained} cannot be read: {error.strerror}") from None
    except (OSError, ValueError):  # nothing there, or no name of a file
        pass
    is_file = stat.S_ISREG(mode) and (folder.suffix in FILES or looks_like_orbax(folder))
    if revision is not None and (is_file or stat.S_ISDIR(mode)):
        kind = "file" if is_file else "folder"
        raise CheckpointError(
            f"revision={revision!r} only applies to a hub id, but {pretrained} is a {kind}"
        )
    if is_file:
        if subfolder is not None:
            raise CheckpointError(
                f"{pretrained} is a file, which has no subfolder {subfolder!r}: leave it out"
            )
        return folder
    if stat.S_ISDIR(mode):
        return _within(folder, subfolder, pretrained)
    if mode:
        if _holds_checkpoint(folder.parent):
            raise CheckpointError(
                f"{pretrained} is a file: expected the folder that holds it, {folder.parent}"
            )
        raise CheckpointError(
            f"{pretrained} is no checkpoint: expected a folder that holds "
            f"{any_of(CONTAINERS.values())}, or a file whose name ends with {', '.join(FILES)}"
        )
    if "/" in pretrained and is_hub_id(pretrained):
        from griffin_eval.converters.source.hub import download

        return download(pretrained, revision, subfolder)
    raise _no_such_folder(pretrained)


def refuse_missing(pretrained: str) -> None:
    """Raise CheckpointError for a name that is neither a path here nor one of a hub or store,
    without a download."""
    if is_remote(pretrained) or pretrained.startswith(kaggle.PREFIX):
        return
    if "/" in pretrained and is_hub_id(pretrained):
        return
    try:
        os.stat(os.path.expanduser(pretrained))
    except FileNotFoundError:
        raise _no_such_folder(pretrained) from None
    except (OSError, ValueError):  # `resolve` says what is wrong
        pass


def _no_such_folder(pretrained: str) -> CheckpointError:
    return CheckpointError(
        f"no such folder: {pretrained!r}; expected an existing folder or a hub id such as "
        "google/recurrentgemma-2b"
    )


def _holds_checkpoint(folder: Path) -> bool:
    """Return whether a folder seems to hold a checkpoint."""
    with suppress(CheckpointError, OSError):  # it may not be looked at
        for kind in CONTAINERS.values():
            lacks_config = kind.needs_config and not (folder / CONFIG_FILE).is_file()
            if kind.looks_like(folder) and not lacks_config:
                return True
    return False


def _within(folder: Path, subfolder: str | None, what: str) -> Path:
    """Return the folder, or the subfolder within it; ``what`` names the source in messages."""
    if subfolder is not None:
        within = folder / subfolder
        if not (exists(within) and within.is_dir()):
            raise CheckpointError(f"{what} has no subfolder {subfolder!r}")
        return within
    return folder
