"""Figures of the recorded training runs."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import MODEL_NAMES
from experiments.training_records.text_runs import (
    SIZES,
    best_of_each_size,
    bits,
    exponent,
    training_flops,
)
from griffin_eval.drawing import (
    GRAY,
    LINE_WIDTH,
    MARKER_SIZE,
    TITLE_SIZE,
    draw_line,
    finish,
    panels,
    save,
)
from griffin_eval.training.figures import STYLES

Records = Sequence[dict[str, Any]]

LINE: dict[str, Any] = {"linewidth": LINE_WIDTH, "markersize": MARKER_SIZE}
# The name of a record is the folder of its run: model, seed or window, and the change if any.
SEEDS = re.compile(r"copy/(griffin|hawk|mqa)-\d+")
CHANGED = {
    "rate": "one rate for all",
    "window": "whole window at once",
    "decay": "gates decay too",
    "curriculum": "whole length at once",
    "conv": "wide convolutions",
}
CHANGES = re.compile(rf"copy/(griffin|hawk|mqa)-0-({'|'.join(CHANGED)})")
WINDOWS = re.compile(r"window/(griffin|local_mqa|mqa)-\d+")
CHANCE = 1 / 14  # accuracy of guessing a data symbol of selective copying


def draw_all(records: Records, folder: Path) -> list[Path]:
    """Draw every figure whose runs are recorded, and return the paths of the PNG files."""
    copying, changed, windows, sizes = (
        [record for record in records if pattern.fullmatch(record["name"])]
        for pattern in (SEEDS, CHANGES, WINDOWS, SIZES)
    )
    paths = [draw_copying(copying, folder)] if copying else []
    unchanged = {
        record["settings"]["model"]: record for record in copying if record["name"].endswith("-0")
    }
    if changed and {record["settings"]["model"] for record in changed} <= unchanged.keys():
        paths.append(draw_changes(unchanged, changed, folder))
    if any(record["settings"]["model"] == "mqa" for record in windows):
        paths.append(draw_windows(windows, folder))
    if sizes:
        paths.append(draw_sizes(sizes, folder))
    return paths


def draw_copying(records: Records, folder: Path) -> Path:
    """Draw figure 6a: accuracy on selective copying by training step.

    Each run has a pale line, which ends with the run; the run with the median number of steps of
    each model has a dark one. The second panel splits the answers of Griffin and Hawk by whether
    the data symbol is within the reach of Griffin's attention.
    """
    figure, (left, right) = panels(2, 8.4, share_y=True)
    for model, (color, dashes) in STYLES.items():
        runs = _of_model(records, model)
        if not runs:
            continue
        median = sorted(runs, key=lambda run: run["last"]["step"])[(len(runs) - 1) // 2]
        count = "one seed" if len(runs) == 1 else f"{len(runs)} seeds, median dark"
        for run in runs:
            alpha, label = (1, f"{MODEL_NAMES[model]} ({count})") if run is median else (0.35, None)
            x, y = run["curves"]["step"], run["curves"]["accuracy"]
            left.plot(x, y, dashes, color=color, linewidth=LINE_WIDTH, alpha=alpha, label=label)
        if model == "mqa" or "out_of_view" not in median["curves"]:
            continue
        style = LINE | {"color": color, "markevery": 0.1}
        for name, marker in (("in_view", ""), ("out_of_view", "o")):
            x, y = median["curves"]["step"], median["curves"][name]
            label = f"{MODEL_NAMES[model]}, {name.replace('_', ' ')}"
            right.plot(x, y, dashes, marker=marker, label=label, **style)
    for axes in (left, right):
        axes.axhline(CHANCE, color=GRAY, linewidth=1, linestyle=":", label="chance")
        axes.set_xlabel("training step")
        axes.set_ylim(-0.02, 1.02)
    left.set_ylabel("held-out accuracy of the symbols")
    left.set_title("all symbols", fontsize=TITLE_SIZE)
    right.set_title("by the reach of Griffin's window of 128 tokens", fontsize=TITLE_SIZE)
    finish(figure, [left, right], folder, "Selective copying of 256 tokens during training")
    return save(figure, folder, "selective_copying_training")


def draw_changes(unchanged: dict[str, dict[str, Any]], changed: Records, folder: Path) -> Path:
    """Draw the accuracy by step of runs that differ from a model's first run in one setting."""
    models = [model for model in STYLES if _of_model(changed, model)]
    figure, axes = panels(len(models), share_y=True)
    last = max(run["last"]["step"] for run in changed)
    for panel, model in zip(axes, models, strict=True):
        for run in [unchanged[model], *_of_model(changed, model)]:
            match, curves = CHANGES.fullmatch(run["name"]), run["curves"]
            count = sum(step <= last for step in curves["step"])
            index = list(CHANGED).index(match[2]) if match else len(CHANGED)
            label = CHANGED[match[2]] if match else "unchanged"
            x, y = curves["step"][:count], curves["accuracy"][:count]
            draw_line(panel, x, y, index, label, markers=False)
        panel.set_title(MODEL_NAMES[model], fontsize=TITLE_SIZE)
        panel.set_xlabel("training step")
        panel.set_ylim(-0.02, 1.02)
    axes[0].set_ylabel("held-out accuracy of the symbols")
    finish(figure, axes, folder, "Selective copying: one setting changed at a time")
    return save(figure, folder, "selective_copying_changes")


def draw_windows(records: Records, folder: Path) -> Path:
    """Draw appendix E on a small scale: bits per byte by the window of local attention, minus those
    of the Transformer with global attention, whose run is among the records."""
    (reference,) = _of_model(records, "mqa")
    figure, (axes,) = panels(1)
    for model in ("griffin", "local_mqa"):
        runs = _of_model(records, model)
        runs.sort(key=lambda run: run["settings"]["recipe"]["window"])
        sizes = [run["settings"]["recipe"]["window"] for run in runs]
        above = [bits(run, reference) for run in runs]
        bars = [[e.value - e.low for e in above], [e.high - e.value for e in above]]
        color, dashes = STYLES[model]
        style: dict[str, Any] = LINE | {
            "fmt": f"o{dashes}",
            "color": color,
            "label": MODEL_NAMES[model],
        }
        axes.errorbar(sizes, [e.value for e in above], bars, **style)
    axes.axhline(0, color=STYLES["mqa"][0], linewidth=1, label=MODEL_NAMES["mqa"])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("attention window, tokens")
    axes.set_ylabel("bits per byte minus those of global attention")
    note = "Bars: 95% confidence intervals; below zero is better than global attention"
    finish(figure, [axes], folder, "Loss by attention window", note)
    return save(figure, folder, "windows")


def draw_sizes(records: Records, folder: Path) -> Path:
    """Draw figure 1a on a small scale: held-out loss by the FLOPs of training."""
    figure, (axes,) = panels(1)
    for model in ("griffin", "hawk", "mqa"):
        runs = best_of_each_size(records, model)
        if not runs:
            continue
        color, dashes = STYLES[model]
        slope = f", exponent {exponent(runs):.3f}" if len(runs) > 1 else ""
        flops = [training_flops(run) for run in runs]
        losses = [run["last"]["test_loss"] / math.log(2) for run in runs]
        label = MODEL_NAMES[model] + slope
        axes.plot(flops, losses, f"o{dashes}", color=color, label=label, **LINE)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs of training")
    axes.set_ylabel("held-out loss, bits per byte")
    axes.yaxis.set_major_formatter("{x:.1f}")
    axes.yaxis.set_minor_formatter("{x:.1f}")
    finish(figure, [axes], folder, "Held-out loss by training compute")
    return save(figure, folder, "sizes")


def _of_model(records: Records, model: str) -> list[dict[str, Any]]:
    return [record for record in records if record["settings"]["model"] == model]
