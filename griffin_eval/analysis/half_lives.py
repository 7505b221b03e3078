"""How long a checkpoint remembers: the half-lives of its RG-LRU channels.

In one step the state of a channel is multiplied by a_t, with log a_t = -c softplus(Λ) r_t, so that
after n steps a share of exp(Σ log a_t) of it is left. Half of it is left after

    ln 2 / (c softplus(Λ) r)   tokens

where c is 8 in all published models, and r is the mean of the recurrence gate r_t, which depends on
the text. r = 1 gives the shortest half-life that Λ allows; r = 0.5 is where untrained gates are; a
closed gate (r near 0) keeps the state for as long as it stays closed. A measured half-life takes
the mean of r_t over a text, the first token left out, since it starts from an empty state whatever
its gate is.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint

CHUNK = 512  # tokens that are read in one step
BINS = 50  # bins of the histogram of r_t, from 0 to 1
QUANTILES = (0.05, 0.5, 0.95)  # shares of the channels of a layer


class ChannelDecay(NamedTuple):
    """How fast the channels of one recurrent block forget.

    Attributes:
        number: index of the layer in the model, from 0.
        rate: float64 [D], c softplus(Λ): nats by which the state fades in a step with an open gate
            (r_t = 1). D is L for real channels; L / 2 for complex ones, whose modulus fades so.
        mean_gate: float64 [D], mean of r_t over the text; None if no text was read.
        histogram: int64 [BINS], counts of r_t over all channels and tokens of the text; None if no
            text was read.
    """

    number: int
    rate: np.ndarray
    mean_gate: np.ndarray | None
    histogram: np.ndarray | None

    def half_life(self, gate: float | np.ndarray) -> np.ndarray:
        """float64 [D]: tokens after which half of a channel's state is left, ∞ if it never fades.

        Args:
            gate: mean of r_t, one number or [D].
        """
        with np.errstate(divide="ignore"):
            return np.log(2) / (self.rate * gate)


def decay_rates(checkpoint: Checkpoint) -> list[ChannelDecay]:
    """The recurrent layers in order, with the rates that Λ gives and no measured gates."""
    layers = []
    for number in _recurrent_layers(checkpoint.config):
        rate = checkpoint.config.lru_constant * np.logaddexp(
            0, _read(checkpoint, number, "recurrent_param")
        )
        layers.append(ChannelDecay(number, rate, mean_gate=None, histogram=None))
    return layers


def measure(
    checkpoint: Checkpoint,
    ids: np.ndarray,
    *,
    framework: str,
    device: str | None = None,
    model: Any = None,
    progress: Callable[[int], Any] = lambda tokens: None,
) -> list[ChannelDecay]:
    """The recurrent layers in order, with their gates on a text that is read as one document.

    Args:
        checkpoint: the model, which runs in its own dtype; the gates are computed in float32.
        ids: int [T], T ≥ 2, tokens of the document, with BOS if the model expects it.
        framework: ``torch`` or ``jax``.
        device: name of the device in the framework; None for its default.
        model: the model, if it is loaded already; it runs in the dtype that it has.
        progress: called after each step with the number of tokens that it read.
    """
    own: Any = importlib.import_module(f"griffin_eval.analysis.gates_{framework}")
    model = own.load_model(checkpoint, device) if model is None else model
    layers = decay_rates(checkpoint)
    gates = [gate_parameters(checkpoint, layer.number, "recurrent_gate") for layer in layers]
    sums = [np.zeros(len(layer.rate)) for layer in layers]
    histograms = [np.zeros(BINS, np.int64) for _ in layers]
    first = 1  # the first token of the document is left out
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
    """What the gates alone leave of what the channels hold after some tokens of a document:
    exp(Σ log a_t) over the tokens that follow.

    Args:
        ids: int [N], tokens of the document.
        first: number of tokens after which channels hold all of it.
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
    """float32 weight and bias of a gate, for `gate_values`.

    Args:
        layer: index of a recurrent layer.
        name: ``recurrent_gate`` or ``input_gate``.
    """
    weight, bias = (_read(checkpoint, layer, f"{name}_{part}") for part in ("weight", "bias"))
    return weight.astype(np.float32), bias.astype(np.float32)


def gate_values(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """[T, D]: r_t = σ(W_a x_t + b_a) of equation (1), or i_t of equation (2), where the matrix is
    block diagonal.

    Args:
        x: [T, L], input of the RG-LRU.
        weight: [G, L/G, D/G], the G blocks of the matrix.
        bias: [G, D/G].
    """
    blocks = x.reshape(len(x), *weight.shape[:2]).swapaxes(0, 1)  # [G, T, L/G]
    z = (blocks @ weight + bias[:, None]).swapaxes(0, 1).reshape(len(x), -1)
    return np.exp(-np.logaddexp(0, -z))


def summary(layer: ChannelDecay, visible_keys: int | None) -> dict[str, Any]:
    """Quantiles over the channels of one layer, by the names that ``--json`` prints.

    Args:
        layer: the layer, with or without measured gates.
        visible_keys: keys that a query of local attention sees, its own included; None if the
            model has no local attention.
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
    """`QUANTILES` of the values of channels, always the value of one and never a mean of two."""
    chosen = np.quantile(values, QUANTILES, method="inverted_cdf")
    return {f"{q:.0%}": float(v) for q, v in zip(QUANTILES, chosen, strict=True)}


def _recurrent_layers(config: GriffinConfig) -> Iterator[int]:
    return (i for i, kind in enumerate(config.block_types) if kind == "recurrent")


def _read(checkpoint: Checkpoint, layer: int, name: str) -> np.ndarray:
    """A parameter of an RG-LRU in float64, zeros for a bias that is absent."""
    config, whole = checkpoint.config, f"model.layers.{layer}.temporal_block.rg_lru.{name}"
    if name.removesuffix("_bias") in config.absent_biases:
        return np.zeros((config.gate_blocks, config.recurrent_channels // config.gate_blocks))
    return checkpoint.numpy(whole).astype(np.float64)
