"""All findings of `experiments.causal_map` about one checkpoint, as JSON has them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.causal_map.pairs import SYMBOLS, Pair, Questions
from experiments.causal_map.patching import (
    ATTENTION,
    Effects,
    components,
    distances_of,
    measure,
    permuted,
)
from experiments.causal_map.withheld import bins, lost_keys, lost_writes
from griffin_eval.analysis import half_lives
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError
from griffin_eval.intervals import Estimate
from griffin_eval.runners.protocol import Runner

SIDES = ("sufficient", "necessary")


def check_answers(name: str, runner: Runner, questions: Questions) -> float:
    """Return the share of the unchanged documents after which the right answer is likelier.

    Raises:
        ArgumentError: The share is not above 1/2, which a model reaches by ignoring the fact.
    """
    effects = measure(runner, questions.pairs, [], [None])
    accuracy = float(np.mean([effects.original < 0, effects.changed > 0]))
    if accuracy <= 0.5:
        raise ArgumentError(
            f"{name} does not answer {questions.name}: the right one of two answers is likelier "
            f"after {accuracy:.0%} of the unchanged documents, as by chance, so that there is no "
            "fact to map; use another --task or shorter documents (--length)"
        )
    return accuracy


def find(
    opened: Checkpoint,
    runner: Runner,
    questions: Questions,
    groups: bool,
    control: bool,
    progress: Callable[[], Any] = lambda: None,
) -> dict[str, Any]:
    """Measure the map of a checkpoint, which ``runner`` has loaded in PyTorch.

    ``groups`` patches halves of the depth, ``control`` measures a second map with the answers of
    other pairs, and ``progress`` is called after each pair.
    """
    config, pairs, symbols = opened.config, questions.pairs, questions.symbols
    parts = components(config, groups=groups)
    distances = distances_of(pairs) if symbols is None else [None]

    def patch(some: Sequence[Pair]) -> Effects:
        effects = measure(runner, some, parts, distances, progress)
        return effects if symbols is None else effects.apart(symbols, SYMBOLS)

    effects = patch(pairs)
    lost = lost_writes(runner, pairs, parts, effects.between)
    window = config.visible_keys if "local_attention" in config.block_types else None
    attention = [part for part in parts if part.kinds == ATTENTION]
    ages = bins(pairs, window) if attention else []
    hidden = lost_keys(runner, pairs, attention, ages, effects.between)
    shares = {side: _cells(effects, getattr(effects, side)) for side in SIDES}
    rows, keys = [], []
    for index, part in enumerate(parts):
        sides = {side: cells[index] for side, cells in shares.items()}
        not_written = _cell(effects.share(lost[:, index]))
        row = {"component": part.label, "kind": part.kinds[0]}
        rows.append(row | sides | {"not_written": not_written})
    for part, cells in zip(attention, _cells(effects, hidden), strict=True):
        bounds = ({"from": low, "to": high - 1} for low, high in ages)
        lost_by_age = [age | {"lost": cell} for age, cell in zip(bounds, cells, strict=True)]
        keys.append({"component": part.label, "ages": lost_by_age})
    facts = {
        "task": questions.name,
        "pairs": len(pairs),
        "answered": int(effects.answered.sum()),
        "window": window,
        "distances": distances if symbols is None else None,
        "symbols": None if symbols is None else list(range(1, SYMBOLS + 1)),
        "components": rows,
        "keys_hidden": keys,
    }
    if control:
        facts["control"] = _control(effects, patch(permuted(pairs)))
    return facts | _gates(opened, runner, pairs[0], distances)


def _control(effects: Effects, permuted_effects: Effects) -> dict[str, Any]:
    """Count the intervals of a second map that exclude 0."""
    cells = [
        cell
        for side in SIDES
        for row in _cells(effects, getattr(permuted_effects, side))
        for cell in row
        if cell is not None and cell["low"] is not None
    ]
    return {
        "cells": len(cells),
        "without_0": sum(not cell["low"] <= 0 <= cell["high"] for cell in cells),
        "largest": max((abs(cell["value"]) for cell in cells), default=0.0),
    }


def _gates(
    opened: Checkpoint, runner: Any, pair: Pair, distances: Sequence[int | None]
) -> dict[str, Any]:
    """Return the half-lives by layer on the first document, and the shares of the fact that its
    gates keep at each distance; both are empty for a model without recurrent layers."""
    if "recurrent" not in opened.config.block_types:
        return {"half_lives": [], "left_by_gates": []}
    loaded: dict[str, Any] = {"framework": "torch", "model": runner.model}
    cuts = [cut for distance in distances if (cut := pair.cut(distance)) is not None]
    lives, left = [], []
    for layer in half_lives.measure(opened, pair.original, **loaded):
        summary = half_lives.summary(layer, None)
        life = _finite(summary["half_life_measured"])
        lives.append({"layer": summary["layer"], "half_life_measured": life})
    for layer, channels in half_lives.left(opened, pair.original, pair.fact_end, cuts, **loaded):
        shares = [
            {"tokens": cut - pair.fact_end} | half_lives.quantiles(channels[:, place])
            for place, cut in enumerate(cuts)
        ]
        left.append({"layer": layer, "left": shares})
    return {"half_lives": lives, "left_by_gates": left}


def _cells(effects: Effects, nats: np.ndarray) -> list[list[dict[str, Any] | None]]:
    """Return the share of each component at each distance, of float64 [P, C, K] nats."""
    return [[_cell(effects.share(column)) for column in part.T] for part in nats.swapaxes(0, 1)]


def _cell(estimate: Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    bounds = {"low": estimate.low, "high": estimate.high}
    return {"value": estimate.value, **_finite(bounds), "pairs": estimate.items}


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    """Replace infinite numbers by None, since JSON has none."""
    return {key: number if math.isfinite(number) else None for key, number in numbers.items()}
