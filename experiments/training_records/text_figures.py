"""The figures of recorded runs of the recipe `text`: loss by window, and by training FLOPs."""

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.model_flops import step_flops
from griffin_eval.config import GriffinConfig
from griffin_eval.drawing import panels, save
from griffin_eval.intervals import Estimate, ratio
from griffin_eval.training.card import NAMES
from griffin_eval.training.figures import STYLES
from griffin_eval.training.recipes import recipe_named

# Records by the names of their folders: a model with its window, or its width and learning rate.
WINDOWS = re.compile(r"window/(griffin|local_mqa|mqa)-\d+")
SIZES = re.compile(r"scale/(griffin|hawk|mqa)-(\d+)-\d+")


def bits(record: dict[str, Any], other: dict[str, Any] | None = None) -> Estimate:
    """Bits a byte on the held-out texts, with an interval over their parts.

    Args:
        record: of a run.
        other: of a run whose bits on the same parts are subtracted; None for none.
    """
    values = np.array(record["last"]["by_row"])
    if other is not None:
        values = values - np.array(other["last"]["by_row"])
    parts = range(len(values))
    return ratio((values / math.log(2)).tolist(), [1.0] * len(values), parts)


def config_of(record: dict[str, Any]) -> GriffinConfig:
    """The architecture of a run."""
    stored = record["settings"]["recipe"]
    recipe = dataclasses.replace(
        recipe_named("text"), width=stored["width"], visible_keys=stored["window"]
    )
    return recipe.config(record["settings"]["model"])


def training_flops(record: dict[str, Any]) -> int:
    """Operations of the products of a whole run, attention's among them."""
    length = record["settings"]["recipe"]["length"]
    return step_flops(config_of(record), length, record["last"]["tokens"])


def best_of_each_size(records: Sequence[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    """Of a model's runs of each width that of the lowest loss, by width."""
    best: dict[int, dict[str, Any]] = {}
    for each in records:
        found = SIZES.fullmatch(each["name"])
        if found is None or found[1] != model:
            continue
        width, loss = int(found[2]), each["last"]["test_loss"]
        if width not in best or loss < best[width]["last"]["test_loss"]:
            best[width] = each
    return [best[width] for width in sorted(best)]


def exponent(runs: Sequence[dict[str, Any]]) -> float:
    """The slope of log loss over log FLOPs."""
    x = np.log([training_flops(run) for run in runs])
    y = np.log([run["last"]["test_loss"] for run in runs])
    return float(np.polyfit(x, y, 1)[0])


def draw_windows(records: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Appendix E in small: bits a byte by the window of local attention, on texts of one length,
    above those of the Transformer with global attention, whose run is among the records."""
    (reference,) = (each for each in records if each["settings"]["model"] == "mqa")
    figure, (axes,) = panels(1, 6.0)
    for model in ("griffin", "local_mqa"):
        mine = [each for each in records if each["settings"]["model"] == model]
        mine.sort(key=lambda each: each["settings"]["recipe"]["window"])
        found = [bits(each, reference) for each in mine]
        color, dashes = STYLES[model]
        axes.errorbar(
            [each["settings"]["recipe"]["window"] for each in mine],
            [each.value for each in found],
            [
                [each.value - each.low for each in found],
                [each.high - each.value for each in found],
            ],
            fmt=f"o{dashes}",
            color=color,
            capsize=3,
            label=NAMES[model],
        )
    axes.axhline(0, color=STYLES["mqa"][0], linewidth=1, label=NAMES["mqa"])
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("keys that local attention sees")
    axes.set_ylabel("bits a byte above global attention")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.4, 0.92))  # below the line
    return save(figure, folder, "windows")


def draw_sizes(records: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Figure 1a in small: held-out loss by the FLOPs of training."""
    figure, (axes,) = panels(1, 6.0)
    for model in ("griffin", "hawk", "mqa"):
        runs = best_of_each_size(records, model)
        if not runs:
            continue
        color, dashes = STYLES[model]
        label = NAMES[model]
        if len(runs) > 1:
            label += f", exponent {exponent(runs):.3f}"
        axes.plot(
            [training_flops(run) for run in runs],
            [run["last"]["test_loss"] / math.log(2) for run in runs],
            f"o{dashes}",
            color=color,
            label=label,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs of training")
    axes.set_ylabel("held-out bits a byte")
    axes.yaxis.set_major_formatter("{x:.1f}")
    axes.yaxis.set_minor_formatter("{x:.1f}")
    axes.legend(frameon=False)
    return save(figure, folder, "sizes")
