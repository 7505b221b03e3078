"""Reads a text and returns the state after it."""

from collections.abc import Callable
from typing import Any

import numpy as np

from griffin_eval.engine.limits import Limits
from griffin_eval.engine.reader import Reader
from griffin_eval.engine.scoring import NotFinite, cause_of_not_finite
from griffin_eval.engine.stats import Stats
from griffin_eval.engine.tree import build_prompts
from griffin_eval.runners.protocol import Runner


def read(
    runner: Runner,
    tokens: np.ndarray,
    *,
    limits: Limits,
    progress: Callable[[int], Any] = lambda tokens: None,
) -> dict[str, np.ndarray]:
    """Return the state before the last token of int32 [N] ids, N >= 2, as `SavedState` tensors.

    Raises MemoryError if not even the smallest step fits, and NotFinite for a NaN or infinity.
    """
    reader = Reader(
        runner,
        build_prompts([tokens[:-1]]),
        limits,
        len(tokens),
        Stats(),
        on_step=lambda hidden, parts, bases: None,
        progress=progress,
        describe=lambda index: "the text",
    )
    while True:
        for _, slot in reader.fill(1):
            tensors = reader.pool.tensors(slot, len(tokens) - 1)
            if bad := [name for name, one in tensors.items() if not np.isfinite(one).all()]:
                raise NotFinite(
                    f"the state after the text holds NaN or infinity in {', '.join(bad[:3])}: "
                    f"{cause_of_not_finite(runner.dtype)}"
                )
            return tensors
        reader.step()
