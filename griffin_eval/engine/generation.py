"""Generation: reads prompts as a radix tree, then continues them in a batch that is refilled."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from griffin_eval.engine.limits import Limits
from griffin_eval.engine.pool import Pool
from griffin_eval.engine.reader import Reader
from griffin_eval.engine.recovery import not_finite_alone, smaller
from griffin_eval.engine.rows import Row, Rows
from griffin_eval.engine.sampling import GREEDY, Chooser, Sampling
from griffin_eval.engine.scoring import not_finite
from griffin_eval.engine.stats import Stats
from griffin_eval.engine.tree import build_prompts
from griffin_eval.runners.protocol import Runner
from griffin_eval.states.state_cache import StateCache


class Prompt(NamedTuple):
    """Token ids (at least one) to continue with up to ``max_new_tokens`` tokens."""

    tokens: Sequence[int] | np.ndarray
    max_new_tokens: int
    sampling: Sampling = GREEDY


def generate(
    runner: Runner,
    prompts: Sequence[Prompt],
    *,
    limits: Limits,
    eos_ids: frozenset[int],
    seed: int = 0,
    subset: Sequence[int] | None = None,
    should_stop: Callable[[int, list[int]], bool] = lambda index, ids: False,
    on_result: Callable[[int, list[int]], None],
    describe: Callable[[int], str] = "prompt {}".format,
    cache: StateCache | None = None,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Stats:
    """Continue every prompt; shared prefixes are read once.

    Up to ``limits.rows`` prompts are continued at a time, or ``runner.decode_rows`` if that is
    less. When a prompt is finished, the next one takes its row. Padding never reaches a row's state
    and every prompt has its own random numbers, so the continuation of a prompt does not depend on
    the rest of the batch.

    The first failing prompts are named by `NotFinite` after ``on_result`` was called for the
    others, and a prompt that does not fit into memory alone by `MemoryError`.

    Args:
        eos_ids: Tokens that end a continuation; they are not part of it.
        seed: Seed of the random numbers; every prompt has its own stream.
        subset: Indices of the prompts to continue; None for all.
        should_stop: Function of a prompt's index and its new tokens, called after each new token.
        on_result: Function of a prompt's index and all its new tokens.
        describe: Function that names a prompt by its index, for error messages.
        cache: Cache of states on disk to start from.
        progress: Function of the number of prompt tokens that were read for the first time.
    """
    begin = time.perf_counter()
    stats = Stats()
    indices = list(range(len(prompts)) if subset is None else subset)

    def attempt(indices: list[int]) -> list[int]:
        """Continue prompts; return those whose logits were NaN."""
        nonlocal limits
        left, spoilt = dict.fromkeys(indices), list[int]()

        def finish(index: int, ids: list[int] | None) -> None:
            del left[index]
            if ids is None:
                spoilt.append(index)
                return
            stats.tokens_requested += len(prompts[index].tokens) - 1 + len(ids)
            on_result(index, ids)

        while left:
            waiting, batch = list(left), None  # free the memory of the failed one first
            try:
                batch = _Batch(
                    runner, prompts, waiting, limits, eos_ids, seed, should_stop, finish, stats
                )
                batch.run(describe, cache, progress)
            except (MemoryError, RuntimeError) as error:
                limits = smaller(limits, error, describe(waiting[0]))
        return spoilt

    failed, more = not_finite_alone(attempt(indices), attempt)
    stats.seconds = time.perf_counter() - begin
    if failed:
        named = [*map(describe, failed)]
        raise not_finite("generations", named, len(indices), runner.dtype, more)
    return stats


class _Batch:
    """Rows that are continued together and refilled from the waiting prompts."""

    def __init__(
        self,
        runner: Runner,
        prompts: Sequence[Prompt],
        indices: list[int],
        limits: Limits,
        eos_ids: frozenset[int],
        seed: int,
        should_stop: Callable[[int, list[int]], bool],
        finish: Callable[[int, list[int] | None], None],
        stats: Stats,
    ):
        self._runner, self._prompts, self._indices = runner, prompts, indices
        self._stats = stats
        self._eos_ids, self._seed = eos_ids, seed
        self._should_stop, self._finish = should_stop, finish
        capacity = max(len(prompts[i].tokens) + prompts[i].max_new_tokens for i in indices)
        self._capacity = runner.padded_tokens(capacity)
        self._limits = limits
        most = limits.fitting(runner.state_bytes(self._capacity)).rows
        rows = min(most, runner.decode_rows, runner.padded_batch(len(indices)))
        self._rows, self._count = Rows(runner, rows, self._capacity), rows
        self._new: dict[int, list[int]] = {}  # generated tokens by prompt, for the taken rows

    def run(
        self,
        describe: Callable[[int], str],
        cache: StateCache | None,
        progress: Callable[[int], object],
    ) -> None:
        # The first decoding step reads the last token of a prompt.
        reader = Reader(
            self._runner,
            build_prompts([self._prompts[i].tokens[:-1] for i in self._indices]),
            self._limits,
            self._capacity,
            self._stats,
            on_step=lambda hidden, parts, bases: None,
            progress=progress,
            describe=lambda i: describe(self._indices[i]),
            cache=cache,
        )
        while True:
            while reader.busy and (free := self._count - len(self._rows.taken)):
                reached = reader.fill(free)
                if reached:
                    self._begin(reader.pool, reached)
                reader.step()
            if not self._rows.taken:
                break
            self._continue()

    def _begin(self, pool: Pool, reached: list[tuple[int, int]]) -> None:
        """Give rows to prompts that have been read, pairs of (place in ``indices``, slot)."""
        indices = [self._indices[place] for place, _ in reached]
        documents = [
            Row(index, int(prompt.tokens[-1]), Chooser(prompt.sampling, self._seed, index))
            for index in indices
            for prompt in [self._prompts[index]]
        ]
        self._rows.put(pool, [slot for _, slot in reached], documents)
        for index in indices:
            self._new[index] = []
            if self._prompts[index].max_new_tokens < 1:
                self._end(index, [])

    def _end(self, index: int, ids: list[int] | None) -> None:
        self._rows.leave(index)
        del self._new[index]
        self._finish(index, ids)

    def _continue(self) -> None:
        """Read one token in every taken row and choose the next."""
        taken = self._rows.taken
        _, chosen = self._rows.step()
        self._stats.steps += 1
        self._stats.tokens_computed += len(chosen)
        for row, token in chosen.items():
            index = taken[row].owner
            ids = self._new[index]
            if token < 0:
                self._end(index, None)
                continue
            ended = token in self._eos_ids
            if not ended:
                ids.append(token)
                self._stats.tokens_generated += 1
                ended = len(ids) >= self._prompts[index].max_new_tokens or self._should_stop(
                    index, ids
                )
            if ended:
                self._end(index, ids)
