"""Bits per byte and training FLOPs of the recorded runs of the recipe `text`."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.model_flops import step_flops
from griffin_eval.config import GriffinConfig
from griffin_eval.intervals import Estimate, ratio
from griffin_eval.training.recipes import recipe_named

SIZES = re.compile(r"scale/(griffin|hawk|mqa)-(\d+)-\d+")  # model, width and learning rate


def bits(record: dict[str, Any], reference: dict[str, Any] | None = None) -> Estimate:
    """Return the bits a byte on the held-out texts, with an interval over their parts; those of a
    reference on the same parts are subtracted."""
    values = np.array(record["last"]["by_row"])
    if reference is not None:
        values = values - np.array(reference["last"]["by_row"])
    return ratio((values / math.log(2)).tolist(), [1.0] * len(values), range(len(values)))


def config_of(record: dict[str, Any]) -> GriffinConfig:
    """Return the architecture of a run."""
    settings = record["settings"]
    recipe = dataclasses.replace(
        recipe_named("text"),
        width=settings["recipe"]["width"],
        window=settings["recipe"]["window"],
    )
    return recipe.config(settings["model"])


def training_flops(record: dict[str, Any]) -> int:
    """Return the FLOPs of the matrix products of a whole run, including attention's."""
    length = record["settings"]["recipe"]["length"]
    return step_flops(config_of(record), length, record["last"]["tokens"])


def best_of_each_size(records: Sequence[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    """Return the run with the lowest loss of each width, ordered by width."""
    best: dict[int, dict[str, Any]] = {}
    for record in sorted(records, key=lambda record: -record["last"]["test_loss"]):
        match = SIZES.fullmatch(record["name"])
        if match and match[1] == model:
            best[int(match[2])] = record
    return [best[width] for width in sorted(best)]


def exponent(runs: Sequence[dict[str, Any]]) -> float:
    """Return the slope of log loss over log FLOPs."""
    x = np.log([training_flops(run) for run in runs])
    y = np.log([run["last"]["test_loss"] for run in runs])
    return float(np.polyfit(x, y, 1)[0])
