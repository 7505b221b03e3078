"""The byte model of decoding (appendix F of the paper), from the sizes of a model alone.

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
from griffin_eval.analysis.cache_sizes import cache_sizes, parameter_bytes
from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError

LONGEST = 2**40  # largest number of tokens in the search for a crossing


class Rates(NamedTuple):
    """Best rates of a machine.

    Attributes:
        bandwidth: Bytes of memory read per second.
        flops: Operations of matrix products per second.
    """

    bandwidth: float
    flops: float


class Costs(NamedTuple):
    """Costs of decoding steps, one entry for each context.

    Attributes:
        nbytes: float64 [N], bytes of the parameters and of the caches of all rows.
        flops: float64 [N], operations of matrix products, logits included.
    """

    nbytes: np.ndarray
    flops: np.ndarray

    def seconds(self, rates: Rates) -> np.ndarray:
        """Return the least time of each step, float64 [N]."""
        return np.maximum(self.nbytes / rates.bandwidth, self.flops / rates.flops)


def step_costs(config: GriffinConfig, batch: int, contexts: np.ndarray, itemsize: int = 4) -> Costs:
    """Return the bytes and operations of a decoding step, with ``itemsize`` bytes per number.

    ``contexts`` is int [N], the number of tokens of every row before the step.
    """
    # Both are linear in the context, below the window of local attention and above it.
    knots = sorted({0, config.visible_keys - 1, int(np.max(contexts)) + config.visible_keys})
    caches = [cache_sizes(config, knot, itemsize).total for knot in knots]
    flops = [reading_flops(config, np.array([knot])) for knot in knots]
    return Costs(
        parameter_bytes(config, itemsize) + batch * np.interp(contexts, knots, caches),
        batch * (np.interp(contexts, knots, flops) + logit_flops(config)),
    )


def sampling_seconds(
    config: GriffinConfig, rates: Rates, batch: int, prompt: int, sampled: int, itemsize: int = 4
) -> float:
    """Return the least seconds to sample tokens in every row after a prompt."""
    contexts = np.arange(prompt, prompt + sampled)
    return float(step_costs(config, batch, contexts, itemsize).seconds(rates).sum())


def formula_bytes(config: GriffinConfig, tokens: int) -> int:
    """Return the bytes of a document's state by the formulas of F.4, for float32 or wider.

    These are 2 T d of global attention, at most 2 T_WS d of local attention, and D_RNN + 3 D_RNN of
    a recurrent block.
    """
    keys = {"global_attention": tokens, "local_attention": config.visible_keys - 1}
    numbers = sum(
        2 * keys[kind] * config.kv_width if kind in keys else config.conv_width * config.lru_width
        for kind in config.block_types
    )
    return 4 * numbers


def filled(config: GriffinConfig, context: int) -> int:
    """Return the smallest context with a cache as large as after ``context`` tokens: 0 if it does
    not grow, and the window once it stops growing."""
    most = cache_sizes(config, context, 4).total
    return bisect_left(range(context), most, key=lambda n: cache_sizes(config, n, 4).total)


def largest_batch(
    config: GriffinConfig, length: int, memory: int, itemsize: int = 4, working: int = 0
) -> int:
    """Return the largest number of rows whose caches and ``working`` bytes fit into memory."""
    row = cache_sizes(config, length, itemsize).total + working
    return max(0, memory - parameter_bytes(config, itemsize)) // row


def logit_bytes(config: GriffinConfig) -> int:
    """Return the bytes of a row's logits in float32."""
    return 4 * config.vocab_size


def largest_batches(
    models: Mapping[str, GriffinConfig], length: int, memory: int
) -> dict[str, int]:
    """Return the largest batch of each model whose caches and logits fit into memory in float32."""
    batches = {
        name: largest_batch(config, length, memory, working=logit_bytes(config))
        for name, config in models.items()
    }
    if too_large := [name for name, batch in batches.items() if not batch]:
        raise ArgumentError(
            f"--memory {memory / 1e6:.0f}MB is too little for {too_large[0]} and one row of "
            f"{length} tokens: expected more"
        )
    return batches


def cache_bound_from(config: GriffinConfig, batch: int) -> int | None:
    """Return the context from which the caches of a batch have as many bytes as the parameters
    (F.4), or None if they never have."""
    share = parameter_bytes(config, 4) / batch
    tokens = bisect_left(range(LONGEST), share, key=lambda n: cache_sizes(config, n, 4).total)
    return None if tokens == LONGEST else tokens


def compute_bound_from(config: GriffinConfig, rates: Rates, context: int = 0) -> int | None:
    """Return the batch from which the operations of a step take longer than its bytes (F.2), or
    None if the bytes of each further row take longer than its operations."""
    costs = [step_costs(config, rows, np.array([context])) for rows in (0, 1)]
    weights = costs[0].nbytes[0] / rates.bandwidth
    row = costs[1].flops[0] / rates.flops
    row -= (costs[1].nbytes[0] - costs[0].nbytes[0]) / rates.bandwidth
    return int(np.ceil(weights / row)) if row > 0 else None
