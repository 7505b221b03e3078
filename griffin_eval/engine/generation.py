"""Generation: prompts read as a tree, then continued token by token in a batch that refills."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from griffin_eval.engine.limits import Limits, is_out_of_memory
from griffin_eval.engine.reader import Reader
from griffin_eval.engine.scoring import not_finite
from griffin_eval.engine.stats import Stats
from griffin_eval.engine.tree import build_prompts
from griffin_eval.runners.protocol import Runner
from griffin_eval.states.state_cache import StateCache

logger = logging.getLogger(__name__)


class Sampling(NamedTuple):
    """How a token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token; else logits are divided by it.
        top_k: number of likeliest tokens to choose from; 0 for all.
        top_p: total probability of the likeliest tokens to choose from.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


GREEDY = Sampling()


class Prompt(NamedTuple):
    """A prompt to continue.

    Attributes:
        tokens: ids, at least one.
        max_new_tokens: most tokens to generate.
        sampling: how they are chosen.
    """

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
) -> Stats:
    """Continues every prompt; shared prefixes are read once.

    Up to ``limits.rows`` prompts are continued at a time, if the runner should take so many. As
    soon as one is finished the next takes its row. Padding never reaches a row's state and every
    prompt has its own random numbers, so what a prompt gets does not depend on what else is in the
    batch.

    Args:
        runner: the model.
        prompts: token ids, and how to continue each of them.
        limits: tokens and rows of a step, and bytes of states.
        eos_ids: tokens that end a continuation; they are not part of it.
        seed: of the random numbers; every prompt has its own stream.
        subset: indices of the prompts to continue; None for all.
        should_stop: called with the index of a prompt and its new tokens after each new one;
            True ends it.
        on_result: called with the index of a prompt and all its new tokens.
        describe: names a prompt, given its index, in an error.
        cache: states on disk, from which reading begins where it can; None for none.

    Returns:
        Counts of tokens, steps and seconds.

    Raises:
        NotFinite: logits of some prompts were NaN; raised after ``on_result`` got all others.
        MemoryError: not even one prompt at a time fits into memory; the message names it.
    """
    begin = time.perf_counter()
    stats = Stats()
    left = dict.fromkeys(range(len(prompts)) if subset is None else subset)
    asked, suspects, failed = len(left), set[int](), list[int]()

    def finish(index: int, ids: list[int] | None) -> None:
        if ids is None and index not in suspects:
            suspects.add(index)  # the NaN may have come from a prompt in the same step
            return
        del left[index]
        if ids is None:
            failed.append(index)
            return
        stats.tokens_requested += len(prompts[index].tokens) - 1 + len(ids)
        on_result(index, ids)

    while left:
        indices = [i for i in left if i not in suspects] or [next(iter(left))]
        try:
            batch = _Batch(
                runner, prompts, indices, limits, eos_ids, seed, should_stop, finish, stats
            )
            batch.run(describe, cache)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if limits == limits.halved():
                raise MemoryError(
                    f"{describe(indices[0])}: not even one row at a time fits into memory"
                ) from error
            limits = limits.halved()
            logger.warning("out of memory: unfinished prompts start again with %s", limits)
    stats.seconds = time.perf_counter() - begin
    if failed:
        raise not_finite("generations", [*map(describe, failed)], asked, runner.dtype)
    return stats


class _Batch:
    """Rows that are continued together, refilled from the prompts that wait."""

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
        self._state = runner.start_decoding(rows, self._capacity)
        self._prompt_in: list[int | None] = [None] * rows  # index of the prompt in each row
        self._new: list[list[int]] = [[] for _ in range(rows)]
        self._choosers = [Chooser(GREEDY, 0, 0)] * rows
        self._last = np.zeros(rows, np.int64)  # the token that each row reads next

    def run(self, describe: Callable[[int], str], cache: StateCache | None) -> None:
        # The last token of a prompt is read by the first step that continues it.
        reader = Reader(
            self._runner,
            build_prompts([self._prompts[i].tokens[:-1] for i in self._indices]),
            self._limits,
            self._capacity,
            self._stats,
            on_step=lambda hidden, parts, bases: None,
            progress=lambda tokens: None,
            describe=lambda i: describe(self._indices[i]),
            cache=cache,
        )
        while True:
            while reader.busy and (free := self._free_rows()):
                if reached := reader.fill(len(free)):
                    rows = free[: len(reached)]
                    self._state = self._runner.insert_rows(
                        self._state,
                        np.array(rows),
                        reader.pool,
                        np.array([slot for _, slot in reached]),
                    )
                    for row, (i, _) in zip(rows, reached, strict=True):
                        self._begin(row, self._indices[i])
                reader.step()
            if len(self._free_rows()) == len(self._prompt_in):
                break
            self._continue()

    def _free_rows(self) -> list[int]:
        return [row for row, index in enumerate(self._prompt_in) if index is None]

    def _begin(self, row: int, index: int) -> None:
        prompt = self._prompts[index]
        self._prompt_in[row], self._new[row], self._last[row] = index, [], prompt.tokens[-1]
        self._choosers[row] = Chooser(prompt.sampling, self._seed, index)
        if prompt.max_new_tokens < 1:
            self._prompt_in[row] = None
            self._finish(index, [])

    def _continue(self) -> None:
        """Reads one token in every taken row and chooses the next."""
        active = np.array([index is not None for index in self._prompt_in])
        hidden, self._state = self._runner.decode_step(
            self._state, self._last, active.astype(np.int64)
        )
        drawn = [
            row
            for row, index in enumerate(self._prompt_in)
            if index is not None and self._prompts[index].sampling.temperature
        ]
        chosen = np.array(self._runner.greedy(hidden, np.arange(len(active))))
        if drawn:
            for row, logits in zip(
                drawn, self._runner.logits(hidden, np.array(drawn)), strict=True
            ):
                if chosen[row] >= 0:
                    chosen[row] = self._choosers[row](logits)
        self._stats.steps += 1
        self._stats.tokens_computed += int(active.sum())
        for row in np.flatnonzero(active):
            token, index, ids = int(chosen[row]), self._prompt_in[row], self._new[row]
            assert index is not None
            if token < 0:
                self._prompt_in[row] = None
                self._finish(index, None)
                continue
            ended = token in self._eos_ids
            if not ended:
                ids.append(token)
                self._last[row] = token
                self._stats.tokens_generated += 1
                ended = len(ids) >= self._prompts[index].max_new_tokens or self._should_stop(
                    index, ids
                )
            if ended:
                self._prompt_in[row] = None
                self._finish(index, ids)


class Chooser:
    """Draws tokens for one prompt, from random numbers of its own."""

    def __init__(self, sampling: Sampling, seed: int, index: int):
        self._sampling = sampling
        self._rng = np.random.default_rng([seed, index])

    def __call__(self, logits: np.ndarray) -> int:
        scaled = logits.astype(np.float64) / self._sampling.temperature
        order = np.argsort(-scaled, kind="stable")
        if self._sampling.top_k:
            order = order[: self._sampling.top_k]
        p = np.exp(scaled[order] - scaled[order[0]])
        p /= p.sum()
        if self._sampling.top_p < 1:
            before = np.cumsum(p) - p  # keeps the first token that crosses the line
            order, p = order[before < self._sampling.top_p], p[before < self._sampling.top_p]
            p /= p.sum()
        return int(self._rng.choice(order, p=p))
