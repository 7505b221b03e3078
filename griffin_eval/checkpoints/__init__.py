"""Trained checkpoints that ship with the package, each a folder with a model card, README.md."""

from pathlib import Path
from typing import Any

from griffin_eval.errors import ArgumentError
from griffin_eval.hints import nearest


def names() -> list[str]:
    """Of all that ship."""
    return sorted(card.parent.name for card in Path(__file__).parent.glob("*/README.md"))


def folder(name: str) -> Path:
    """Where a checkpoint is, for ``pretrained=``.

    Raises:
        ArgumentError: there is none of this name.
    """
    if name not in names():
        raise ArgumentError(
            f"no checkpoint {name!r} ships: expected one of {', '.join(names())}"
            f"{nearest(name, names())}"
        )
    return Path(__file__).parent / name


def scores(name: str) -> list[dict[str, Any]]:
    """What the card says was measured: ``task``, ``metadata``, ``metric`` and ``value`` of each."""
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
