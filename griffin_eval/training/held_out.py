"""Tests of a run at its checkpoints."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from griffin_eval.analysis.half_lives import gate_values
from griffin_eval.config import GriffinConfig
from griffin_eval.model_jax.griffin import Griffin
from griffin_eval.model_jax.hooks import record_temporal
from griffin_eval.training.recipes import Batch
from griffin_eval.training.step import Params

QUANTILES = (0.05, 0.5, 0.95)
MAX_ANSWERS = 32  # largest number of answers of a row for ``by_answer``
PARTS = ("recurrent_param", "recurrent_gate_weight", "recurrent_gate_bias")  # Λ, W_a and b_a


def held_out_metrics(
    evaluate: Callable, params: Params, batches: list[Batch], window: int
) -> dict[str, Any]:
    """Return loss and accuracies on held-out batches.

    Metrics by window are also given for models without local attention, for comparison.

    Returns:
        ``test_loss``; ``accuracy`` of the scored targets; ``in_view`` and ``out_of_view``, accuracy
        of targets that repeat a token inside and outside the window, if there are any;
        ``sequences``, share of rows without an error; ``by_answer``, accuracy of the first, second,
        … answer, if all rows have the same number up to `MAX_ANSWERS`; and ``by_row``, the loss of
        each row, if all targets have equal weight.
    """
    losses, right = zip(*(evaluate(params, batch) for batch in batches), strict=True)
    weights = [np.asarray(batch.weights) for batch in batches]
    rights = np.concatenate([np.asarray(values) for values in right])
    scored = np.concatenate([batch.scored for batch in batches])
    means = [np.sum(loss) / weight.sum() for loss, weight in zip(losses, weights, strict=True)]
    metrics: dict[str, Any] = {"test_loss": float(np.mean(means))}
    metrics["accuracy"] = _mean(rights[scored]) or 0.0
    distance = np.concatenate([np.asarray(batch.distance) for batch in batches])
    in_view = scored & (distance > 0) & (distance < window)
    out_of_view = scored & (distance >= window)
    for name, chosen in (("in_view", in_view), ("out_of_view", out_of_view)):
        if chosen.any():
            metrics[name] = _mean(rights[chosen])
    rows = scored.any(1)
    if rows.any():
        metrics["sequences"] = float((rights | ~scored)[rows].all(1).mean())
    counts = scored.sum(1)
    if 1 < counts.min() == counts.max() <= MAX_ANSWERS:
        shares = rights[scored].reshape(len(scored), -1).mean(0)
        metrics["by_answer"] = [round(float(share), 4) for share in shares]
    if all((weight == 1).all() for weight in weights):
        rows_of_all, length = np.concatenate([np.asarray(loss) for loss in losses]), scored.shape[1]
        metrics["by_row"] = [round(float(loss), 4) for loss in rows_of_all / length]
    return metrics


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0


def compile_gates(config: GriffinConfig) -> Callable[[Params, Batch], dict[str, Any]]:
    """Return a function that measures the RG-LRUs of a model on a batch.

    For each recurrent layer it returns the 5%, 50% and 95% quantiles: under ``lambda`` of Λ over
    channels, and under ``gate`` of the recurrence gate r_t over channels and tokens.
    """

    @jax.jit
    def inputs(params: Params, tokens: Any) -> list[jax.Array]:
        model = Griffin(config, lambda spec: nnx.Param(params[spec.name]))
        seen = record_temporal(model.model.layers)
        rows, length = tokens.shape
        state = model.init_state(rows, length)
        model.step(tokens, jax.numpy.full(rows, length, jax.numpy.int32), state)
        return [layer["x"] for layer in seen if "x" in layer]

    layers = [i for i, kind in enumerate(config.block_types) if kind == "recurrent"]

    def measure(params: Params, batch: Batch) -> dict[str, Any]:
        quantiles: dict[str, Any] = {"lambda": [], "gate": []}
        for layer, x in zip(layers, inputs(params, batch.tokens), strict=True):
            names = (f"model.layers.{layer}.temporal_block.rg_lru.{part}" for part in PARTS)
            value, weight, bias = (np.asarray(params[name]) for name in names)
            gate = gate_values(np.asarray(x).reshape(-1, x.shape[-1]), weight, bias)
            quantiles["lambda"].append(_quantiles(value))
            quantiles["gate"].append(_quantiles(gate))
        return quantiles

    return measure


def _quantiles(values: np.ndarray) -> list[float]:
    return [round(float(value), 4) for value in np.quantile(values, QUANTILES)]
