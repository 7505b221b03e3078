"""Log-likelihoods of token sequences."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.engine.limits import Limits
from griffin_eval.engine.reader import Part, Reader
from griffin_eval.engine.stats import Stats
from griffin_eval.engine.tree import Scorable, Targets, build
from griffin_eval.errors import BadInput
from griffin_eval.runners import Runner


class Scored(NamedTuple):
    """Of every scored token: float64 log-probability in nats, and whether it was the likeliest."""

    logprobs: np.ndarray
    greedy: np.ndarray


class NotFinite(BadInput):
    """Requests whose results are not finite numbers, read by themselves too."""


def not_finite(what: str, named: Sequence[str], of: int, dtype: str) -> NotFinite:
    """What to raise for the named ones of so many."""
    names = "; ".join(named[:3]) + ("; …" if len(named) > 3 else "")
    return NotFinite(
        f"{len(named)} of {of} {what} are NaN or infinite: {names}; the weights may be "
        f"damaged, or {dtype} too narrow for them: try dtype=float32"
    )


def score(
    runner: Runner,
    sequences: Sequence[Scorable],
    *,
    limits: Limits,
    softmax_dtype: str,
    done: Callable[[int, Scored], None],
    progress: Callable[[int], None] = lambda tokens: None,
    name: Callable[[int], str] = "sequence {}".format,
) -> Stats:
    """Scores sequences of any number and length; what several have in common is read once.

    Memory does not grow with the length or the number of sequences: there are at most
    ``limits.states`` states of a fixed size, one chunk of tokens, and logits only where a token is
    scored.

    Args:
        runner: the model.
        sequences: what to score.
        limits: tokens and rows of a step, and states.
        softmax_dtype: in which logits are normalised.
        done: called with the index and the result of each sequence as soon as it is known.
        progress: called with the number of tokens that were read.
        name: what to call a sequence in an error.

    Returns:
        What was read and what was saved.

    Raises:
        NotFinite: some results were NaN or infinite; after all others were handed to ``done``.
        MemoryError: not even one token at a time fits, naming the sequence.
    """
    begin = time.perf_counter()
    scorer = _Scorer(runner, sequences, limits, softmax_dtype, done, progress, name)
    failed = scorer.run()
    scorer.stats.seconds = time.perf_counter() - begin
    if failed:
        named = [*map(name, failed)]
        raise not_finite("log-likelihoods", named, len(sequences), runner.dtype)
    return scorer.stats


class _Scorer:
    """The results of one call, filled as the tree is read."""

    def __init__(
        self,
        runner: Runner,
        sequences: Sequence[Scorable],
        limits: Limits,
        softmax_dtype: str,
        done: Callable[[int, Scored], None],
        progress: Callable[[int], None],
        name: Callable[[int], str],
    ):
        self._runner, self._sequences, self._limits = runner, sequences, limits
        self._softmax_dtype, self._done = softmax_dtype, done
        self._progress, self._name = progress, name
        self._capacity = max((len(s.tokens) for s in sequences), default=1)
        lengths = np.array([len(s.tokens) - s.start for s in sequences], np.int64)
        self._first = np.concatenate([[0], np.cumsum(lengths)])  # of each sequence's results
        self._logprobs = np.empty(self._first[-1])
        self._greedy = np.empty(self._first[-1], bool)
        self._missing = lengths
        self._failed: list[int] = []
        self.stats = Stats(tokens_requested=sum(len(s.tokens) - 1 for s in sequences))

    def run(self) -> list[int]:
        """Scores everything; gives the sequences whose scores are not finite."""
        for index in np.flatnonzero(self._missing == 0):
            self._report(int(index))
        self._read(self._sequences, np.arange(len(self._sequences)))
        # A NaN may have come from a sequence in the same step: each is read by itself once more.
        suspects, self._failed = self._failed, []
        for index in suspects:
            sequence = self._sequences[index]
            self._missing[index] = len(sequence.tokens) - sequence.start
            self._read([sequence], np.array([index]))
        return self._failed

    def _read(self, sequences: Sequence[Scorable], indices: np.ndarray) -> None:
        self._indices = indices
        reader = Reader(
            self._runner,
            build(sequences),
            self._limits,
            self._capacity,
            self.stats,
            visit=self._visit,
            progress=self._progress,
            name=lambda index: self._name(int(indices[index])),
        )
        while reader.busy:
            reader.fill()
            reader.step()

    def _visit(self, hidden: Any, chunk: list[Part], bases: np.ndarray) -> None:
        found, at = [], []
        for (row, count, *_), base in zip(chunk, bases, strict=True):
            if row.edge.targets is None:
                continue
            begin = row.at - row.edge.start
            new = max(row.scored - row.edge.start, begin)
            offsets = row.edge.targets.offset
            part = slice(*np.searchsorted(offsets, [new, begin + count]))
            found.append(Targets(*(column[part] for column in row.edge.targets)))
            at.append(offsets[part] - begin + base)
        if not sum(map(len, at)):
            return
        _, token, sequence, place = (np.concatenate(c) for c in zip(*found, strict=True))
        positions, which = np.unique(np.concatenate(at), return_inverse=True)
        logprobs, greedy = self._runner.score(hidden, positions, token, which, self._softmax_dtype)
        index = self._indices[sequence]
        place = self._first[index] + place
        self._logprobs[place], self._greedy[place] = logprobs, greedy
        np.subtract.at(self._missing, index, 1)
        for complete in np.unique(index[self._missing[index] == 0]):
            self._report(int(complete))

    def _report(self, index: int) -> None:
        part = slice(*self._first[index : index + 2])
        result = Scored(self._logprobs[part], self._greedy[part])
        if np.isfinite(result.logprobs).all():
            self._done(index, result)
        else:
            self._failed.append(index)
