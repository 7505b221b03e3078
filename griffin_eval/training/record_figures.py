"""The figures of recorded training runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from griffin_eval.drawing import panels, save
from griffin_eval.training.figures import STYLES

NAMES = {"griffin": "Griffin", "hawk": "Hawk", "mqa": "MQA Transformer"}
CHANCE = 1 / 14  # of the data symbols of selective copying


def draw_all(records: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draws every figure that the records have the runs for, and returns the paths of the PNGs."""
    runs = [each for each in records if each["name"].startswith("copy/")]
    return [draw_copying(runs, folder)] if runs else []


def draw_copying(records: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Figure 6a: accuracy on selective copying by the step of training.

    Each run has a thin line, which ends where the run did; the run of the median number of steps of
    each model has a thick one. The second panel splits the answers of Griffin and Hawk by whether
    the data symbol is within the reach of Griffin's attention.
    """
    figure, (left, right) = panels(2, 9.5, share_y=True)
    for model, (color, dashes) in STYLES.items():
        runs = [each for each in records if each["settings"]["model"] == model]
        if not runs:
            continue
        by_steps = sorted(runs, key=lambda each: each["last"]["step"])
        median = by_steps[(len(runs) - 1) // 2]
        for each in runs:
            curves = each["curves"]
            width = 2.2 if each is median else 0.8
            label = f"{NAMES[model]} ({_seeds(len(runs))})" if each is median else None
            left.plot(
                curves["step"],
                curves["accuracy"],
                dashes,
                color=color,
                linewidth=width,
                label=label,
            )
        if model == "mqa" or "out_of_view" not in median["curves"]:
            continue
        for name, marker, where in (
            ("in_view", "", "in view"),
            ("out_of_view", "o", "out of view"),
        ):
            right.plot(
                median["curves"]["step"],
                median["curves"][name],
                dashes,
                marker=marker,
                markersize=3,
                color=color,
                label=f"{NAMES[model]}, {where}",
            )
    for axes in (left, right):
        axes.axhline(CHANCE, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_xlabel("step")
        axes.set_ylim(-0.02, 1.02)
        axes.legend(frameon=False, fontsize=9)
    left.set_ylabel("held-out accuracy of the symbols")
    left.set_title("Selective copying, 256 tokens", fontsize=11)
    right.set_title("by the reach of Griffin's window, 128", fontsize=11)
    return save(figure, folder, "selective_copying_training")


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds, median thick"
