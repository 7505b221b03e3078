"""The figures of recorded training runs."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.training_records.text_figures import SIZES, WINDOWS, draw_sizes, draw_windows
from griffin_eval.drawing import BLACK, COLORS, panels, save
from griffin_eval.training.card import NAMES
from griffin_eval.training.figures import STYLES

# Records by the names of their folders: a model and a seed, and what was changed of that run.
SEEDS = re.compile(r"copy/(griffin|hawk|mqa)-\d+")
CHANGED = {
    "rate": "one rate for all",
    "window": "whole window at once",
    "decay": "gates decay too",
    "curriculum": "whole length at once",
    "conv": "wide convolutions",
}
CHANGES = re.compile(rf"copy/(griffin|hawk|mqa)-0-({'|'.join(CHANGED)})")
CHANCE = 1 / 14  # of the data symbols of selective copying


def draw_all(records: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draws every figure that the records have the runs for, and returns the paths of the PNGs."""
    named = {each["name"]: each for each in records}
    copying = [each for name, each in named.items() if SEEDS.fullmatch(name)]
    paths = [draw_copying(copying, folder)] if copying else []
    changed = {name: each for name, each in named.items() if CHANGES.fullmatch(name)}
    if changed and all(f"copy/{each['settings']['model']}-0" in named for each in changed.values()):
        paths.append(draw_changes(named, list(changed.values()), folder))
    windows = [each for name, each in named.items() if WINDOWS.fullmatch(name)]
    if any(each["settings"]["model"] == "mqa" for each in windows):
        paths.append(draw_windows(windows, folder))
    sizes = [each for name, each in named.items() if SIZES.fullmatch(name)]
    if sizes:
        paths.append(draw_sizes(sizes, folder))
    return paths


def draw_changes(
    named: dict[str, dict[str, Any]], changed: Sequence[dict[str, Any]], folder: Path
) -> Path:
    """Accuracy by step of runs that differ from a model's first run in one setting, and of that."""
    models = [m for m in STYLES if any(each["settings"]["model"] == m for each in changed)]
    figure, axes = panels(len(models), 4.75 * len(models), share_y=True)
    last = max(each["last"]["step"] for each in changed)
    for panel, model in zip(axes, models, strict=True):
        mine = [each for each in changed if each["settings"]["model"] == model]
        for each in [named[f"copy/{model}-0"], *mine]:
            change = each["name"].removeprefix(f"copy/{model}-0").removeprefix("-")
            curves = each["curves"]
            count = sum(step <= last for step in curves["step"])
            panel.plot(
                curves["step"][:count],
                curves["accuracy"][:count],
                color=COLORS[list(CHANGED).index(change)] if change else BLACK,
                linewidth=1.2 if change else 2.2,
                label=CHANGED[change] if change else "as above",
            )
        panel.set_title(NAMES[model], fontsize=11)
        panel.set_xlabel("step")
        panel.set_ylim(-0.02, 1.02)
        panel.legend(frameon=False, fontsize=9)
    axes[0].set_ylabel("held-out accuracy of the symbols")
    return save(figure, folder, "selective_copying_changes")


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
