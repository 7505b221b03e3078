"""Section 5.2, figure 1(b): tokens per second at the largest batch that fits into memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.paper_speed import predictions
from experiments.paper_speed.byte_model import (
    largest_batches,
    logit_bytes,
    sampling_seconds,
    step_costs,
)
from experiments.paper_speed.decoding import Measured, baseline, machine
from experiments.paper_speed.latency import steps_measured
from experiments.paper_speed.models import DTYPE, ITEMSIZE
from griffin_eval.analysis.cache_sizes import cache_sizes, parameter_bytes
from griffin_eval.config import GriffinConfig


def points_to_measure(
    models: Mapping[str, GriffinConfig], lengths: Sequence[int], memory: int
) -> dict[str, list[tuple[int, int]]]:
    """Return the batches and contexts of each model: its own largest batch and the Transformer's,
    to show the gain of a larger one; both for samples after an empty prompt."""
    window = models["griffin"].visible_keys - 1
    points: dict[str, list[tuple[int, int]]] = {name: [] for name in models}
    for length in lengths:
        batches = largest_batches(models, length, memory)
        contexts = sorted({0, length // 2, length} | ({window} if window < length else set()))
        for name in models:
            for batch in {batches[name], batches["mqa"]}:
                points[name] += [(batch, context) for context in contexts]
    return points


def results(measured: Measured, memory: int, lengths: Sequence[int]) -> dict[str, Any]:
    """Return the results as in JSON, in bytes and rates per second."""
    return machine(measured.device) | {
        "dtype": DTYPE,
        "memory": memory,
        "rates": measured.rates._asdict(),
        "throughputs": [row for n in lengths for row in _of_length(measured, memory, n)],
        "steps": steps_measured(measured),
        "predictions": predictions.throughputs(),
    }


def _of_length(measured: Measured, memory: int, length: int) -> list[dict[str, Any]]:
    batches, contexts = largest_batches(measured.models, length, memory), np.arange(length)
    modelled = {
        name: batch
        * length
        / sampling_seconds(measured.models[name], measured.rates, batch, 0, length)
        for name, batch in batches.items()
    }

    def speeds(framework: str, name: str, batch: int) -> np.ndarray:
        """Return the tokens per second of each round."""
        seconds = measured.step_seconds(framework, name, batch, contexts).sum(1)
        return batch * length / seconds

    rows = []
    for framework, name in measured.runners():
        config, batch = measured.models[name], batches[name]
        rounds = speeds(framework, name, batch)
        speed = float(np.median(rounds))
        at_its_batch = float(np.median(speeds(framework, name, batches["mqa"])))
        mqa = float(np.median(speeds(baseline(framework), "mqa", batches["mqa"])))
        costs = step_costs(config, batch, contexts)
        by_bytes = costs.nbytes.sum() / measured.rates.bandwidth
        by_products = costs.flops.sum() / measured.rates.flops
        rows.append(
            {
                "sampled": length,
                "framework": framework,
                "model": name,
                "batch": batch,
                "weights": parameter_bytes(config, ITEMSIZE),
                "states": batch * cache_sizes(config, length, ITEMSIZE).total,
                "logits": batch * logit_bytes(config),
                "tokens_per_second": speed,
                "slowest": float(rounds.min()),
                "fastest": float(rounds.max()),
                "modelled_tokens_per_second": modelled[name],
                "over_mqa": speed / mqa,
                "over_mqa_at_its_batch": at_its_batch / mqa,
                "modelled_over_mqa": modelled[name] / modelled["mqa"],
                "bound_by": "memory" if by_bytes >= by_products else "products",
            }
        )
    return rows
