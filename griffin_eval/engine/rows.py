"""Documents that are continued together: a row each, and a token of each in a step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.engine.pool import Pool
from griffin_eval.engine.sampling import Chooser
from griffin_eval.runners.protocol import Runner


class Row(NamedTuple):
    """A document that is continued.

    Attributes:
        owner: whose it is, as the caller knows it.
        last: token that is read next.
        chooser: of the tokens that follow.
    """

    owner: Any
    last: int
    chooser: Chooser


class Rows:
    """A batch of rows that are free, or continue a document each.

    Args:
        capacity: most tokens of a document, padded.

    Attributes:
        taken: the rows that continue documents, by number.
    """

    def __init__(self, runner: Runner, count: int, capacity: int):
        self._runner, self._count = runner, count
        self._state = runner.start_decoding(count, capacity)
        self._last = np.zeros(count, np.int64)
        self.taken: dict[int, Row] = {}

    @property
    def free(self) -> list[int]:
        """Numbers of the rows that are free."""
        return [row for row in range(self._count) if row not in self.taken]

    @property
    def owners(self) -> list[Any]:
        """Whose documents are continued."""
        return [row.owner for row in self.taken.values()]

    def put(self, pool: Pool, slots: Sequence[int], documents: Sequence[Row]) -> None:
        """Begins to continue documents, at most as many as there are free rows.

        Args:
            slots: in it, of the state before each document's last token; -1 where that is its
                first.
        """
        rows = self.free[: len(documents)]
        self._insert(pool, rows, slots)
        for row, document in zip(rows, documents, strict=True):
            self.taken[row], self._last[row] = document, document.last

    def _insert(self, pool: Pool, rows: Sequence[int], slots: Sequence[int]) -> None:
        self._state = self._runner.insert_rows(
            self._state, np.array(rows), pool.states, np.array(slots)
        )

    def leave(self, owner: Any) -> None:
        """Frees the row of a document, if it has one."""
        self.taken = {n: row for n, row in self.taken.items() if row.owner != owner}

    def step(self) -> tuple[Any, dict[int, int]]:
        """Reads the last token of every document and chooses the next.

        Returns:
            Hidden vectors, of which each row's is at its number; and the token that was chosen in
            each taken row, -1 where logits are NaN.
        """
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
        """Runs every shape of step once, of empty rows. Numbers of likeliest tokens other than 1
        are not among them."""
        none, every = np.zeros(self._count, np.int64), np.arange(self._count)
        self._insert(pool, [0], [-1])
        hidden, self._state = self._runner.decode_step(self._state, none, none)
        self._runner.greedy(hidden, every)
        for count in {1, self._count}:  # of those that draw, or that want log-probabilities
            at = every[:count]
            self._runner.logits(hidden, at)
            self._runner.score(hidden, at, none[:count], at, softmax_dtype, top=1)
