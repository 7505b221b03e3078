"""The byte model of decoding, by appendix F of the paper, from the sizes of a model in float32.

A step reads all parameters and the cache of every row, and multiplies each row with every weight.
Its time is that of its bytes at the memory rate, or that of its operations at the best rate of
products, whichever is longer. Section 5.1 uses the bytes alone, for batches of at most about 128
rows, for which they take longer on a TPU-v3.
"""

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.model_flops import logit_flops, reading_flops
from experiments.paper_speed.models import ITEMSIZE
from griffin_eval.analysis.cache_sizes import cache_sizes, parameter_bytes
from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError

LONGEST = 2**40  # largest number of tokens in the search for a crossing


class Rates(NamedTuple):
    """Best rates of a machine: bytes read and operations of matrix products in a second."""

    bandwidth: float
    flops: float


class Costs(NamedTuple):
    """Bytes and operations of decoding steps, float64 [N], one entry for each context."""

    nbytes: np.ndarray
    flops: np.ndarray

    def seconds(self, rates: Rates) -> np.ndarray:
        """Return the least time of each step, float64 [N]."""
        return np.maximum(self.nbytes / rates.bandwidth, self.flops / rates.flops)


def cache_bytes(config: GriffinConfig, tokens: int) -> int:
    """Return the bytes of a row's cache after some tokens."""
    return cache_sizes(config, tokens, ITEMSIZE).total


def step_costs(config: GriffinConfig, batch: int, contexts: np.ndarray) -> Costs:
    """Return the costs of a decoding step of ``batch`` rows after int [N] ``contexts`` tokens."""
    # Both are straight lines in the context, below the window of local attention and above it.
    knots = sorted({0, config.visible_keys - 1, int(np.max(contexts)) + config.visible_keys})
    caches = [cache_bytes(config, knot) for knot in knots]
    flops = [reading_flops(config, np.array([knot])) for knot in knots]
    return Costs(
        parameter_bytes(config, ITEMSIZE) + batch * np.interp(contexts, knots, caches),
        batch * (np.interp(contexts, knots, flops) + logit_flops(config)),
    )


def sampling_seconds(
    config: GriffinConfig, rates: Rates, batch: int, prompt: int, sampled: int
) -> float:
    """Return the least seconds to sample tokens in every row after a prompt."""
    contexts = np.arange(prompt, prompt + sampled)
    return float(step_costs(config, batch, contexts).seconds(rates).sum())


def formula_bytes(config: GriffinConfig, tokens: int) -> int:
    """Return the bytes of a document's state by the formulas of F.4.

    These are 2 T d of global attention, at most 2 T_WS d of local attention, and D_RNN + 3 D_RNN of
    a recurrent block.
    """
    keys = {"global_attention": tokens, "local_attention": config.visible_keys - 1}
    numbers = sum(
        2 * keys[kind] * config.kv_width if kind in keys else config.conv_width * config.lru_width
        for kind in config.block_types
    )
    return ITEMSIZE * numbers


def filled(config: GriffinConfig, context: int) -> int:
    """Return the least context whose cache is as large as that after ``context`` tokens."""
    full = cache_bytes(config, context)
    return bisect_left(range(context), full, key=lambda n: cache_bytes(config, n))


def largest_batches(
    models: Mapping[str, GriffinConfig], length: int, memory: int
) -> dict[str, int]:
    """Return the most rows of each model whose caches and logits fit into bytes of memory.

    Raises:
        ArgumentError: A model does not fit with a single row.
    """
    batches = {}
    for name, config in models.items():
        row = cache_bytes(config, length) + ITEMSIZE * config.vocab_size
        batches[name] = (memory - parameter_bytes(config, ITEMSIZE)) // row
        if batches[name] < 1:
            raise ArgumentError(
                f"--memory {memory / 1e6:.0f}MB is too little for {name} and one row of "
                f"{length} tokens: expected more"
            )
    return batches


def cache_bound_from(config: GriffinConfig, batch: int) -> int | None:
    """Return the context from which the caches of a batch have as many bytes as the parameters
    (F.4), or None if they never have."""
    share = parameter_bytes(config, ITEMSIZE) / batch
    tokens = bisect_left(range(LONGEST), share, key=lambda n: cache_bytes(config, n))
    return None if tokens == LONGEST else tokens


def compute_bound_from(config: GriffinConfig, rates: Rates) -> int | None:
    """Return the batch from which the operations of a first step take longer than its bytes (F.2),
    or None where the bytes of each further row take longer than its operations."""
    none, one = (step_costs(config, rows, np.array([0])) for rows in (0, 1))
    weights = none.nbytes[0] / rates.bandwidth
    row = one.flops[0] / rates.flops - (one.nbytes[0] - none.nbytes[0]) / rates.bandwidth
    return int(np.ceil(weights / row)) if row > 0 else None
