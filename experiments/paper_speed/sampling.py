"""Latency and throughput of sampling (sections 5.1 and 5.2), beside the byte model's."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.paper_speed.byte_model import (
    Rates,
    cache_bound_from,
    compute_bound_from,
    formula_bytes,
    largest_batches,
    sampling_seconds,
    step_costs,
)
from experiments.paper_speed.decoding import Measured, baseline, machine
from experiments.paper_speed.models import DTYPE
from griffin_eval.config import GriffinConfig

Models = Mapping[str, GriffinConfig]


def latency_contexts(models: Models, prompts: Iterable[int], sampled: Iterable[int]) -> list[int]:
    """Return the contexts whose steps are timed: the ends of prompts and samples, and the full
    window of local attention."""
    contexts = {*prompts, *(prompt + count for prompt in prompts for count in sampled)}
    return _with_window(models, contexts)


def _with_window(models: Models, contexts: set[int]) -> list[int]:
    window = models["griffin"].visible_keys - 1
    return sorted(contexts | ({window} if min(contexts) < window < max(contexts) else set()))


def latency_results(
    measured: Measured, prompts: Sequence[int], sampled: Sequence[int], batches: Sequence[int]
) -> dict[str, Any]:
    """Return the results of steps at all `latency_contexts` as JSON has them, in seconds."""
    rows = []
    for batch in batches:
        for framework, name in measured.runners():
            for prompt in prompts:
                contexts = np.arange(prompt, prompt + max(sampled))
                totals = measured.step_seconds(framework, name, batch, contexts).cumsum(1)
                costs = step_costs(measured.models[name], batch, contexts)
                least = costs.seconds(measured.rates).cumsum()
                rows += [
                    {
                        "batch": batch,
                        "prompt": prompt,
                        "sampled": count,
                        "model": name,
                        "framework": framework,
                        "seconds": totals[:, count - 1].tolist(),
                        "modelled_seconds": float(least[count - 1]),
                    }
                    for count in sampled
                ]

    def place(row: dict[str, Any]) -> tuple[int, int, int]:
        return row["batch"], row["prompt"], row["sampled"]

    mqa = {(row["framework"], *place(row)): row for row in rows if row["model"] == "mqa"}
    for row in rows:
        other = mqa[baseline(row["framework"]), *place(row)]
        for kind in ("seconds", "modelled_seconds"):
            row[f"mqa_over_{kind}"] = float(np.median(other[kind]) / np.median(row[kind]))
    models = measured.models.items()
    return _common(measured) | {
        "latencies": rows,
        "bounds": [
            {"batch": batch, "model": name, "cache_bound_from": cache_bound_from(config, batch)}
            for batch in batches
            for name, config in models
        ],
        "compute_bound_from_batch": {
            name: compute_bound_from(config, measured.rates) for name, config in models
        },
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
    }


def throughput_points(
    models: Models, lengths: Sequence[int], memory: int
) -> dict[str, list[tuple[int, int]]]:
    """Return the batches and contexts of each model: its own largest batch and the Transformer's,
    which shows the gain of a larger one; both for samples after an empty prompt."""
    points: dict[str, list[tuple[int, int]]] = {name: [] for name in models}
    for length in lengths:
        batches = largest_batches(models, length, memory)
        contexts = _with_window(models, {0, length // 2, length})
        for name in models:
            for batch in {batches[name], batches["mqa"]}:
                points[name] += [(batch, context) for context in contexts]
    return points


def throughput_results(measured: Measured, memory: int, lengths: Sequence[int]) -> dict[str, Any]:
    """Return the results of steps at all `throughput_points` as JSON has them, in tokens/s."""
    rows = [row for length in lengths for row in _throughputs(measured, memory, length)]
    return _common(measured) | {"memory": memory, "throughputs": rows}


def _throughputs(measured: Measured, memory: int, length: int) -> list[dict[str, Any]]:
    batches, contexts = largest_batches(measured.models, length, memory), np.arange(length)
    modelled = {
        name: batch * length / sampling_seconds(config, measured.rates, batch, 0, length)
        for (name, config), batch in zip(measured.models.items(), batches.values(), strict=True)
    }

    def speeds(framework: str, name: str, batch: int) -> np.ndarray:
        """Return the tokens per second of each round."""
        seconds = measured.step_seconds(framework, name, batch, contexts).sum(1)
        return batch * length / seconds

    rows = []
    for framework, name in measured.runners():
        rounds = speeds(framework, name, batches[name])
        at_its_batch = np.median(speeds(framework, name, batches["mqa"]))
        mqa = np.median(speeds(baseline(framework), "mqa", batches["mqa"]))
        rows.append(
            {
                "sampled": length,
                "model": name,
                "framework": framework,
                "batch": batches[name],
                "tokens_per_second": rounds.tolist(),
                "modelled_tokens_per_second": modelled[name],
                "over_mqa": float(np.median(rounds) / mqa),
                "over_mqa_at_its_batch": float(at_its_batch / mqa),
                "modelled_over_mqa": modelled[name] / modelled["mqa"],
            }
        )
    return rows


def _common(measured: Measured) -> dict[str, Any]:
    """Return the machine, its rates, and every step beside its time by the byte model."""
    bytes_alone, steps = Rates(measured.rates.bandwidth, np.inf), []
    for point, seconds in measured.steps.items():
        costs = step_costs(measured.models[point.model], point.batch, np.array([point.context]))
        steps.append(
            point._asdict()
            | {
                "seconds": seconds.tolist(),
                "modelled_seconds": float(costs.seconds(measured.rates)[0]),
                "modelled_by_bytes": float(costs.seconds(bytes_alone)[0]),
            }
        )
    rates = measured.rates._asdict()
    return machine(measured.device) | {"dtype": DTYPE, "rates": rates, "steps": steps}
