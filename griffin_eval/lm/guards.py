"""Guards the files that lm-eval keeps of a run of this package's model, and of no other model."""

import functools
from typing import Any

from lm_eval.api.model import CachingLM
from lm_eval.loggers.evaluation_tracker import EvaluationTracker

from griffin_eval.lm.cache_file import move_damaged_aside
from griffin_eval.lm.results_files import whole_or_absent


@functools.cache
def guard_files() -> None:
    """Makes a damaged ``--use_cache`` file no end of a run, and results files whole or absent.

    To be called before lm-eval opens the one or writes the others.
    """
    opening = CachingLM.__init__

    @functools.wraps(opening)
    def __init__(self: CachingLM, lm: Any, cache_db: str) -> None:
        if type(lm).__module__.startswith("griffin_eval."):
            move_damaged_aside(cache_db)
        opening(self, lm, cache_db)

    setattr(CachingLM, "__init__", __init__)  # noqa: B010, since types forbid an assignment
    for name in ("save_results_aggregated", "save_results_samples"):
        setattr(EvaluationTracker, name, whole_or_absent(getattr(EvaluationTracker, name)))
