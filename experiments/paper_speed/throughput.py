"""Section 5.2, figure 1(b): tokens per second at the largest batch that fits into memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.paper_speed import predictions
from experiments.paper_speed.byte_model import largest_batch, sampling_seconds, step_costs
from experiments.paper_speed.decoding import PEER, Measured
from experiments.paper_speed.latency import steps_measured
from experiments.paper_speed.models import DTYPE, ITEMSIZE
from griffin_eval.analysis.cache_sizes import cache_sizes, parameter_bytes
from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError


def row_bytes(config: GriffinConfig) -> int:
    """Bytes that a row works with beside its cache: its logits in float32."""
    return 4 * config.vocab_size


def largest_batches(
    models: Mapping[str, GriffinConfig], length: int, memory: int
) -> dict[str, int]:
    """The most rows of each model that fit into memory at their end.

    Args:
        models: configs by name.
        length: tokens of a row.
        memory: bytes for parameters, caches and logits.

    Raises:
        ArgumentError: a model does not fit with a single row.
    """
    batches = {
        name: largest_batch(config, length, memory, ITEMSIZE, row_bytes(config))
        for name, config in models.items()
    }
    for name, batch in batches.items():
        if not batch:
            config = models[name]
            needed = parameter_bytes(config, ITEMSIZE) + row_bytes(config)
            needed += cache_sizes(config, length, ITEMSIZE).total
            raise ArgumentError(
                f"--memory {memory / 1e6:.0f}MB is too little for {name} and one row of {length} "
                f"tokens: expected at least {needed / 1e6:.0f}MB"
            )
    return batches


def contexts_to_measure(models: Mapping[str, GriffinConfig], length: int) -> list[int]:
    """The contexts whose steps are timed for samples of this length behind an empty prompt."""
    window = models["griffin"].visible_keys - 1
    return sorted({0, length // 2, length} | ({window} if window < length else set()))


def batches_to_measure(batches: Mapping[str, int], name: str) -> set[int]:
    """A model's own largest batch, and the Transformer's, which tells what a larger one brings."""
    return {batches[name], batches["mqa"]}


def results(measured: Measured, memory: int, sampled: Sequence[int]) -> dict[str, Any]:
    """What was found, as it is written in JSON. Sizes are in bytes, rates per second.

    Args:
        measured: all `contexts_to_measure` for the `batches_to_measure` of all lengths.
        memory: bytes for parameters, caches and logits.
        sampled: numbers of tokens, behind an empty prompt.
    """
    rows = []
    for length in sampled:
        batches = largest_batches(measured.models, length, memory)
        speeds: dict[tuple[str, str, int], np.ndarray] = {}
        for framework, name in measured.runners():
            for batch in batches_to_measure(batches, name):
                totals = measured.step_seconds(framework, name, batch, np.arange(length)).sum(1)
                speeds[framework, name, batch] = batch * length / totals
        modelled = {
            name: batch
            * length
            / sampling_seconds(measured.models[name], measured.rates, batch, 0, length)
            for name, batch in batches.items()
        }
        for framework, name in measured.runners():
            config, batch = measured.models[name], batches[name]
            baseline = "torch" if framework == PEER else framework
            mqa = float(np.median(speeds[baseline, "mqa", batches["mqa"]]))
            speed = speeds[framework, name, batch]
            costs = step_costs(config, batch, np.arange(length))
            nbytes = float(costs.nbytes.mean())
            by_bytes = costs.nbytes.sum() / measured.rates.bandwidth
            rows.append(
                {
                    "sampled": length,
                    "framework": framework,
                    "model": name,
                    "batch": batch,
                    "weights": parameter_bytes(config, ITEMSIZE),
                    "states": batch * cache_sizes(config, length, ITEMSIZE).total,
                    "logits": batch * row_bytes(config),
                    "tokens_per_second": float(np.median(speed)),
                    "slowest": float(speed.min()),
                    "fastest": float(speed.max()),
                    "modelled_tokens_per_second": modelled[name],
                    "over_mqa": float(np.median(speed)) / mqa,
                    "over_mqa_at_its_batch": float(
                        np.median(speeds[framework, name, batches["mqa"]])
                    )
                    / mqa,
                    "modelled_over_mqa": modelled[name] / modelled["mqa"],
                    "bandwidth": nbytes * float(np.median(speed)) / batch,
                    "flops": float(costs.flops.mean()) * float(np.median(speed)) / batch,
                    "bound_by": "memory"
                    if by_bytes >= costs.flops.sum() / measured.rates.flops
                    else "products",
                }
            )
    return {
        "device": measured.device,
        "threads": measured.threads,
        "dtype": DTYPE,
        "memory": memory,
        "rates": measured.rates._asdict(),
        "throughputs": rows,
        "steps": steps_measured(measured),
        "absent": measured.absent,
        "predictions": predictions.throughputs(),
    }
