"""Errors that a user can meet: one sentence that says what was expected, found, and to do."""

import sys
import traceback
from typing import Any


class BadInput(ValueError):
    """Input from the user cannot be used; commands print the message and exit with code 2."""


class ArgumentError(BadInput):
    """An argument or a field of a config does not exist, or has an invalid value."""


class CheckpointError(BadInput):
    """A checkpoint cannot be read; the message names the file or key, and what was expected."""


class ProcessLost(RuntimeError):
    """One of several processes that share a model has ended or does not answer."""


class MissingExtraError(ImportError):
    """A library of an extra is not installed; the message names the pip command."""

    def __init__(self, library: str, extra: str):
        super().__init__(
            f"{library} is not installed, and this needs it: pip install 'griffin-eval[{extra}]'"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of a framework means that memory ran out."""
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
    """Return the message for an error of `datasets`, which cannot fetch the documents of a task;
    None for other errors."""
    if not isinstance(error, ConnectionError) or "on the Hub" not in str(error):
        return None
    return (
        f"{error}: the documents of a task are not in the cache of datasets (HF_HOME), and cannot "
        "be fetched; run once where the hub can be reached, or leave the task out"
    )


def raised_by_lm_eval(error: BaseException) -> bool:
    """Return whether lm_eval itself raised an error; it raises ValueError for unknown tasks and
    arguments."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] == "lm_eval"


def one_sentence(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an error as one sentence: the `sys.excepthook` of lm_eval's command line.

    Errors that the user can fix exit with code 2. Lost processes, documents that cannot be fetched,
    and memory errors that name a request exit with code 1. Ctrl-C says what is kept.
    """
    if isinstance(error, KeyboardInterrupt) and "griffin_eval.lm.model" in sys.modules:
        print(f"\ngriffin: {INTERRUPTED}", file=sys.stderr)
        return  # the interpreter exits as after any Ctrl-C
    expected = isinstance(error, BadInput | MissingExtraError)
    told = isinstance(error, ProcessLost) or (isinstance(error, MemoryError) and str(error))
    unreachable = unreachable_data(error)
    if not (expected or told or unreachable):
        sys.__excepthook__(kind, error, trace)
        return
    print(f"griffin: {unreachable or error}", file=sys.stderr)
    sys.exit(2 if expected else 1)
