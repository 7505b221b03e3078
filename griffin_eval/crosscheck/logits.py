"""Comparison of a checkpoint's outputs in both frameworks and in the public implementations.

Equal weights do not prove that a config was read correctly or that a matrix was not transposed.
Here the same tokens go through every installed implementation that supports the model, in float32
on the CPU, and the vectors after every block are compared.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.formats import FORMATS, refusals
from griffin_eval.errors import BadInput
from griffin_eval.runners.load import choose_framework

# Largest difference over the largest value of an array. Implementations differ by about 1e-5 in
# deep models; a window or a multiplier that is off by one unit makes more than 1e-3.
TOLERANCE = 2e-4
# Largest window that the probe exceeds: the memory of a full pass is quadratic.
WINDOW_LIMIT = 4096
CHUNKS = 4  # parts in which the twins read the probe; the others read it at once
KEPT = 64  # number of compared positions


class Probe(NamedTuple):
    """The tokens that every implementation reads.

    Attributes:
        tokens: int32 [1, T], T a multiple of ``CHUNKS``.
        keep: int [N], compared positions in increasing order.
        past_window: Whether the probe is longer than every model's ``visible_keys``.
    """

    tokens: np.ndarray
    keep: np.ndarray
    past_window: bool


class Trace(NamedTuple):
    """The outputs of one implementation at the compared positions of a probe.

    Attributes:
        hidden: float32 [N, W] each: the input of the first block and the output of every block.
        logits: float32 [N, V].
    """

    hidden: list[np.ndarray]
    logits: np.ndarray


class Agreement(NamedTuple):
    """The differences of two traces.

    Attributes:
        logits: Largest absolute difference of two logits; NaN if one of them is NaN.
        first: First array that differs by more than ``TOLERANCE``: ``embedding``, ``layer 7``
            (counted from 0) or ``logits``; None if all agree.
        largest: Largest absolute difference in that array, or 0.0.
    """

    logits: float
    first: str | None
    largest: float


class Distance(NamedTuple):
    """The distance of two checkpoints in one implementation.

    Attributes:
        places: Compared places: ``embedding``, ``layer 0``, …
        largest: Largest absolute difference of the vectors at each place.
        relative: The same, divided by the first checkpoint's largest absolute value at the place.
        divergence: Kullback-Leibler divergence of the next token in nats, the second checkpoint
            from the first, at each compared position, over the ids that both have.
    """

    places: list[str]
    largest: list[float]
    relative: list[float]
    divergence: np.ndarray


class Comparison(NamedTuple):
    """Two traces of the same probe.

    Attributes:
        pair: Names of the two sides.
        distance: How far apart the traces of two checkpoints are, otherwise None.
    """

    pair: str
    agreement: Agreement
    distance: Distance | None = None


class Implementation(NamedTuple):
    """An implementation of the model, ours or another's.

    Attributes:
        name: Name in tables.
        needs: Modules that must be installed.
        format: Name of the checkpoint format that holds exactly the models it can run; None for
            the twins, which run every model.
        module, function: Module of this package, and its function
            ``function(checkpoint, probe) -> Trace``.
    """

    name: str
    needs: tuple[str, ...]
    format: str | None
    module: str
    function: str

    def obstacle(self, config: GriffinConfig) -> str | None:
        """Return the reason why it cannot run a model here, or None if it can."""
        if missing := [name for name in self.needs if find_spec(name) is None]:
            return f"{' and '.join(missing)} not installed"
        if self.format and (problems := refusals(config, FORMATS[self.format])):
            return f"it cannot express {'; '.join(problems)}"
        if self.name == "deepmind-jax" and config.complex_gates:
            return "its blocks can be complex (lru_only_real=False), but its Griffin makes none"
        return None

    def run(self, checkpoint: Checkpoint, probe: Probe) -> Trace:
        """Load the model, read the probe, and release the model."""
        module = importlib.import_module(f"griffin_eval.crosscheck.{self.module}")
        return getattr(module, self.function)(checkpoint, probe)


_DEEPMIND = ("jax", "flax", "recurrentgemma")  # its PyTorch code imports JAX too
IMPLEMENTATIONS = (
    Implementation("torch", ("torch",), None, "trace_torch", "twin"),
    Implementation("jax", ("jax", "flax"), None, "trace_jax", "twin"),
    Implementation("transformers", ("torch", "transformers"), "hf", "trace_torch", "transformers"),
    Implementation(
        "deepmind-torch", ("torch", *_DEEPMIND), "deepmind-torch", "trace_torch", "deepmind"
    ),
    Implementation("deepmind-jax", _DEEPMIND, "deepmind-flax", "trace_jax", "deepmind"),
)


def make_probe(configs: Sequence[GriffinConfig]) -> Probe:
    """Return random tokens for models with these configs, always the same for the same configs.

    The ids are in every vocabulary, and there are more tokens than any model has visible keys (up
    to ``WINDOW_LIMIT``). Half of the compared positions are at the end, past the window, and half
    are spread over the rest.
    """
    windows = [c.visible_keys for c in configs if "local_attention" in c.block_types]
    window = max(windows, default=KEPT)
    length = CHUNKS * math.ceil((min(window, WINDOW_LIMIT) + KEPT) / CHUNKS)
    vocab_size = min(config.vocab_size for config in configs)
    tokens = np.random.default_rng(0).integers(vocab_size, size=(1, length), dtype=np.int32)
    end = length - KEPT // 2
    spread = np.linspace(0, end - 1, KEPT // 2).astype(int)
    keep = np.union1d(spread, np.arange(end, length))
    return Probe(tokens, keep, length > window)


def run(
    checkpoints: Mapping[str, Checkpoint], probe: Probe, say: Callable[[str], None]
) -> Iterator[Comparison]:
    """Run checkpoints in every implementation and compare, with one model in memory at a time.

    Args:
        checkpoints: One or two checkpoints by label; two must have no `mismatch`.
        say: Function called with a line for each implementation that runs or is left out.

    Yields:
        Pairs: for each checkpoint, each implementation with the first one; then the checkpoints
        with each other, in each implementation.

    Raises:
        MissingExtraError: Neither framework is installed.
        BadInput: There is only one checkpoint and one implementation that runs it.
    """
    choose_framework(None)
    traces: dict[str, dict[str, Trace]] = {}
    for label, checkpoint in checkpoints.items():
        by_name = traces[label] = {}
        for implementation in IMPLEMENTATIONS:
            name = implementation.name
            if reason := implementation.obstacle(checkpoint.config):
                say(f"{label}: {name} is left out: {reason}")
                continue
            say(f"{label}: {name}")
            by_name[name] = implementation.run(checkpoint, probe)
    if len(traces) == 1 and all(len(by_name) == 1 for by_name in traces.values()):
        raise BadInput(
            "one implementation alone has nothing to be compared with: install the other framework "
            "(pip install 'griffin-eval[all]'), or name a second checkpoint"
        )
    for label, by_name in traces.items():
        first, *others = by_name
        for name in others:
            pair = f"{label}: {first} - {name}"
            yield Comparison(pair, compare_traces(by_name[first], by_name[name]))
    if len(traces) == 2:
        (one, ones), (other, others) = traces.items()
        for name in [name for name in ones if name in others]:
            pair = ones[name], others[name]
            yield Comparison(f"{one} - {other}: {name}", compare_traces(*pair), distance(*pair))


def mismatch(one: GriffinConfig, other: GriffinConfig) -> str | None:
    """Return the reason why the vectors of two models cannot be compared, or None.

    Vocabularies may differ in size: only the logits of common ids are compared.
    """
    fields = [
        f"{name} {a} and {b}"
        for name in ("width", "num_layers")
        if (a := getattr(one, name)) != (b := getattr(other, name))
    ]
    return "; ".join(fields) or None


def compare_traces(one: Trace, other: Trace) -> Agreement:
    """Compare the outputs of two implementations, or of two checkpoints, for the same probe."""
    logits = _of_both(one, other)
    places = [*_places(one), "logits"]
    pairs = [*zip(one.hidden, other.hidden, strict=True), logits]
    overall = float(np.abs(np.subtract(*logits)).max())
    for place, (a, b) in zip(places, pairs, strict=True):
        largest = float(np.abs(a - b).max())
        # "not <=" rather than ">", so that NaN counts as a difference
        if not largest <= TOLERANCE * float(np.maximum(np.abs(a).max(), np.abs(b).max())):
            return Agreement(overall, place, largest)
    return Agreement(overall, None, 0.0)


def distance(one: Trace, other: Trace) -> Distance:
    """Return the distance between the outputs of two checkpoints for the same probe."""
    largest = [float(np.abs(a - b).max()) for a, b in zip(one.hidden, other.hidden, strict=True)]
    scales = [float(np.abs(a).max()) or 1.0 for a in one.hidden]
    relative = [gap / scale for gap, scale in zip(largest, scales, strict=True)]
    return Distance(_places(one), largest, relative, divergence(*_of_both(one, other)))


def divergence(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the Kullback-Leibler divergence KL(one || other) in nats, float64 [N].

    ``one`` and ``other`` are logits [N, V].
    """
    p, q = log_softmax(one), log_softmax(other)
    return np.maximum(np.sum(np.exp(p) * (p - q), 1), 0.0)  # rounding may go below 0


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities in float64 of logits [N, V]."""
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def _places(trace: Trace) -> list[str]:
    return ["embedding", *(f"layer {i}" for i in range(len(trace.hidden) - 1))]


def _of_both(one: Trace, other: Trace) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of the ids that both traces have."""
    columns = min(one.logits.shape[1], other.logits.shape[1])
    return one.logits[:, :columns], other.logits[:, :columns]


def deepmind_config(config: GriffinConfig) -> Any:
    """Return the config for DeepMind's code, whose window excludes the query's own key."""
    from recurrentgemma import common

    kinds = {
        "recurrent": common.TemporalBlockType.RECURRENT,
        "local_attention": common.TemporalBlockType.ATTENTION,
    }
    return common.GriffinConfig(
        vocab_size=config.vocab_size,
        width=config.width,
        mlp_expanded_width=config.mlp_width,
        num_heads=config.num_heads,
        block_types=tuple(kinds[block] for block in config.block_types),
        embeddings_scale_by_sqrt_dim=config.embedding_scale,
        attention_window_size=config.visible_keys - 1,
        logits_soft_cap=config.logits_soft_cap,
        lru_width=config.lru_width,
    )
