"""Trained checkpoints that ship with the package, each a folder with a model card (README.md)."""

from pathlib import Path
from typing import Any

from griffin_eval.errors import ArgumentError
from griffin_eval.messages import did_you_mean


def names() -> list[str]:
    """Return the names of the checkpoints that ship."""
    return sorted(card.parent.name for card in Path(__file__).parent.glob("*/README.md"))


def folder(name: str) -> Path:
    """Return the folder of a checkpoint, for ``pretrained=``.

    Raises:
        ArgumentError: no checkpoint has this name.
    """
    if name not in names():
        raise ArgumentError(
            f"unknown shipped checkpoint {name!r}: expected one of {', '.join(names())}"
            f"{did_you_mean(name, names())}"
        )
    return Path(__file__).parent / name


def scores(name: str) -> list[dict[str, Any]]:
    """Return the scores on a checkpoint's card: ``task``, ``metadata``, ``metric`` and ``value``.

    Raises:
        ArgumentError: no checkpoint has this name.
    """
    from huggingface_hub import ModelCard

    data: Any = ModelCard.load(folder(name) / "README.md").data
    return [
        {
            "task": result.dataset_type,
            "metadata": result.dataset_args,
            "metric": result.metric_type,
            "value": result.metric_value,
        }
        for result in data.eval_results or []
    ]
