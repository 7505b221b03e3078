"""Half-lives of a checkpoint's RG-LRU channels.

A step multiplies the state of a channel by a_t, with log a_t = -c softplus(Λ) r_t, so that a share
of exp(Σ log a_t) is left after n steps. Half of it is left after

    ln 2 / (c softplus(Λ) r)   tokens

where c is 8 in all published models, and r is the mean of the recurrence gate r_t, which depends on
the text. r = 1 gives the shortest half-life for a Λ; r = 0.5 is typical of untrained gates; a
closed gate (r near 0) keeps the state while it stays closed. A measured half-life takes the mean of
r_t over a text without its first token, whose gate acts on an empty state.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.converters.checkpoint import Checkpoint, warn_not_finite

CHUNK = 512  # tokens of one step
BINS = 50  # bins of the histogram of r_t, from 0 to 1
QUANTILES = (0.05, 0.5, 0.95)  # quantiles over the channels of a layer


class ChannelDecay(NamedTuple):
    """The decay rates of the channels of one recurrent block.

    Attributes:
        number: Index of the layer in the model, from 0.
        rate: float64 [D], c softplus(Λ): decay in nats of a step with an open gate (r_t = 1). D is
            L for real channels; L / 2 for complex ones, where it is the decay of the modulus.
        mean_gate: float64 [D], mean of r_t over the text; None without a text.
        histogram: int64 [BINS], counts of r_t over all channels and tokens of the text; None
            without a text.
    """

    number: int
    rate: np.ndarray
    mean_gate: np.ndarray | None
    histogram: np.ndarray | None

    def half_life(self, gate: float | np.ndarray) -> np.ndarray:
        """Return the half-lives in tokens, float64 [D], ∞ without decay, for a mean gate r."""
        with np.errstate(divide="ignore"):
            return np.log(2) / (self.rate * gate)


def decay_rates(checkpoint: Checkpoint) -> list[ChannelDecay]:
    """Return the recurrent layers in order, with the rates from Λ and no measured gates."""
    layers = []
    for number, kind in enumerate(checkpoint.config.block_types):
        if kind != "recurrent":
            continue
        param = _read(checkpoint, number, "recurrent_param")
        with np.errstate(invalid="ignore"):  # NaN, which `_read` reports
            rate = checkpoint.config.lru_constant * np.logaddexp(0, param)
        layers.append(ChannelDecay(number, rate, mean_gate=None, histogram=None))
    return layers


def measure(
    checkpoint: Checkpoint,
    ids: np.ndarray,
    *,
    framework: str,
    model: Any,
    progress: Callable[[int], Any] = lambda tokens: None,
) -> list[ChannelDecay]:
    """Return the recurrent layers in order, with their gates on a text read as one document.

    Args:
        checkpoint: Checkpoint of the model; gates are computed in float32.
        ids: int [T], T ≥ 2, tokens of the document, with BOS if the model expects it.
        framework: ``torch`` or ``jax``.
        model: Loaded model, which runs in its dtype.
        progress: Function called after each step with its number of tokens.
    """
    own: Any = importlib.import_module(f"griffin_eval.analysis.gates_{framework}")
    layers = decay_rates(checkpoint)
    gates = [gate_parameters(checkpoint, layer.number, "recurrent_gate") for layer in layers]
    sums = [np.zeros(len(layer.rate)) for layer in layers]
    histograms = [np.zeros(BINS, np.int64) for _ in layers]
    first = 1  # skip the first token of the document
    for values in own.layer_values(model, ids, CHUNK):
        inputs = [layer["x"] for layer in values if "x" in layer]
        for x, (weight, bias), total, histogram in zip(
            inputs, gates, sums, histograms, strict=True
        ):
            r = gate_values(x[first:], weight, bias)
            total += r.sum(0, dtype=np.float64)
            histogram += np.histogram(r, BINS, (0, 1))[0]
        first = 0
        progress(len(inputs[0]))
    return [
        layer._replace(mean_gate=total / (len(ids) - 1), histogram=histogram)
        for layer, total, histogram in zip(layers, sums, histograms, strict=True)
    ]


def left(
    checkpoint: Checkpoint,
    ids: np.ndarray,
    first: int,
    cuts: Sequence[int],
    *,
    framework: str,
    model: Any,
) -> list[tuple[int, np.ndarray]]:
    """Return the share of a channel's state that the gates keep: exp(Σ log a_t) over later tokens.

    Args:
        ids: int [N], tokens of the document.
        first: Number of tokens after which the shares are 1.
        cuts: K numbers of tokens, each at least ``first``.
        framework: ``torch`` or ``jax``.

    Returns:
        The number of each recurrent layer and float64 [D, K] shares of its channels.
    """
    own: Any = importlib.import_module(f"griffin_eval.analysis.gates_{framework}")
    layers = decay_rates(checkpoint)
    gates = [gate_parameters(checkpoint, layer.number, "recurrent_gate") for layer in layers]
    running = [np.zeros(len(layer.rate)) for layer in layers]
    sums = np.zeros((len(cuts), len(layers), max(map(len, running))))
    begin = 0
    for values in own.layer_values(model, ids, CHUNK):
        inputs = [layer["x"] for layer in values if "x" in layer]
        counted = np.arange(begin, begin + len(inputs[0]))[:, None] >= first
        for index, (x, parameters) in enumerate(zip(inputs, gates, strict=True)):
            so_far = running[index] + np.cumsum(gate_values(x, *parameters) * counted, 0)
            for place, cut in enumerate(cuts):
                if begin < cut <= begin + len(x):
                    sums[place, index] = so_far[cut - begin - 1]
            running[index] = so_far[-1]
        begin += len(inputs[0])
    return [
        (layer.number, np.exp(-layer.rate * sums[:, index]).T) for index, layer in enumerate(layers)
    ]


def gate_parameters(checkpoint: Checkpoint, layer: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 weight and bias of a recurrent layer's ``recurrent_gate`` or ``input_gate``,
    for `gate_values`."""
    weight, bias = (_read(checkpoint, layer, f"{name}_{part}") for part in ("weight", "bias"))
    return weight.astype(np.float32), bias.astype(np.float32)


def gate_values(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return the gate σ(W x_t + b), [T, D]: r_t of equation (1) or i_t of (2).

    Args:
        x: [T, L], input of the RG-LRU.
        weight: [G, L/G, D/G], the G blocks of the block-diagonal matrix.
        bias: [G, D/G].
    """
    blocks = x.reshape(len(x), *weight.shape[:2]).swapaxes(0, 1)  # [G, T, L/G]
    z = (blocks @ weight + bias[:, None]).swapaxes(0, 1).reshape(len(x), -1)
    return np.exp(-np.logaddexp(0, -z))


def summary(layer: ChannelDecay, visible_keys: int | None) -> dict[str, Any]:
    """Return quantiles over the channels of one layer, by the names that ``--json`` prints.

    Args:
        visible_keys: Number of keys that a local attention query sees, including its own; None
            without local attention.
    """
    numbers: dict[str, Any] = {
        "layer": layer.number,
        "half_life_gate_1": quantiles(layer.half_life(1.0)),
        "half_life_gate_0.5": quantiles(layer.half_life(0.5)),
    }
    if layer.mean_gate is not None:
        measured = layer.half_life(layer.mean_gate)
        numbers["mean_gate"] = quantiles(layer.mean_gate)
        numbers["half_life_measured"] = quantiles(measured)
        if visible_keys is not None:
            numbers["share_beyond_window"] = float((measured > visible_keys).mean())
    return numbers


def quantiles(values: np.ndarray) -> dict[str, float]:
    """Return `QUANTILES` over channels; each is the value of a channel, not an interpolation."""
    chosen = np.quantile(values, QUANTILES, method="inverted_cdf")
    return {f"{q:.0%}": float(v) for q, v in zip(QUANTILES, chosen, strict=True)}


def _read(checkpoint: Checkpoint, layer: int, name: str) -> np.ndarray:
    """Return a parameter of an RG-LRU in float64, zeros for an absent bias. Logs a
    warning if it is not finite."""
    config, whole = checkpoint.config, f"model.layers.{layer}.temporal_block.rg_lru.{name}"
    if name.removesuffix("_bias") in config.absent_biases:
        return np.zeros((config.gate_blocks, config.recurrent_channels // config.gate_blocks))
    value = checkpoint.numpy(whole).astype(np.float64)
    warn_not_finite(whole, int((~np.isfinite(value)).sum()), value.size)
    return value
