"""Generation: prompts of any lengths read together, then token by token with carried state."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from griffin_eval.runners import Runner
from griffin_eval.scoring import CHUNK


class Sampling(NamedTuple):
    """How a token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token; else logits are divided by it.
        top_k: choose among this many likeliest tokens; 0 for all.
        top_p: choose among the likeliest tokens that together have this probability.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


class Prompt(NamedTuple):
    """Token ids to continue, at least one, and the most tokens to add."""

    tokens: Sequence[int]
    max_new_tokens: int


GREEDY = Sampling()


def generate(
    runner: Runner,
    prompts: Sequence[Prompt],
    *,
    batch_size: int,
    eos_ids: frozenset[int],
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stop: Callable[[int, list[int]], bool] = lambda index, ids: False,
    done: Callable[[int, list[int]], None],
) -> None:
    """Continues every prompt, longest first, ``batch_size`` at a time.

    Padding never reaches a row's state, so what a prompt gets does not depend on its batch.

    Args:
        runner: the model.
        prompts: what to continue.
        batch_size: rows of a step.
        eos_ids: tokens that end a continuation; they are not part of it.
        sampling: how tokens are chosen.
        seed: of the random numbers; every prompt has its own stream.
        stop: called with the index of a prompt and its new tokens after each one; true ends it.
        done: called with the index of a prompt and its new tokens once they are complete.
    """
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i].tokens))
    for first in range(0, len(order), batch_size):
        group = order[first : first + batch_size]
        batch = _Batch(
            runner,
            [prompts[i] for i in group],
            rows=min(batch_size, runner.bucket(len(group), smallest=1)),
            eos_ids=eos_ids,
            choosers=[_Chooser(sampling, seed, i) for i in group] if sampling.temperature else None,
            stops=[partial(stop, i) for i in group],
        )
        batch.run()
        for index, ids in zip(group, batch.new, strict=True):
            done(index, ids)


class _Batch:
    """Prompts that run together, one row each, longest first."""

    def __init__(
        self,
        runner: Runner,
        prompts: list[Prompt],
        *,
        rows: int,
        eos_ids: frozenset[int],
        choosers: list["_Chooser"] | None,
        stops: list[Callable[[list[int]], bool]],
    ):
        self.runner, self.prompts, self.rows = runner, prompts, rows
        self.eos_ids, self.choosers, self.stops = eos_ids, choosers, stops
        capacity = max(len(p.tokens) + p.max_new_tokens for p in prompts)
        self.state = runner.init_state(self.rows, runner.bucket(capacity))
        self.new: list[list[int]] = [[] for _ in prompts]
        self.active = np.array([p.max_new_tokens > 0 for p in prompts])

    def run(self) -> None:
        for begin in range(0, len(self.prompts[0].tokens), CHUNK):
            parts = [prompt.tokens[begin : begin + CHUNK] for prompt in self.prompts]
            ends = [
                row
                for row, (part, prompt) in enumerate(zip(parts, self.prompts, strict=True))
                if part and begin + len(part) == len(prompt.tokens) and self.active[row]
            ]
            self._step(parts, ends)
        while self.active.any():
            last = [
                ids[-1:] if active else []
                for ids, active in zip(self.new, self.active, strict=True)
            ]
            self._step(last, np.flatnonzero(self.active).tolist())

    def _step(self, parts: Sequence[Sequence[int]], continued: list[int]) -> None:
        """Reads a part of each row, then chooses a token for the rows to be continued."""
        lengths = np.zeros(self.rows, np.int32)
        lengths[: len(parts)] = [len(part) for part in parts]
        tokens = np.zeros((self.rows, self.runner.bucket(int(lengths.max()))), np.int32)
        for row, part in enumerate(parts):
            tokens[row, : len(part)] = part
        hidden, self.state = self.runner.step(tokens, lengths, self.state)
        if not continued:
            return
        at = np.stack([np.asarray(continued), lengths[continued] - 1], 1)
        if self.choosers is None:
            chosen = self.runner.greedy(hidden, at).tolist()
        else:
            logits = self.runner.logits(hidden, at)
            chosen = [self.choosers[row](x) for row, x in zip(continued, logits, strict=True)]
        for row, token in zip(continued, chosen, strict=True):
            if token in self.eos_ids:
                self.active[row] = False
                continue
            ids = self.new[row]
            ids.append(token)
            full = len(ids) >= self.prompts[row].max_new_tokens
            self.active[row] = not full and not self.stops[row](ids)


class _Chooser:
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
