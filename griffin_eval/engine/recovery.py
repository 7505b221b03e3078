"""Recovery from running out of memory and from results that are not finite."""

import logging
import traceback
from collections.abc import Callable, Sequence

from griffin_eval.engine.limits import Limits
from griffin_eval.errors import is_out_of_memory

PATIENCE = 3  # failing requests found before the search for more stops

logger = logging.getLogger(__name__)


def smaller(limits: Limits, error: BaseException, what: str) -> Limits:
    """Return halved limits after a step ran out of memory.

    Raises the error again if it has another cause, and a MemoryError about ``what`` if the limits
    cannot get smaller.
    """
    if not is_out_of_memory(error):
        raise error
    release(error)
    fewer = limits.halved()
    if fewer == limits:
        raise MemoryError(
            f"{what}: not even {limits.tokens} tokens at a time fit into memory"
        ) from error
    logger.warning("out of memory: going on with %s", fewer)
    return fewer


def release(error: BaseException | None) -> None:
    """Clear the variables in the frames of an error and its causes, which have ended: they would
    keep a pool in memory while the next one is allocated."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def not_finite_alone(
    suspects: Sequence[int], read: Callable[[list[int]], list[int]]
) -> tuple[list[int], bool]:
    """Find the requests whose results are not finite whatever is read beside them.

    A NaN may come from another request in the same step, so halves of the suspects are read again,
    recursively.

    ``read`` returns the indices whose results are not finite. Returns the indices that fail alone,
    and whether there may be more: the search stops after `PATIENCE` of them.
    """
    failed: list[int] = []
    pending = _halves(suspects)
    while pending:
        group = pending.pop()
        still = read(group)
        if len(group) == 1:
            failed += still
        else:
            pending += _halves(still)
        if len(failed) == PATIENCE:
            return failed, bool(pending)
    return failed, False


def _halves(indices: Sequence[int]) -> list[list[int]]:
    """Return the non-empty halves of some indices, the second half first."""
    middle = (len(indices) + 1) // 2
    return [part for part in (list(indices[middle:]), list(indices[:middle])) if part]
