"""Downloads of models from Kaggle, where Google publishes RecurrentGemma in DeepMind's formats."""

import re
from pathlib import Path

from griffin_eval.errors import CheckpointError, MissingExtraError
from griffin_eval.messages import first_line

PREFIX = "kaggle:"
_HANDLE = re.compile(r"([A-Za-z0-9_][\w.-]*/){3}[A-Za-z0-9_][\w.-]*(/[1-9][0-9]{0,8})?", re.ASCII)


def download(name: str) -> Path:
    """Return the folder of a model in kagglehub's cache, downloaded if it is not there.

    Args:
        name: ``kaggle:owner/model/framework/variation``, with ``/version`` behind it or without;
            without it, Kaggle is asked for the latest.

    Raises:
        CheckpointError: no such name, or a download that failed, with what to do.
        MissingExtraError: kagglehub is not installed.
    """
    handle = name.removeprefix(PREFIX)
    if not _HANDLE.fullmatch(handle):
        raise CheckpointError(
            f"{name!r} names no model of Kaggle: expected {PREFIX}owner/model/framework/variation "
            f"or that with /version, such as {PREFIX}google/recurrentgemma/flax/2b-it/1"
        )
    try:
        import kagglehub
    except ImportError:
        raise MissingExtraError("kagglehub", "kaggle") from None
    try:
        return Path(kagglehub.model_download(handle))
    except Exception as error:  # its client, its transport and its archives raise many kinds
        raise CheckpointError(f"{name} could not be downloaded: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return (
            "access to it has to be granted: accept its licence on its page, then log in with "
            "kagglehub.login() or KAGGLE_USERNAME and KAGGLE_KEY"
        )
    if status == 404:
        return "Kaggle has no such model, variation or version"
    return (
        f"{type(error).__name__}: {first_line(error)}; with its version (…/1) what is in "
        "kagglehub's cache is found without a network"
    )
