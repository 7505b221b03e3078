"""Orbax checkpoints in object stores, ``gs://bucket/path`` and ``s3://bucket/path``.

tensorstore reads and writes the arrays where they are. Everything else of a checkpoint is small:
metadata, config, tokenizer, manifest. It is copied into a temporary folder of this machine, which
stands for the checkpoint wherever a folder is expected; `store_of` says where its arrays are.
"""

import atexit
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from griffin_eval.converters.containers.orbax.find import MANIFEST, MSGPACK, TREE_METADATA
from griffin_eval.converters.containers.safetensors.reader import leads_out
from griffin_eval.errors import ArgumentError, CheckpointError, MissingExtraError
from griffin_eval.json_files import absolute_path
from griffin_eval.messages import DAMAGED

DRIVERS = {"gs": "gcs", "s3": "s3"}  # names of tensorstore's drivers, by URL scheme
_FOLDERS = "GRIFFIN_EVAL_REMOTE_FOLDERS"  # in the environment, so that child processes know them
_SMALL = (".json", ".jinja", ".model", ".txt")
_NAMES = (TREE_METADATA, "_CHECKPOINT_METADATA", "_sharding", MANIFEST, MSGPACK, ".zarray")
_COPY = {"gs": "gcloud storage cp --recursive", "s3": "aws s3 cp --recursive"}
_RETRIES = {"max_retries": 6, "initial_delay": "500ms", "max_delay": "8s"}


def is_remote(path: str | Path) -> bool:
    """Return whether a path is a URL of an object store: ``gs://`` or ``s3://``."""
    return str(path).startswith(tuple(f"{scheme}://" for scheme in DRIVERS))


def store_of(folder: Path) -> dict[str, Any]:
    """Return tensorstore's specification of the key-value store that holds the files of a
    folder."""
    url = url_of(folder)
    return {"driver": "file", "path": f"{absolute_path(folder)}/"} if url is None else _spec(url)


def url_of(folder: Path) -> str | None:
    """Return the URL that a temporary folder stands for; None for any other folder."""
    folder = absolute_path(folder)
    for stage, url in _folders().items():
        if folder.is_relative_to(stage):
            return url + "/".join(folder.relative_to(stage).parts)
    return None


def shown(folder: Path) -> str:
    """Return a folder as messages name it: the URL that it stands for, if any."""
    return (url_of(folder) or str(folder)).rstrip("/")


def context(more: dict[str, Any]) -> dict[str, Any]:
    """Return a specification of tensorstore's context that gives up on a server within a minute."""
    return {"gcs_request_retries": _RETRIES, "s3_request_retries": _RETRIES, **more}


def stand_in(url: str) -> Path:
    """Make an empty temporary folder that stands for a URL until this process ends;
    ArgumentError if the URL names no bucket, or nothing within one."""
    scheme, bucket, path = _parsed(url)
    stage = Path(tempfile.mkdtemp(prefix="griffin-eval-"))
    atexit.register(_remove, stage, os.getpid())
    folder = stage / bucket / path
    folder.mkdir(parents=True)
    os.environ[_FOLDERS] = json.dumps(
        {**{str(f): u for f, u in _folders().items()}, str(folder): f"{scheme}://{bucket}/{path}/"}
    )
    return folder


def fetch(url: str) -> Path:
    """Make a temporary folder with the small files of the Orbax checkpoint at a URL.

    Raises:
        ArgumentError: the URL names no bucket, or nothing within one.
        CheckpointError: no Orbax checkpoint is there, or the store cannot be read.
    """
    store, names = listed_in(url)
    if not any(name.rsplit("/", 1)[-1] in (TREE_METADATA, MANIFEST, MSGPACK) for name in names):
        if not names:
            raise CheckpointError(f"{url} holds nothing: expected an Orbax checkpoint")
        raise CheckpointError(
            f"{url} holds no Orbax checkpoint, the only kind that is read from an object store: "
            f"copy the folder first ({_COPY[url[:2]]} {url} FOLDER)"
        )
    folder = stand_in(url)
    small = [name for name in names if _is_small(name)]
    try:
        for name, read in [(name, store.read(name)) for name in small]:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(read.result().value)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{url} cannot be read: {reason(error)}") from None
    return folder


def listed_in(url: str) -> tuple[Any, list[str]]:
    """Return the key-value store of a URL, and the names of everything in it, relative to it.
    Errors are those of `fetch`."""
    ts = tensorstore()
    scheme, bucket, path = _parsed(url)
    try:
        store = ts.KvStore.open(
            _spec(f"{scheme}://{bucket}/{path}/"), context=ts.Context(context({}))
        ).result()
        keys = store.list().result()
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{url} cannot be read: {reason(error)}") from None
    return store, sorted(inside(key.decode("utf-8", "replace") for key in keys))


def inside(names: Iterable[str]) -> list[str]:
    """Return the names that do not lead out of a folder. (A store takes any text for a name.)"""
    return [name for name in names if name and not leads_out(name)]


def _parsed(url: str) -> tuple[str, str, str]:
    """Return the scheme, bucket and path of a URL."""
    parts = urlsplit(url)
    path = parts.path.strip("/")
    if parts.query or parts.fragment or not parts.netloc or not path or ".." in path.split("/"):
        raise ArgumentError(f"expected {parts.scheme}://bucket/path, found {url!r}")
    return parts.scheme, parts.netloc, path


def _spec(url: str) -> dict[str, Any]:
    scheme, bucket, path = _parsed(url)
    spec: dict[str, Any] = {"driver": DRIVERS[scheme], "bucket": bucket, "path": f"{path}/"}
    if scheme == "s3" and {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= os.environ.keys():
        spec["aws_credentials"] = {"type": "environment"}  # looks for no files, and names none
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if scheme == "s3" and endpoint:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    return spec


def _is_small(name: str) -> bool:
    base = name.rsplit("/", 1)[-1]
    process = re.fullmatch(r"(.*/)?array_metadatas/process_\d+", name)
    return base in _NAMES or base.endswith(_SMALL) or process is not None


def _folders() -> dict[Path, str]:
    return {Path(f): url for f, url in json.loads(os.environ.get(_FOLDERS, "{}")).items()}


def _remove(stage: Path, process: int) -> None:
    if os.getpid() == process:  # not in a fork
        shutil.rmtree(stage, ignore_errors=True)


def tensorstore() -> Any:
    """Return the module, imported when it is needed; MissingExtraError if it is not installed."""
    try:
        import tensorstore as ts
    except ImportError:
        raise MissingExtraError("tensorstore", "jax") from None
    return ts


def reason(error: BaseException) -> str:
    """Return the message of tensorstore in one line, without the specification that it repeats.
    Where an object store answered with an error, its status takes the place of tensorstore's
    word for it, often "Unknown"."""
    text = re.sub(r"\s+", " ", str(error).split(" [", 1)[0])
    text = re.sub(r"^[A-Z_]+: ", "", text)[:500] or type(error).__name__
    status = _status(error)
    if status is None:
        return text
    before, colon, _ = text.rpartition(": ")
    return f"{before}{colon}the store answered {status}"


def advice(*errors: BaseException) -> str:
    """Return the advice that ends a message about data that cannot be read; "" if an object store
    answered every request with an error."""
    return "" if all(map(_status, errors)) else f"; {DAMAGED}"


def _status(error: BaseException) -> str | None:
    """Return the HTTP status (code and phrase) that an error reports, or None."""
    found = re.search(r"http_response_code='(\d{3})'", str(error))
    if found is None:
        return None
    code = int(found[1])
    return f"{code} {HTTPStatus(code).phrase}" if code in set(HTTPStatus) else str(code)
