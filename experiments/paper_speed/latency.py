"""Section 5.1: the time to sample tokens after a prompt, compared with the byte model's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.paper_speed import predictions
from experiments.paper_speed.byte_model import (
    Rates,
    cache_bound_from,
    compute_bound_from,
    formula_bytes,
    step_costs,
)
from experiments.paper_speed.decoding import Measured, baseline, machine
from experiments.paper_speed.models import DTYPE
from griffin_eval.config import GriffinConfig


def contexts_to_measure(
    models: Mapping[str, GriffinConfig], prompts: Iterable[int], sampled: Iterable[int]
) -> list[int]:
    """Return the contexts whose steps are timed: the ends of prompts and samples, and the full
    window of local attention."""
    window = models["griffin"].visible_keys - 1
    contexts = {*prompts, *(prompt + count for prompt in prompts for count in sampled)}
    return sorted(contexts | ({window} if min(contexts) < window < max(contexts) else set()))


def results(
    measured: Measured, prompts: Sequence[int], sampled: Sequence[int], batches: Sequence[int]
) -> dict[str, Any]:
    """Return the results as in JSON, in seconds, bytes and rates per second."""
    rows = []
    for batch in batches:
        for framework, name in measured.runners():
            for prompt in prompts:
                contexts = np.arange(prompt, prompt + max(sampled))
                key = {"batch": batch, "prompt": prompt, "framework": framework, "model": name}
                rows += _samples(measured, key, contexts, sampled)
    _compare_with_mqa(rows)
    return machine(measured.device) | {
        "dtype": DTYPE,
        "rates": measured.rates._asdict(),
        "latencies": rows,
        "bounds": [
            {"batch": batch, "model": name, "cache_bound_from": cache_bound_from(config, batch)}
            for batch in batches
            for name, config in measured.models.items()
        ],
        "compute_bound_from_batch": {
            name: compute_bound_from(config, measured.rates)
            for name, config in measured.models.items()
        },
        "steps": steps_measured(measured),
        "states": [
            {
                "framework": framework,
                "model": name,
                "tokens": measured.longest,
                "bytes": nbytes,
                "formula_bytes": formula_bytes(measured.models[name], measured.longest),
            }
            for (framework, name), nbytes in measured.state_bytes.items()
        ],
        "predictions": predictions.latencies(),
    }


def _samples(
    measured: Measured, key: dict[str, Any], contexts: np.ndarray, sampled: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a row for each number of sampled tokens."""
    framework, name, batch = key["framework"], key["model"], key["batch"]
    totals = measured.step_seconds(framework, name, batch, contexts).cumsum(1)
    costs = step_costs(measured.models[name], batch, contexts)
    least = costs.seconds(measured.rates).cumsum()
    nbytes = costs.nbytes.cumsum()
    rows = []
    for count in sampled:
        rounds, last = totals[:, count - 1], count - 1
        seconds = float(np.median(rounds))
        rows.append(
            key
            | {
                "sampled": count,
                "seconds": seconds,
                "fastest": float(rounds.min()),
                "slowest": float(rounds.max()),
                "modelled_seconds": float(least[last]),
                "bytes_per_step": float(nbytes[last] / count),
                "bytes_per_second": float(nbytes[last] / seconds),
                "of_bandwidth": float(nbytes[last] / seconds / measured.rates.bandwidth),
            }
        )
    return rows


def steps_measured(measured: Measured) -> list[dict[str, Any]]:
    """Return every measured step, and the byte model's time and bytes for it."""
    rows = []
    for point, seconds in measured.steps.items():
        costs = step_costs(measured.models[point.model], point.batch, np.array([point.context]))
        bytes_alone = Rates(measured.rates.bandwidth, np.inf)
        rows.append(
            point._asdict()
            | {
                "seconds": seconds.tolist(),
                "modelled_seconds": float(costs.seconds(measured.rates)[0]),
                "modelled_by_bytes": float(costs.seconds(bytes_alone)[0]),
            }
        )
    return rows


def _compare_with_mqa(rows: list[dict[str, Any]]) -> None:
    """Add the Transformer's time divided by that of each row."""

    def key(row: dict[str, Any], framework: str) -> tuple:
        return framework, row["batch"], row["prompt"], row["sampled"]

    mqa = {key(row, row["framework"]): row for row in rows if row["model"] == "mqa"}
    for row in rows:
        other = mqa[key(row, baseline(row["framework"]))]
        for kind in ("seconds", "modelled_seconds"):
            row[f"mqa_over_{kind}"] = other[kind] / row[kind]
