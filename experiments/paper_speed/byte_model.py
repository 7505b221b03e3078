"""What decoding takes by appendix F of the paper, from the sizes of a model alone.

A step reads all parameters and the cache of every row, and multiplies each row with every weight.
Its time is that of its bytes at the rate of reading memory, or that of its operations at the best
rate of products, whichever is longer. Section 5.1 has the bytes alone, for batches of at most some
128 rows, where they take longer on a TPU-v3.
"""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from benchmarks.model_flops import logit_flops, reading_flops
from griffin_eval.analysis.cache_sizes import cache_sizes, parameter_bytes
from griffin_eval.config import GriffinConfig

LONGEST = 2**40  # tokens of a context that a crossing is looked for in


class Rates(NamedTuple):
    """What a machine can do.

    Attributes:
        bandwidth: bytes of memory read in a second.
        flops: operations of products of matrices in a second.
    """

    bandwidth: float
    flops: float


class Costs(NamedTuple):
    """What decoding steps take, one entry for each context.

    Attributes:
        nbytes: float64 [N], bytes of the parameters and of the caches of all rows.
        flops: float64 [N], operations of products of matrices, logits included.
    """

    nbytes: np.ndarray
    flops: np.ndarray

    def seconds(self, rates: Rates) -> np.ndarray:
        """float64 [N], the least time of each step."""
        return np.maximum(self.nbytes / rates.bandwidth, self.flops / rates.flops)


def step_costs(config: GriffinConfig, batch: int, contexts: np.ndarray, itemsize: int = 4) -> Costs:
    """Bytes and operations of a decoding step of B rows.

    Args:
        config: the architecture.
        batch: rows, B.
        contexts: int [N], tokens that every row has read before the step.
        itemsize: bytes of a number.
    """
    # Both are straight lines in the context, below the window of local attention and above it.
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
    """The least seconds to sample tokens of every row behind a prompt that has been read.

    Args:
        config: the architecture.
        rates: of the machine.
        batch: rows.
        prompt: tokens of the prompt.
        sampled: tokens that are sampled.
        itemsize: bytes of a number.
    """
    contexts = np.arange(prompt, prompt + sampled)
    return float(step_costs(config, batch, contexts, itemsize).seconds(rates).sum())


def formula_bytes(config: GriffinConfig, tokens: int, itemsize: int = 4) -> int:
    """Bytes of a document's state by the formulas of F.4, in a dtype of float32 or wider: 2 T d of
    global attention, at most 2 T_WS d of local attention, D_RNN and 3 D_RNN of a recurrent block.
    """
    keys = {"global_attention": tokens, "local_attention": config.visible_keys - 1}
    numbers = sum(
        2 * keys[kind] * config.kv_width if kind in keys else config.conv_width * config.lru_width
        for kind in config.block_types
    )
    return itemsize * numbers


def filled(config: GriffinConfig, context: int) -> int:
    """The least context whose step takes what one after ``context`` tokens takes: 0 where the cache
    does not grow, the kept keys of local attention where it has stopped growing."""
    most = cache_sizes(config, context, 4).total
    return bisect_left(range(context), most, key=lambda n: cache_sizes(config, n, 4).total)


def largest_batch(
    config: GriffinConfig, length: int, memory: int, itemsize: int = 4, working: int = 0
) -> int:
    """The most rows whose caches fit into memory beside the parameters; 0 if none does.

    Args:
        config: the architecture.
        length: tokens of every row.
        memory: bytes.
        itemsize: bytes of a number.
        working: bytes that a row takes beside its cache.
    """
    row = cache_sizes(config, length, itemsize).total + working
    return max(0, memory - parameter_bytes(config, itemsize)) // row


def cache_bound_from(config: GriffinConfig, batch: int, itemsize: int = 4) -> int | None:
    """The context from which the caches of B rows have as many bytes as the parameters (F.4); None
    if they never have."""
    share = parameter_bytes(config, itemsize) / batch
    tokens = bisect_left(
        range(LONGEST), share, key=lambda n: cache_sizes(config, n, itemsize).total
    )
    return None if tokens == LONGEST else tokens


def compute_bound_from(
    config: GriffinConfig, rates: Rates, context: int, itemsize: int = 4
) -> int | None:
    """The batch from which the operations of a step take longer than its bytes (F.2); None where
    each further row adds more bytes than operations."""
    costs = [step_costs(config, rows, np.array([context]), itemsize) for rows in (0, 1)]
    weights = costs[0].nbytes[0] / rates.bandwidth
    row = costs[1].flops[0] / rates.flops
    row -= (costs[1].nbytes[0] - costs[0].nbytes[0]) / rates.bandwidth
    return int(np.ceil(weights / row)) if row > 0 else None


def faster_from(seconds: np.ndarray, others: np.ndarray) -> int | None:
    """The number of steps from which a model stays faster than another; None if it never does.

    Args:
        seconds: float [N], of each step of the model.
        others: float [N], of each step of the other.
    """
    slower = np.flatnonzero(np.cumsum(seconds) >= np.cumsum(others))
    first = slower[-1] + 2 if len(slower) else 1
    return int(first) if first <= len(seconds) else None
