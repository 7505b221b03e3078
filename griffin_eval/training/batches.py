"""The batches of a run, drawn by other processes while a GPU or TPU computes."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

from griffin_eval.training.recipes import Batch, Recipe

MOST_PROCESSES = 8
_AHEAD = 2  # batches of each process that are drawn before they are asked for

Take = Callable[[int, int], Batch]


@contextlib.contextmanager
def batches(recipe: Recipe, seed: int, processes: int) -> Iterator[Take]:
    """A function that gives the batch of a step, as `Recipe.batch` does, and is called with the
    steps in their order.

    Args:
        recipe: of the run.
        seed: of the run.
        processes: that draw; 0 to draw a batch when it is asked for.
    """
    if not processes:
        yield functools.partial(recipe.batch, seed)
        return
    drawn: dict[tuple[int, int], Future[Batch]] = {}

    def take(step: int, stage: int) -> Batch:
        for later in range(step, min(step + _AHEAD * processes, recipe.steps)):
            its_stage = recipe.stage_at(later) if recipe.advance is None else stage
            if (later, its_stage) not in drawn:
                drawn[later, its_stage] = pool.submit(recipe.batch, seed, later, its_stage)
        batch = drawn[step, stage].result()
        for key in [key for key in drawn if key[0] <= step or recipe.advance and key[1] != stage]:
            drawn.pop(key).cancel()
        return batch

    # Not forked: JAX has threads.
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        try:
            yield take
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def processes_for(platform: str) -> int:
    """How many processes should draw batches: none on a CPU, whose cores compute the steps."""
    return 0 if platform == "cpu" else min(MOST_PROCESSES, max(1, (os.cpu_count() or 1) - 1))
