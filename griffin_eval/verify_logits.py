"""Do checkpoints compute the same, in both frameworks and in the public implementations?

Weights that are equal prove nothing about a config that is read wrongly or a layout that is turned
the wrong way. Here the same tokens go through every implementation that is installed and can
express the model, in float32 on the CPU, and the vectors after every block are compared.
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
from griffin_eval.runners import choose_framework

# Of the largest value of an array. Implementations differ by about 1e-5 in deep models, a window
# or a multiplier that is off by one unit by more than 1e-3.
TOLERANCE = 2e-4
WINDOW_LIMIT = 4096  # a larger window is not passed, since memory of a full pass is quadratic
CHUNKS = 4  # that the twins read the probe in; the others read it at once
KEPT = 64  # positions whose vectors are kept and compared


class Probe(NamedTuple):
    """What every implementation reads.

    Attributes:
        tokens: int32 [1, T], T a multiple of ``CHUNKS``.
        keep: int [N], increasing positions that are compared.
        past_window: whether the probe is longer than what local attention sees.
    """

    tokens: np.ndarray
    keep: np.ndarray
    past_window: bool


class Trace(NamedTuple):
    """What one implementation computed at the positions of a probe, in float32.

    Attributes:
        hidden: [N, W] each; what enters the first block, and what leaves every block.
        logits: [N, V].
    """

    hidden: list[np.ndarray]
    logits: np.ndarray


class Agreement(NamedTuple):
    """How two traces compare.

    Attributes:
        logits: largest absolute difference of two logits; NaN where one is.
        first: where they part first by more than ``TOLERANCE``: ``embedding``, ``layer 7``
            (counted from 0) or ``logits``; None if nowhere.
        largest: largest absolute difference there, 0.0 if nowhere.
    """

    logits: float
    first: str | None
    largest: float


class Implementation(NamedTuple):
    """A way to run a model.

    Attributes:
        name: for tables.
        needs: modules that must be installed.
        format: whose limits it has; None for the twins, which run every model.
        module, function: where ``function(checkpoint, probe) -> Trace`` is.
    """

    name: str
    needs: tuple[str, ...]
    format: str | None
    module: str
    function: str

    def obstacle(self, config: GriffinConfig) -> str | None:
        """Why it cannot run a model here; None if it can."""
        if missing := [name for name in self.needs if find_spec(name) is None]:
            return f"{' and '.join(missing)} not installed"
        if self.format and (problems := refusals(config, FORMATS[self.format])):
            return f"it cannot express {'; '.join(problems)}"
        if self.name == "deepmind-jax" and config.complex_gates:
            return "its blocks can be complex (lru_only_real=False), but its Griffin makes none"
        return None

    def run(self, checkpoint: Checkpoint, probe: Probe) -> Trace:
        """Loads the model, reads the probe, and lets go of the model."""
        module = importlib.import_module(f"griffin_eval.{self.module}")
        return getattr(module, self.function)(checkpoint, probe)


_DEEPMIND = ("jax", "flax", "recurrentgemma")  # which imports JAX also for PyTorch
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
    """Tokens that every one of these models knows, more than any of them sees at once.

    The same for the same configs. The kept positions are all, or half of them at the end, which is
    past the window, and half spread over the rest.
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
) -> Iterator[tuple[str, Agreement]]:
    """Runs checkpoints in every implementation and compares, one model in memory at a time.

    Args:
        checkpoints: one or two, by the name they have in the pairs; see `mismatch`.
        probe: from `make_probe`.
        say: called with one line for each model that is run, and each that cannot be.

    Yields:
        Pairs: each implementation with the first one, of the same checkpoint; then the checkpoints
        with each other, in the same implementation.

    Raises:
        MissingExtraError: neither framework is installed.
        BadInput: nothing to compare: one checkpoint that one implementation runs.
    """
    choose_framework(None)
    traces: dict[str, dict[str, Trace]] = {}
    for label, checkpoint in checkpoints.items():
        found = traces[label] = {}
        for implementation in IMPLEMENTATIONS:
            name = implementation.name
            if reason := implementation.obstacle(checkpoint.config):
                say(f"{label}: {name} is left out: {reason}")
                continue
            say(f"{label}: {name}")
            found[name] = implementation.run(checkpoint, probe)
    if len(traces) == 1 and all(len(found) == 1 for found in traces.values()):
        raise BadInput(
            "one implementation alone has nothing to be compared with: install the other framework "
            "(pip install 'griffin-eval[all]'), or name a second checkpoint"
        )
    for label, found in traces.items():
        first, *others = found
        for name in others:
            yield f"{label}: {first} - {name}", compare_traces(found[first], found[name])
    if len(traces) == 2:
        (one, ones), (other, others) = traces.items()
        for name in [name for name in ones if name in others]:
            yield f"{one} - {other}: {name}", compare_traces(ones[name], others[name])


def mismatch(one: GriffinConfig, other: GriffinConfig) -> str | None:
    """Why the vectors of two models cannot be compared; None if they can.

    Vocabularies of two sizes can: of the logits, those that both have.
    """
    fields = [
        f"{name} {a} and {b}"
        for name in ("width", "num_layers")
        if (a := getattr(one, name)) != (b := getattr(other, name))
    ]
    return "; ".join(fields) or None


def compare_traces(one: Trace, other: Trace) -> Agreement:
    """Compares what two implementations, or two checkpoints, computed on the same probe."""
    columns = min(one.logits.shape[1], other.logits.shape[1])
    logits = one.logits[:, :columns], other.logits[:, :columns]
    places = ["embedding", *(f"layer {i}" for i in range(len(one.hidden) - 1)), "logits"]
    pairs = [*zip(one.hidden, other.hidden, strict=True), logits]
    overall = float(np.abs(np.subtract(*logits)).max())
    for place, (a, b) in zip(places, pairs, strict=True):
        largest = float(np.abs(a - b).max())
        # not "above": a NaN is no agreement
        if not largest <= TOLERANCE * float(np.maximum(np.abs(a).max(), np.abs(b).max())):
            return Agreement(overall, place, largest)
    return Agreement(overall, None, 0.0)


def deepmind_config(config: GriffinConfig) -> Any:
    """The config for DeepMind's code, whose window leaves out the query's own key."""
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
