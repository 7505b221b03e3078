"""Log-likelihoods of token sequences, read in chunks with carried state."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from griffin_eval.runners import Runner

CHUNK = 512  # tokens of a row that one step reads at most

logger = logging.getLogger(__name__)


class Scored(NamedTuple):
    """Of every scored token: float64 log-probability in nats, and whether it was the likeliest."""

    logprobs: np.ndarray
    greedy: np.ndarray


class Scorable(NamedTuple):
    """Token ids, of which those from ``start`` on are scored given all before them; start >= 1."""

    tokens: Sequence[int]
    start: int


def score(
    runner: Runner,
    sequences: Sequence[Scorable],
    *,
    batch_size: int,
    softmax_dtype: str,
    done: Callable[[int, Scored], None],
    progress: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Scores sequences of any length, longest first, ``batch_size`` at a time.

    Memory does not grow with the length: a row is a state of fixed size and a chunk of tokens, and
    logits are computed only where a token is scored.

    Args:
        runner: the model.
        sequences: what to score.
        batch_size: rows of a step.
        softmax_dtype: in which logits are normalised.
        done: called with the index and the result of each sequence as soon as it is known.
        progress: called with the number of tokens that were read.
    """
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i].tokens))
    for first in range(0, len(order), batch_size):
        group = order[first : first + batch_size]
        # the last token is only ever a target
        rows = [np.asarray(sequences[i].tokens, np.int32) for i in group]
        inputs = [len(row) - 1 for row in rows]
        results = [
            Scored(np.empty(len(r) - s.start), np.empty(len(r) - s.start, bool))
            for r, s in zip(rows, (sequences[i] for i in group), strict=True)
        ]
        batch = min(batch_size, runner.bucket(len(group), smallest=1))
        state = runner.init_state(batch, runner.bucket(max(inputs[0], 1)))
        for begin in range(0, inputs[0], CHUNK):
            longest = min(CHUNK, inputs[0] - begin)
            tokens = np.zeros((batch, runner.bucket(longest)), np.int32)
            lengths = np.zeros(batch, np.int32)
            at, targets, slots = [], [], []
            for row, ids in enumerate(rows):
                count = int(np.clip(inputs[row] - begin, 0, CHUNK))
                tokens[row, :count] = ids[begin : begin + count]
                lengths[row] = count
                start = sequences[group[row]].start
                scored = np.arange(max(start - 1, begin), begin + count)
                at.append(np.stack([np.full(len(scored), row), scored - begin], 1))
                targets.append(ids[scored + 1])
                slots.append(scored + 1 - start)
            hidden, state = runner.step(tokens, lengths, state)
            logprobs, greedy = runner.score(
                hidden, np.concatenate(at), np.concatenate(targets), softmax_dtype
            )
            for row, found in enumerate(np.split(np.arange(len(logprobs)), _borders(slots))):
                results[row].logprobs[slots[row]] = logprobs[found]
                results[row].greedy[slots[row]] = greedy[found]
            progress(int(lengths.sum()))
        for index, result in zip(group, results, strict=True):
            done(index, result)


def _borders(parts: list[np.ndarray]) -> np.ndarray:
    return np.cumsum([len(part) for part in parts])[:-1]


def fastest_batch_size(runner: Runner, longest: int, most: int) -> int:
    """The batch size, a power of two up to ``most``, that reads the most tokens per second here.

    The state has a fixed size, so the answer depends on the chunk that is read, not on how long a
    document is. Growing stops when a size no longer pays or no longer fits into memory.

    Args:
        runner: the model.
        longest: tokens of the longest sequence to come.
        most: upper bound.
    """
    length = runner.bucket(min(longest, CHUNK))
    best, best_rate, size = 1, 0.0, 1
    while size <= most:
        try:
            rate = _tokens_per_second(runner, size, length)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            break
        logger.info("batch size %d reads %.0f tokens/s", size, rate)
        if rate < 1.1 * best_rate:
            break
        best, best_rate, size = size, rate, size * 2
    return best


def _tokens_per_second(runner: Runner, batch: int, length: int) -> float:
    tokens = np.ones((batch, length), np.int32)
    lengths = np.full(batch, length, np.int32)
    last = np.array([[0, 0]])
    times = []
    for _ in range(3):  # the first compiles
        begin = time.perf_counter()
        hidden, _ = runner.step(tokens, lengths, runner.init_state(batch, length))
        runner.greedy(hidden, last)  # waits for the device
        times.append(time.perf_counter() - begin)
    return batch * length / min(times[1:])


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or "out of memory" in text
        or "resource_exhausted" in text
        or "can't allocate memory" in text
    )
