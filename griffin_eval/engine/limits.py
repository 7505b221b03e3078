"""How much a step may hold."""

from typing import NamedTuple

from griffin_eval.runners.protocol import Runner

SMALLEST_STEP = 16  # tokens
COPIED_STATES = 1 << 29  # most bytes of states that a step works on, 512 MiB


class Limits(NamedTuple):
    """Bounds of what is in memory at a time.

    Attributes:
        tokens: most tokens that a step reads.
        rows: most edges that a step reads from, and most documents that it continues.
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

    def fitting(self, state_bytes: int) -> "Limits":
        """The same limits, with as many rows as a step can copy states of so many bytes."""
        return self._replace(rows=min(self.rows, max(COPIED_STATES // state_bytes, 1)))

    def __str__(self) -> str:
        return f"at most {self.tokens} tokens and {self.rows} rows a step"


def limits_for(runner: Runner, state_bytes: int | None = None, most: int | None = None) -> Limits:
    """Limits with which a model reads fastest here, whatever the requests are.

    They are to be chosen once for a loaded model: the same requests are then read in the same
    steps, and get the same bits, however much memory is free later.

    Args:
        state_bytes: memory budget for states; None for 25% of the memory that is free now.
        most: upper bound of the rows.
    """
    budget = runner.free_memory() // 4 if state_bytes is None else state_bytes
    rows = runner.step_rows if most is None else min(most, runner.step_rows)
    return Limits(runner.step_tokens, rows, budget)
