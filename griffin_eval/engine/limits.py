"""Limits of a step: tokens, rows and memory."""

from typing import NamedTuple

from griffin_eval.runners.protocol import Runner

SMALLEST_STEP = 16  # tokens
COPIED_STATES = 1 << 29  # maximum bytes of the states in a step, 512 MiB


class Limits(NamedTuple):
    """Maximum size of a step, and maximum bytes of the states that are kept between steps (at least
    one state is kept); None for 25% of the free memory."""

    tokens: int
    rows: int  # edges that a step reads, or documents that it continues
    state_bytes: int | None = None

    def halved(self) -> "Limits":
        """Return limits with half the tokens and rows, or the same limits at the minimum."""
        return self._replace(
            tokens=max(self.tokens // 2, SMALLEST_STEP), rows=max(self.rows // 2, 1)
        )

    def fitting(self, state_bytes: int) -> "Limits":
        """Return these limits with no more rows than `COPIED_STATES` has room for."""
        return self._replace(rows=min(self.rows, max(COPIED_STATES // state_bytes, 1)))

    def __str__(self) -> str:
        return f"at most {self.tokens} tokens and {self.rows} rows a step"


def limits_for(
    runner: Runner, state_bytes: int | None = None, max_rows: int | None = None
) -> Limits:
    """Return the fastest limits for a model on this device, with at most ``max_rows`` rows.

    Choose them once for a loaded model: the same requests are then read in the same steps and get
    bit-identical results, however much memory is free later.
    """
    budget = runner.free_memory() // 4 if state_bytes is None else state_bytes
    rows = runner.step_rows if max_rows is None else min(max_rows, runner.step_rows)
    return Limits(runner.step_tokens, rows, budget)
