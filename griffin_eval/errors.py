"""The errors a user can meet, each one sentence that says what was expected, found, and to do."""

import sys
import traceback
from typing import Any


class BadInput(ValueError):
    """What the user gave cannot be used; commands print the sentence and exit with code 2."""


class ArgumentError(BadInput):
    """An argument or a field of a config that does not exist or whose value cannot be."""


class CheckpointError(BadInput):
    """A checkpoint that cannot be read as it is: which file or key, and what was expected."""


class ProcessLost(RuntimeError):
    """One of several processes that share a model has ended, or does not answer: which and how."""


class MissingExtraError(ImportError):
    """A library of an extra is not installed; the message names the pip command."""

    def __init__(self, library: str, extra: str):
        super().__init__(
            f"{library} is not installed, and this needs it: pip install 'griffin-eval[{extra}]'"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of a framework means that memory ran out."""
    text = str(error).lower()
    return (
        isinstance(error, MemoryError)
        or "out of memory" in text
        or "resource_exhausted" in text
        or "can't allocate memory" in text
    )


INTERRUPTED = (
    "interrupted: no results are written; with --use_cache FILE the answers so far are kept there, "
    "and the same command continues from them"
)


def unreachable_data(error: BaseException) -> str | None:
    """The sentence about an error of `datasets`, which cannot fetch the documents of a task; None
    for other errors."""
    if not isinstance(error, ConnectionError) or "on the Hub" not in str(error):
        return None
    return (
        f"{error}: the documents of a task are not in the cache of datasets (HF_HOME), and cannot "
        "be fetched; run once where the hub can be reached, or leave the task out"
    )


def raised_by_lm_eval(error: BaseException) -> bool:
    """Whether the line that raised an error is in lm_eval, which raises ValueError for tasks and
    arguments that do not exist."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] == "lm_eval"


def one_sentence(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """`sys.excepthook` of lm_eval's command line, as `griffin_eval._plugin` sets it.

    An error that the user can mend ends with its sentence and exit code 2. A lost process,
    documents that cannot be fetched, and an error of memory, if it says for which request, end
    with exit code 1. Ctrl-C says what is kept.
    """
    if isinstance(error, KeyboardInterrupt) and "griffin_eval.lm.model" in sys.modules:
        print(f"\ngriffin: {INTERRUPTED}", file=sys.stderr)
        return  # the interpreter ends as after any Ctrl-C
    expected = isinstance(error, BadInput | MissingExtraError)
    told = isinstance(error, ProcessLost) or (isinstance(error, MemoryError) and str(error))
    unreachable = unreachable_data(error)
    if not (expected or told or unreachable):
        sys.__excepthook__(kind, error, trace)
        return
    print(f"griffin: {unreachable or error}", file=sys.stderr)
    sys.exit(2 if expected else 1)
