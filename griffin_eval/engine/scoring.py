"""Log-likelihoods of token sequences."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.engine.limits import Limits
from griffin_eval.engine.pool import Part
from griffin_eval.engine.reader import Reader
from griffin_eval.engine.recovery import not_finite_alone
from griffin_eval.engine.stats import Stats
from griffin_eval.engine.tree import Scorable, build
from griffin_eval.errors import BadInput
from griffin_eval.runners.protocol import Runner
from griffin_eval.states.state_cache import StateCache


class Scored(NamedTuple):
    """Scores of the N scored tokens of a sequence. Logarithms are in nats."""

    logprobs: np.ndarray  # float64 [N]
    greedy: np.ndarray  # bool [N], whether each token was the most likely one
    ranks: np.ndarray | None = None  # int64 [N], 1 plus the number of more likely tokens
    entropies: np.ndarray | None = None  # float64 [N], entropy of each prediction


class NotFinite(BadInput):
    """Requests whose results are NaN or infinite even when each is computed alone."""


def cause_of_not_finite(dtype: str) -> str:
    """Return the likely reason why results in this dtype are not finite, and what to do."""
    if dtype in ("float32", "float64"):
        return "the weights may be damaged, or their training have diverged"
    return f"the weights may be damaged, or {dtype} too narrow for them: try dtype=float32"


def not_finite(
    what: str, named: Sequence[str], of: int, dtype: str, more: bool = False
) -> NotFinite:
    """Return the error for ``named`` requests among ``of``; ``more`` means that others may fail."""
    count = f"{'at least ' * more}{len(named)} of {of}"
    return NotFinite(
        f"{count} {what} are NaN or infinite: {'; '.join(named)}; {cause_of_not_finite(dtype)}"
    )


def score(
    runner: Runner,
    sequences: Sequence[Scorable],
    *,
    limits: Limits,
    softmax_dtype: str,
    on_result: Callable[[int, Scored], None],
    progress: Callable[[int], None] = lambda tokens: None,
    describe: Callable[[int], str] = "sequence {}".format,
    details: bool = False,
    cache: StateCache | None = None,
) -> Stats:
    """Score any number of sequences of any length; shared prefixes are read once.

    Memory does not grow with the length or the number of sequences: states of a fixed size take at
    most ``limits.state_bytes``, a step reads at most ``limits.tokens`` tokens, and logits are
    computed only where a token is scored.

    The first failing sequences are named by `NotFinite` after ``on_result`` was called for the
    others, and a sequence that does not fit into memory alone by `MemoryError`.

    Args:
        softmax_dtype: Dtype in which logits are normalised.
        on_result: Function of a sequence's index and scores, called as soon as they are complete.
        progress: Function of the number of tokens that were read for the first time.
        describe: Function that names a sequence by its index, for error messages.
        details: Whether to compute ranks and entropies.
        cache: Cache of states on disk to start from.
    """
    begin = time.perf_counter()
    scorer = _Scorer(
        runner, sequences, limits, softmax_dtype, on_result, progress, describe, details, cache
    )
    failed, more = scorer.run()
    scorer.stats.seconds = time.perf_counter() - begin
    if failed:
        named = [*map(describe, failed)]
        raise not_finite("log-likelihoods", named, len(sequences), runner.dtype, more)
    return scorer.stats


class _Scorer:
    """Results of one call of `score`, filled as the tree is read."""

    def __init__(
        self,
        runner: Runner,
        sequences: Sequence[Scorable],
        limits: Limits,
        softmax_dtype: str,
        on_result: Callable[[int, Scored], None],
        progress: Callable[[int], None],
        describe: Callable[[int], str],
        details: bool,
        cache: StateCache | None,
    ):
        self._cache = cache
        self._runner, self._sequences, self._limits = runner, sequences, limits
        self._softmax_dtype, self._on_result = softmax_dtype, on_result
        self._progress, self._describe = progress, describe
        self._tokens = [np.asarray(sequence.tokens, np.int32) for sequence in sequences]
        self._capacity = max((len(s.tokens) for s in sequences), default=1)
        lengths = np.array([len(s.tokens) - s.start for s in sequences], np.int64)
        self._first = np.concatenate([[0], np.cumsum(lengths)])  # index of each sequence's results
        self._logprobs = np.empty(self._first[-1])
        self._greedy = np.empty(self._first[-1], bool)
        most = self._first[-1] if details else 0
        self._ranks, self._entropies = np.empty(most, np.int64), np.empty(most)
        self._details = details
        self._missing = lengths
        self._failed: list[int] = []
        self.stats = Stats(tokens_requested=sum(len(s.tokens) - 1 for s in sequences))

    def run(self) -> tuple[list[int], bool]:
        """Score everything; return the indices of sequences whose scores are not finite, and
        whether there may be more."""
        for index in np.flatnonzero(self._missing == 0):
            self._report(int(index))
        return not_finite_alone(self._read(range(len(self._sequences))), self._read)

    def _read(self, indices: Sequence[int]) -> list[int]:
        """Score some sequences; return those whose scores are not finite."""
        self._indices, self._failed = np.array(indices, np.int64), []
        sequences = [self._sequences[index] for index in indices]
        self._missing[self._indices] = [len(one.tokens) - one.start for one in sequences]
        reader = Reader(
            self._runner,
            build(sequences),
            self._limits,
            self._capacity,
            self.stats,
            on_step=self._on_step,
            progress=self._progress,
            describe=lambda index: self._describe(indices[index]),
            cache=self._cache,
        )
        while reader.busy:
            reader.fill()
            reader.step()
        return self._failed

    def _on_step(self, hidden: Any, parts: list[Part], bases: np.ndarray) -> None:
        """Score the targets after the tokens that a step read."""
        # For each run of adjacent targets: the index of the sequence, the number of targets, the
        # index of the first one's result, and the hidden vector that predicts it.
        runs: list[tuple[int, int, int, int]] = []
        tokens: list[np.ndarray] = []
        for (active, read, *_), base in zip(parts, bases.tolist(), strict=True):
            edge = active.edge
            begin = active.position - edge.start
            new = max(active.scored - edge.start, begin)
            for targets in edge.targets:
                start, end = max(targets.start, new), min(targets.end, begin + len(read))
                if start < end:
                    index = int(self._indices[targets.sequence])
                    place = targets.place + start - targets.start
                    runs.append(
                        (index, end - start, self._first[index] + place, start - begin + base)
                    )
                    first = self._sequences[index].start + place
                    tokens.append(self._tokens[index][first : first + end - start])
        if not runs:
            return
        index, count, place, after = np.array(runs).T
        among = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        place, after = np.repeat(place, count) + among, np.repeat(after, count) + among
        positions, position_of = np.unique(after, return_inverse=True)
        asked = hidden, positions, np.concatenate(tokens), position_of, self._softmax_dtype
        if self._details:
            (
                self._logprobs[place],
                self._greedy[place],
                self._ranks[place],
                self._entropies[place],
            ) = self._runner.score(*asked, details=True)
        else:
            self._logprobs[place], self._greedy[place] = self._runner.score(*asked)
        np.subtract.at(self._missing, index, count)
        for complete in np.unique(index[self._missing[index] == 0]):
            self._report(int(complete))

    def _report(self, index: int) -> None:
        part = slice(*self._first[index : index + 2])
        result = Scored(self._logprobs[part], self._greedy[part])
        if self._details:
            result = Scored(*result[:2], self._ranks[part], self._entropies[part])
        if np.isfinite(result.logprobs).all():
            self._on_result(index, result)
        else:
            self._failed.append(index)
