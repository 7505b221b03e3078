"""Access to what lm_eval passes to a task: ``--metadata`` and the arguments of the model."""

import difflib
import functools
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from griffin_eval.arguments import one_visible_keys
from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.source.companions import tokenizer_folder
from griffin_eval.converters.source.resolve import resolve
from griffin_eval.errors import ArgumentError, BadInput, CheckpointError, MissingExtraError
from griffin_eval.model_arguments import CHECKPOINT, parse_arguments
from griffin_eval.text.load import load_tokenizer
from griffin_eval.text.tokenizer import Tokenizer

# Keys that the tasks read. Other keys belong to the model or to tasks of other packages.
KEYS = frozenset(
    "candidates contexts depths document entries first lengths max_tokens memories multiples "
    "needles queries samples seed span symbols targets tokenizer tokens train_length variant "
    "visible_keys window".split()
)

logger = logging.getLogger(__name__)


@functools.lru_cache  # one warning for all tasks of a run
def _warn_of(key: str, near: str) -> None:
    logger.warning("no task of griffin-eval reads %r of --metadata: is %r meant?", key, near)


def warn_of_near_misses(metadata: Mapping[str, Any]) -> None:
    """Warn about keys that resemble a task's key and would have no effect."""
    for key in metadata.keys() - KEYS:
        for near in difflib.get_close_matches(key, KEYS, n=1, cutoff=0.75):
            _warn_of(key, near)


def is_griffin_run() -> bool:
    """Return whether lm_eval runs ``--model griffin``.

    lm_eval passes the arguments of the model to tasks but not its name. The model's module is
    imported only for ``--model griffin``, and before any task is built.
    """
    return "griffin_eval.lm.model" in sys.modules


def tokenizer_of(
    *,
    tokenizer: str | None = None,
    pretrained: str | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    **_: Any,
) -> Tokenizer:
    """Return the tokenizer in which lengths are counted: ``tokenizer``, or the model's own."""
    if tokenizer is None and pretrained is None:
        raise ArgumentError(
            "lengths are counted in tokens, and no model_args name a pretrained= or tokenizer=: "
            """name a tokenizer with --metadata '{"tokenizer": "…"}'"""
        )
    if not isinstance(tokenizer, str | None):
        raise ArgumentError(f"tokenizer must be a path or a hub id, found {tokenizer!r}")
    return _tokenizer(*(v and str(v) for v in (tokenizer, pretrained, revision, subfolder)))


@functools.lru_cache(maxsize=4)  # tasks of a run share one object and its cached tokens
def _tokenizer(
    tokenizer: str | None, pretrained: str | None, revision: str | None, subfolder: str | None
) -> Tokenizer:
    if tokenizer is not None:
        return load_tokenizer(tokenizer)
    if is_griffin_run() or _exists_here(pretrained):
        path = resolve(str(pretrained), revision=revision, subfolder=subfolder)
        return load_tokenizer(tokenizer_folder(path if path.is_dir() else path.parent))
    return load_tokenizer(str(pretrained), revision=revision, subfolder=subfolder)


def config_of(
    *, pretrained: str | None = None, download: bool = False, **metadata: Any
) -> GriffinConfig | None:
    """Return the config of the model's checkpoint, or None for another model family.

    Args:
        pretrained: Path or hub id of the checkpoint.
        download: Whether to fetch a checkpoint that is not on this machine even if lm_eval runs
            another model than griffin.
        metadata: Other arguments of the model; only those in `CHECKPOINT` are read.

    Raises:
        ArgumentError: ``visible_keys`` and ``window`` differ.
        CheckpointError: The checkpoint of ``--model griffin`` cannot be read.
    """
    if pretrained is None or not (download or is_griffin_run() or _exists_here(pretrained)):
        return None
    told = {name: metadata.get(name) for name in (*CHECKPOINT, "window")}
    arguments = parse_arguments(told | {"pretrained": pretrained})
    try:
        path = resolve(
            arguments.pretrained, revision=arguments.revision, subfolder=arguments.subfolder
        )
        checkpoint = Checkpoint(path, arguments.overrides)
    except CheckpointError:
        if is_griffin_run():
            raise
        return None
    checkpoint.close()
    return checkpoint.config


def visible_keys_of(**metadata: Any) -> int | None:
    """Return the number of keys that a local attention query sees, including its own.

    ``visible_keys`` (or ``window``) in the metadata takes precedence over the checkpoint.

    Returns:
        None for a model without local attention, or if its checkpoint cannot be read.

    Raises:
        ArgumentError: ``visible_keys`` and ``window`` differ.
    """
    given = one_visible_keys(metadata.get("visible_keys"), metadata.get("window"))
    if given is not None:
        return given
    try:
        config = config_of(**{**metadata, "download": True})
    except (BadInput, MissingExtraError):
        return None
    return config.visible_keys if config and "local_attention" in config.block_types else None


def _exists_here(pretrained: Any) -> bool:
    return os.path.exists(os.path.expanduser(str(pretrained)))
