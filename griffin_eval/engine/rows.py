"""A decoding batch: each row continues one document, one token a step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.engine.pool import Pool
from griffin_eval.engine.sampling import Chooser
from griffin_eval.runners.protocol import Runner


class Row(NamedTuple):
    """A document: its owner, the token to read next, and the chooser of later tokens."""

    owner: Any
    last: int
    chooser: Chooser


class Rows:
    """A decoding batch whose rows are free or continue one document each of ``capacity`` tokens."""

    def __init__(self, runner: Runner, count: int, capacity: int):
        self._runner, self._count = runner, count
        self._state = runner.start_decoding(count, capacity)
        self._last = np.zeros(count, np.int64)
        self.taken: dict[int, Row] = {}

    @property
    def free(self) -> list[int]:
        """Numbers of the free rows."""
        return [row for row in range(self._count) if row not in self.taken]

    @property
    def owners(self) -> list[Any]:
        """Owners of the documents in the batch."""
        return [row.owner for row in self.taken.values()]

    def put(self, pool: Pool, slots: Sequence[int], documents: Sequence[Row]) -> None:
        """Start to continue documents, at most as many as there are free rows. ``slots`` of the
        pool hold the state before each document's last token; -1 for a document of one token."""
        rows = self.free[: len(documents)]
        self._insert(pool, rows, slots)
        for row, document in zip(rows, documents, strict=True):
            self.taken[row], self._last[row] = document, document.last

    def _insert(self, pool: Pool, rows: Sequence[int], slots: Sequence[int]) -> None:
        self._state = self._runner.insert_rows(
            self._state, np.array(rows), pool.states, np.array(slots)
        )

    def leave(self, owner: Any) -> None:
        """Free the row of an owner's document, if it has one."""
        self.taken = {n: row for n, row in self.taken.items() if row.owner != owner}

    def step(self) -> tuple[Any, dict[int, int]]:
        """Read the last token of every document and choose the next. Returns hidden vectors, and
        the chosen token by row number; -1 where logits are NaN."""
        rows = sorted(self.taken)
        active = np.zeros(self._count, np.int64)
        active[rows] = 1
        hidden, self._state = self._runner.decode_step(self._state, self._last, active)
        chosen = np.array(self._runner.greedy(hidden, np.arange(self._count)))
        if drawn := [row for row in rows if self.taken[row].chooser.draws]:
            logits = self._runner.logits(hidden, np.array(drawn))
            for row, scores in zip(drawn, logits, strict=True):
                if chosen[row] >= 0:
                    chosen[row] = self.taken[row].chooser(scores)
        self._last[rows] = np.maximum(chosen[rows], 0)
        return hidden, {row: int(chosen[row]) for row in rows}

    def warm_up(self, pool: Pool, softmax_dtype: str) -> None:
        """Run every shape of step once with empty rows, ``top`` values above 1 excepted."""
        none, every = np.zeros(self._count, np.int64), np.arange(self._count)
        self._insert(pool, [0], [-1])
        hidden, self._state = self._runner.decode_step(self._state, none, none)
        self._runner.greedy(hidden, every)
        for count in {1, self._count}:  # rows that sample or need log-probabilities
            at = every[:count]
            self._runner.logits(hidden, at)
            self._runner.score(hidden, at, none[:count], at, softmax_dtype, top=1)
