"""All findings of `experiments.causal_map` on one checkpoint, as in JSON."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.causal_map.pairs import SYMBOLS, Pair, Questions
from experiments.causal_map.patching import (
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
    """Measure the map of a checkpoint; ``control`` adds one with the answers of other pairs."""
    config, pairs, symbols = opened.config, questions.pairs, questions.symbols
    parts = components(config, groups=groups)
    distances = distances_of(pairs) if symbols is None else [None]

    def patch(some: Sequence[Pair]) -> Effects:
        effects = measure(runner, some, parts, distances, progress)
        return effects if symbols is None else effects.apart(symbols, SYMBOLS)

    effects = patch(pairs)
    lost = lost_writes(runner, pairs, parts, effects.between)
    window = config.visible_keys if "local_attention" in config.block_types else None
    attention = [part for part in parts if part.kinds == ("attention",)]
    ages = bins(pairs, window) if attention else []
    hidden = lost_keys(runner, pairs, attention, ages, effects.between)
    shares = {side: _cells(effects, getattr(effects, side)) for side in SIDES}
    facts = {
        "task": questions.name,
        "pairs": len(pairs),
        "answered": int(effects.answered.sum()),
        "window": window,
        "distances": distances if symbols is None else None,
        "symbols": None if symbols is None else list(range(1, SYMBOLS + 1)),
        "components": [
            {"component": part.label, "kind": part.kinds[0]}
            | {side: shares[side][index] for side in SIDES}
            | {"not_written": _cell(effects.share(lost[:, index]))}
            for index, part in enumerate(parts)
        ],
        "keys_hidden": [
            {
                "component": part.label,
                "ages": [
                    {"from": low, "to": high - 1}
                    | {"lost": _cell(effects.share(hidden[:, index, place]))}
                    for place, (low, high) in enumerate(ages)
                ],
            }
            for index, part in enumerate(attention)
        ],
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
    lives = [
        half_lives.summary(layer, None)
        for layer in half_lives.measure(opened, pair.original, **loaded)
    ]
    left = half_lives.left(opened, pair.original, pair.fact_end, cuts, **loaded)
    return {
        "half_lives": [
            {"layer": layer["layer"], "half_life_measured": _finite(layer["half_life_measured"])}
            for layer in lives
        ],
        "left_by_gates": [
            {
                "layer": layer,
                "left": [
                    {"tokens": cut - pair.fact_end} | half_lives.quantiles(channels[:, place])
                    for place, cut in enumerate(cuts)
                ],
            }
            for layer, channels in left
        ],
    }


def _cells(effects: Effects, nats: np.ndarray) -> list[list[dict[str, Any] | None]]:
    """Return the share of each component at each distance, of float64 [P, C, K] nats."""
    _, parts, columns = nats.shape
    return [
        [_cell(effects.share(nats[:, part, column])) for column in range(columns)]
        for part in range(parts)
    ]


def _cell(estimate: Estimate | None) -> dict[str, Any] | None:
    if estimate is None:
        return None
    bounds = {"low": estimate.low, "high": estimate.high}
    return {"value": estimate.value, **_finite(bounds), "pairs": estimate.items}


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    """Replace infinite numbers by None, since JSON has none."""
    return {key: number if math.isfinite(number) else None for key, number in numbers.items()}
