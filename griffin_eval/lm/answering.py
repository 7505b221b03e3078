"""The context around a call of an lm-eval model: its progress bar and its clean-up."""

import contextlib
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from griffin_eval.engine.memory import return_freed_memory


@contextlib.contextmanager
def answering(lm: Any, description: str, total: int, disable: bool) -> Iterator[tqdm]:
    """Show a progress bar. Afterwards, also after an error or Ctrl-C, save all answers so far to
    the ``--use_cache`` file and return freed memory to the system."""
    hidden = True if disable or lm.rank else None
    try:
        with tqdm(total=total, desc=description, disable=hidden) as bar:
            yield bar
    finally:
        if lm.cache_hook.dbdict is not None:
            lm.cache_hook.dbdict.commit()  # waits for the thread that writes answers
        return_freed_memory()
