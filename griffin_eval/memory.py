"""How long a checkpoint remembers: half-lives of its RG-LRU channels, and what its state takes.

The state of a channel fades by a_t in a step, with log a_t = -8 softplus(Λ) r_t, so that after n
steps exp(Σ log a_t) of it is left. Half is left after

    ln 2 / (8 softplus(Λ) r)   tokens

where r is the mean of the recurrence gate r_t, which the text decides. r = 1 is the shortest that Λ
allows; r = 0.5 is where untrained gates are; a gate that closes (r near 0) keeps the state for
as long as it is closed. Measured half-lives take the mean of r_t over a text. The first token of a
document is left out, since it starts from nothing, whatever its gate says.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.layout import param_specs

C = 8.0  # of equation (3)
CHUNK = 512  # tokens read at a time
BINS = 50  # of the histogram of r_t, from 0 to 1
QUANTILES = (0.05, 0.5, 0.95)


class Layer(NamedTuple):
    """The channels of one recurrent block.

    Attributes:
        number: of the layer in the model, from 0.
        rate: float64 [D], 8 softplus(Λ): nats that a step with an open gate forgets. D channels: L,
            or L / 2 complex ones, of which this is the absolute value.
        mean_gate: float64 [D], the mean of r_t over the text; None if none was read.
        histogram: int64 [BINS], of r_t over all channels and tokens; None if no text was read.
    """

    number: int
    rate: np.ndarray
    mean_gate: np.ndarray | None
    histogram: np.ndarray | None

    def half_life(self, gate: float | np.ndarray) -> np.ndarray:
        """Tokens after which half of a channel's state is left, where r_t has this mean."""
        with np.errstate(divide="ignore"):
            return np.log(2) / (self.rate * gate)


class Caches(NamedTuple):
    """What has to be kept of a sequence to go on with it, in bytes (appendix F.4, B = 1).

    Attributes:
        recurrent: states of the RG-LRU, float32 at least, and last inputs of the convolutions.
        attention: keys and values, at the given length.
        mqa: keys and values of a Transformer of this depth, width and head dimension with one key
            head and global attention.
        mha: the same with as many key heads as query heads.
    """

    recurrent: int
    attention: int
    mqa: int
    mha: int

    @property
    def total(self) -> int:
        return self.recurrent + self.attention


def rates(checkpoint: Checkpoint) -> list[Layer]:
    """The recurrent layers, of which no gate has been measured."""
    return [
        Layer(index, C * np.logaddexp(0, _read(checkpoint, index, "recurrent_param")), None, None)
        for index in _recurrent(checkpoint.config)
    ]


def measure(
    checkpoint: Checkpoint,
    ids: np.ndarray,
    *,
    framework: str,
    device: str | None = None,
    progress: Callable[[int], Any] = lambda tokens: None,
) -> list[Layer]:
    """The recurrent layers with their gates on a text, which is read as one document.

    Args:
        checkpoint: the model, run in its own dtype; the gates are computed in float32.
        ids: int [T], at least 2 tokens of the document, BOS included if the model wants one.
        framework: ``torch`` or ``jax``.
        device: as the framework names it.
        progress: called with the number of tokens that were read.
    """
    trace: Any = importlib.import_module(f"griffin_eval.memory_{framework}")
    layers = rates(checkpoint)
    gates = [
        tuple(
            _read(checkpoint, layer.number, f"recurrent_gate_{part}").astype(np.float32)
            for part in ("weight", "bias")
        )
        for layer in layers
    ]
    sums = [np.zeros(len(layer.rate)) for layer in layers]
    histograms = [np.zeros(BINS, np.int64) for _ in layers]
    first = 1  # of the document's tokens
    for inputs in trace.rg_lru_inputs(checkpoint, ids, CHUNK, device):
        for x, (weight, bias), total, histogram in zip(
            inputs, gates, sums, histograms, strict=True
        ):
            r = recurrence_gate(x[first:], weight, bias)
            total += r.sum(0, dtype=np.float64)
            histogram += np.histogram(r, BINS, (0, 1))[0]
        first = 0
        progress(len(inputs[0]))
    return [
        layer._replace(mean_gate=total / (len(ids) - 1), histogram=histogram)
        for layer, total, histogram in zip(layers, sums, histograms, strict=True)
    ]


def recurrence_gate(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """r_t = σ(W_a x_t + b_a), equation (1), with W_a of blocks.

    Args:
        x: [T, L], what enters the RG-LRU.
        weight: [G, L/G, D/G].
        bias: [G, D/G].
    """
    blocks = x.reshape(len(x), *weight.shape[:2]).swapaxes(0, 1)  # [G, T, L/G]
    z = (blocks @ weight + bias[:, None]).swapaxes(0, 1).reshape(len(x), -1)
    return np.exp(-np.logaddexp(0, -z))


def cache_sizes(config: GriffinConfig, length: int, itemsize: int) -> Caches:
    """Bytes of one sequence after ``length`` tokens.

    A query of local attention sees its own key and ``visible_keys`` - 1 that are kept: T_WS of the
    appendix.

    Args:
        config: the architecture.
        length: tokens.
        itemsize: bytes of a number in the dtype the model runs in.
    """
    kinds = config.block_types
    state = (max(itemsize, 4) + itemsize * (config.conv_width - 1)) * config.lru_width
    kept = kinds.count("local_attention") * min(length, config.visible_keys - 1)
    kept += kinds.count("global_attention") * length
    key_and_value = 2 * config.head_dim * itemsize
    mqa = len(kinds) * length * key_and_value
    return Caches(
        recurrent=kinds.count("recurrent") * state,
        attention=kept * key_and_value,
        mqa=mqa,
        mha=mqa * config.num_heads,
    )


def parameter_bytes(config: GriffinConfig, itemsize: int) -> int:
    """Bytes of the weights in the dtype the model runs in, Λ and θ in float32 at least."""
    specs = param_specs(config).values()
    return sum(s.size * (max(itemsize, 4) if s.keep_float32 else itemsize) for s in specs)


def summary(layer: Layer, window: int | None) -> dict[str, Any]:
    """Numbers of one layer: quantiles over its channels, by name.

    Args:
        layer: with or without measured gates.
        window: keys that local attention sees; None without.
    """

    def quantiles(values: np.ndarray) -> dict[str, float]:
        found = np.quantile(values, QUANTILES, method="inverted_cdf")  # one of them, never a mean
        return {f"{q:.0%}": float(v) for q, v in zip(QUANTILES, found, strict=True)}

    found: dict[str, Any] = {
        "layer": layer.number,
        "half_life_gate_1": quantiles(layer.half_life(1.0)),
        "half_life_gate_0.5": quantiles(layer.half_life(0.5)),
    }
    if layer.mean_gate is not None:
        measured = layer.half_life(layer.mean_gate)
        found["mean_gate"] = quantiles(layer.mean_gate)
        found["half_life_measured"] = quantiles(measured)
        if window is not None:
            found["share_beyond_window"] = float((measured > window).mean())
    return found


def _recurrent(config: GriffinConfig) -> Iterator[int]:
    return (i for i, kind in enumerate(config.block_types) if kind == "recurrent")


def _read(checkpoint: Checkpoint, layer: int, name: str) -> np.ndarray:
    array = checkpoint.numpy(f"model.layers.{layer}.temporal_block.rg_lru.{name}")
    return array.astype(np.float64)
