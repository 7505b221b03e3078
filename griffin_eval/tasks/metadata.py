"""What lm_eval passes to a task: its metadata, and with them the arguments of the model."""

import functools
import os
import sys
from typing import Any

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint, Overrides
from griffin_eval.converters.resolve import resolve, tokenizer_folder
from griffin_eval.errors import ArgumentError, BadInput, CheckpointError, MissingExtraError
from griffin_eval.tokenizer import Tokenizer, load_tokenizer


def is_integer(value: Any) -> bool:
    """Whether it is one, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def integers(task: str, least: int = 1, **given: Any) -> None:
    """Checks metadata.

    Raises:
        ArgumentError: one is neither an integer of at least ``least`` nor a list of such.
    """
    for name, value in given.items():
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if not numbers or not all(is_integer(n) and n >= least for n in numbers):
            kind = "integers" if numbers is value else "an integer"
            raise ArgumentError(
                f"{task}: {name} must be {kind} of at least {least}, found {value!r}"
            )


def ordered(numbers: Any) -> list[int]:
    """A number, or each of several once, in order."""
    return sorted(set(numbers) if isinstance(numbers, (list, tuple)) else {numbers})


def is_ours() -> bool:
    """Whether lm_eval runs ``--model griffin``, for which alone it imports that module."""
    return "griffin_eval.lm" in sys.modules


def tokenizer_of(
    tokenizer: str | None = None,
    pretrained: str | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    **_: Any,
) -> Tokenizer:
    """The tokenizer in which lengths are counted: one that is named, else the model's own.

    Args:
        tokenizer: folder or hub id, from ``--metadata`` or the arguments of the model.
        pretrained, revision, subfolder: arguments of the model.

    Raises:
        ArgumentError: neither is given.
    """
    if tokenizer is None and pretrained is None:
        raise ArgumentError(
            "lengths are counted in tokens, and no model_args name a pretrained= or tokenizer=: "
            """name a tokenizer with --metadata '{"tokenizer": "…"}'"""
        )
    return _tokenizer(*(v and str(v) for v in (tokenizer, pretrained, revision, subfolder)))


@functools.lru_cache(maxsize=4)  # by which the tasks of a run share what they have tokenised
def _tokenizer(
    tokenizer: str | None, pretrained: str | None, revision: str | None, subfolder: str | None
) -> Tokenizer:
    if tokenizer is not None:
        return load_tokenizer(tokenizer)
    if is_ours() or _is_here(pretrained):
        path = resolve(str(pretrained), revision=revision, subfolder=subfolder)
        return load_tokenizer(tokenizer_folder(path if path.is_dir() else path.parent))
    return load_tokenizer(str(pretrained), revision=revision, subfolder=subfolder)


def config_of(
    pretrained: str | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    preset: str | None = None,
    item: str | None = None,
    window: int | None = None,
    embedding_scale: bool | None = None,
    logits_soft_cap: float | None = None,
    names: str | None = None,
    *,
    download: bool = False,
    **_: Any,
) -> GriffinConfig | None:
    """The architecture, from the arguments of the model; None if they name nothing of the Griffin
    family. Of a model that is not run as one, a checkpoint that is not on this machine is read only
    if ``download`` says so."""
    if pretrained is None or not (download or is_ours() or _is_here(pretrained)):
        return None
    overrides = Overrides(preset, item, window, embedding_scale, logits_soft_cap, names)
    try:
        checkpoint = Checkpoint(
            resolve(str(pretrained), revision=revision, subfolder=subfolder), overrides
        )
    except CheckpointError:
        if is_ours():
            raise
        return None
    checkpoint.close()
    return checkpoint.config


def window_of(window: int | None = None, **model: Any) -> int | None:
    """How many keys a query of local attention sees, itself included: what is given, else what the
    checkpoint says. None where there is no such attention, or nothing that can be read."""
    if window is not None:
        return window
    try:
        config = config_of(**{**model, "download": True})
    except (BadInput, MissingExtraError):
        return None
    return config.visible_keys if config and "local_attention" in config.block_types else None


def _is_here(pretrained: Any) -> bool:
    return os.path.exists(os.path.expanduser(str(pretrained)))
