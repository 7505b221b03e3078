"""How much a step may hold, and the measurement that finds the best size."""

import logging
import time
from typing import NamedTuple

import numpy as np

from griffin_eval.runners.protocol import Runner

SMALLEST_STEP = 16  # tokens
SHORT_EDGE = 16  # tokens of the edges that rows are measured with: a question, a choice

logger = logging.getLogger(__name__)


class Limits(NamedTuple):
    """Bounds of what is in memory at a time.

    Attributes:
        tokens: most tokens that a step reads.
        rows: most edges or documents that a step reads from.
        state_bytes: memory budget in bytes for states that are kept between steps (at least one
            state is always kept); None for 25% of the free memory.
    """

    tokens: int
    rows: int
    state_bytes: int | None = None

    def halved(self) -> "Limits":
        """The next smaller limits; the same ones if there are none."""
        return self._replace(
            tokens=max(self.tokens // 2, SMALLEST_STEP), rows=max(self.rows // 2, 1)
        )

    def __str__(self) -> str:
        return f"at most {self.tokens} tokens and {self.rows} rows a step"


def fastest_rows(runner: Runner, most: int, *, generate: bool) -> int:
    """The number of rows, a power of two up to ``most``, that reads most tokens per second here.

    Doubling stops at a size that gains less than 10% or does not fit into memory.

    Args:
        runner: the model.
        most: upper bound.
        generate: measure decoding, one token of each row a step; else reading short edges, such
            as questions and choices (a long edge fills a step by itself).
    """
    measure = _decode_rate if generate else _read_rate
    best, best_rate, rows = 1, 0.0, 1
    while rows <= most and (generate or rows * SHORT_EDGE <= runner.step_tokens):
        try:
            rate = measure(runner, rows)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            break
        logger.info("%d rows at a time: %.0f tokens/s", rows, rate)
        if rate < 1.1 * best_rate:
            break
        best, best_rate, rows = rows, rate, rows * 2
    return best


def _decode_rate(runner: Runner, rows: int) -> float:
    tokens, state = np.ones(rows, np.int64), runner.start_decoding(rows, runner.padded_tokens(8))
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        hidden, state = runner.decode_step(state, tokens, np.ones(rows, np.int64))
        runner.greedy(hidden, np.arange(rows))
        times.append(time.perf_counter() - begin)
    return rows / min(times[1:])


def _read_rate(runner: Runner, rows: int) -> float:
    tokens = np.ones(rows * SHORT_EDGE, np.int32)
    lengths, fresh = np.full(rows, SHORT_EDGE), np.full(rows, -1)
    pool = runner.open_pool(rows, runner.padded_tokens(SHORT_EDGE))
    times = []
    for _ in range(3):  # the first compiles
        begin = time.perf_counter()
        hidden, pool = runner.read(pool, tokens, lengths, fresh, np.arange(rows))
        runner.greedy(hidden, np.array([0]))  # waits for the device
        times.append(time.perf_counter() - begin)
    return len(tokens) / min(times[1:])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of a framework means that memory ran out."""
    text = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or "out of memory" in text
        or "resource_exhausted" in text
        or "can't allocate memory" in text
    )
