"""Loads the tokenizer of a checkpoint."""

from pathlib import Path

from griffin_eval.arguments import is_hub_id
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import exists, read_json
from griffin_eval.messages import first_line
from griffin_eval.text.json_tokenizer import TransformersTokenizer
from griffin_eval.text.sentencepiece_tokenizer import SentencePieceTokenizer
from griffin_eval.text.tokenizer import (
    CONFIG_FILE,
    FILES,
    JSON_FILE,
    MODEL_FILE,
    Tokenizer,
    digest,
)


def load_tokenizer(
    folder: str | Path, *, revision: str | None = None, subfolder: str | None = None
) -> Tokenizer:
    """Return the tokenizer in a folder or on the hub.

    ``folder`` has ``tokenizer.json`` or ``tokenizer.model`` (the former is preferred), or is one of
    these files, or a hub id with a branch, tag or commit. Raises CheckpointError or
    MissingExtraError if it cannot be read.
    """
    path, label = Path(folder).expanduser(), str(folder)
    if exists(path):
        if revision is not None:
            raise CheckpointError(f"revision={revision!r} applies to a hub id, but {path} exists")
        label = path.resolve().name
    else:
        path = _download(str(folder), revision, subfolder)
    path = path / subfolder if subfolder else path
    for file in (path, path / JSON_FILE, path / MODEL_FILE):
        if file.is_file() and (file.name == JSON_FILE or file.suffix == ".model"):
            config = file.parent / CONFIG_FILE
            settings = read_json(config) if config.is_file() else {}
            kind = TransformersTokenizer if file.name == JSON_FILE else SentencePieceTokenizer
            return kind(file, f"{label}@{digest(file)}", settings)
    raise CheckpointError(
        f"{path}: expected {JSON_FILE} or {MODEL_FILE}, found neither; name the folder or hub id "
        "of the tokenizer that the model was trained with (tokenizer=...)"
    )


def _download(repository: str, revision: str | None, subfolder: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    if not is_hub_id(repository) or len(repository) > 96:  # the hub's own limit
        raise CheckpointError(
            f"no such folder: {repository!r}; expected a folder with {JSON_FILE} or {MODEL_FILE}, "
            "or a hub id such as google/recurrentgemma-2b"
        )
    prefix = f"{subfolder}/" if subfolder else ""
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision, allow_patterns=[prefix + file for file in FILES]
            )
        )
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        reason = "it is not in the hub's cache, and the hub cannot be reached"
    except Exception as error:  # the hub's client and its transport raise many kinds of errors
        reason = f"{type(error).__name__}: {first_line(error)}"
    # Raised outside the handlers, so that it has no traceback of the client.
    raise CheckpointError(
        f"the tokenizer {repository!r} is no folder here and could not be downloaded: {reason}; "
        f"name a folder with {JSON_FILE} or {MODEL_FILE} (tokenizer=...)"
    )
