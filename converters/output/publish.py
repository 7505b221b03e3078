"""Uploads an output to the Hugging Face hub."""

import shlex
from pathlib import Path
from typing import Any

from griffin_eval.arguments import is_hub_id
from griffin_eval.errors import ArgumentError, BadInput
from griffin_eval.messages import first_line, listed

_ALWAYS_THERE = ".gitattributes"  # in a repository that was made and never used


def check_repository(repository: str) -> None:
    """Refuse a repository that could not be written, before there is anything to write.

    Raises:
        ArgumentError: no hub id such as ``organisation/name``; the repository holds files.
        BadInput: nobody is logged in, the token or who it belongs to may not write there, or the
            hub cannot be reached.
    """
    if not is_hub_id(repository) or "/" not in repository:
        raise ArgumentError(f"--push-to-hub {repository!r}: expected organisation/name")
    try:
        user, there = _ask(repository)
    except Exception as error:  # the client, its transport and its storage raise many kinds
        raise BadInput(f"{repository} cannot be pushed to: {_reason(error)}") from None
    _check(repository, user, there)


def push(folder: Path, repository: str) -> str:
    """Upload a folder to a repository, which is made, for its owner alone, if it is not there;
    return its address. BadInput, with what to do, if the upload failed."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Converted by griffin-eval"
        )
        return str(url)
    except Exception as error:
        command = shlex.join(["hf", "upload", repository, str(folder), "--private"])
        raise BadInput(
            f"{repository} could not be pushed to: {_reason(error)}; {folder} is whole, and "
            f"this goes on with it: {command}"
        ) from None


def _ask(repository: str) -> tuple[dict[str, Any], list[str]]:
    """Return the hub's facts about the user, and the names of the repository's files."""
    from huggingface_hub import HfApi, errors

    api = HfApi()
    user = api.whoami()
    try:
        info = api.model_info(repository)
    except errors.GatedRepoError:
        raise
    except errors.RepositoryNotFoundError:
        return user, []
    return user, [file.rfilename for file in info.siblings or ()]


def _check(repository: str, user: dict[str, Any], there: list[str]) -> None:
    names = [user["name"], *(organisation["name"] for organisation in user.get("orgs") or ())]
    if repository.split("/")[0] not in names:
        raise BadInput(
            f"{repository} cannot be pushed to: whoever is logged in may write to "
            f"{listed(names)}: name a repository there, or log in as another with 'hf auth login'"
        )
    token = (user.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise BadInput(
            f"{repository} cannot be pushed to: the token may only read: make one that may write, "
            "and run 'hf auth login'"
        )
    if files := [name for name in there if name != _ALWAYS_THERE]:
        raise ArgumentError(
            f"{repository} holds {len(files)} files already ({listed(files)}): name another "
            "repository, or delete that one on its page"
        )


def _reason(error: BaseException) -> str:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.LocalTokenNotFoundError):
        return "nobody is logged in: run 'hf auth login'"
    if status == 401:
        return "the token is not valid (any more): run 'hf auth login', or look at HF_TOKEN"
    if status == 403:
        return "the hub refuses to write there: look at what the token may do"
    return f"{type(error).__name__}: {first_line(error)}"
