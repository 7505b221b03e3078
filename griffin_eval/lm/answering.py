"""What stands around a call of an lm-eval model: its progress bar, and what it leaves behind."""

import contextlib
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from griffin_eval.engine.memory import return_freed_memory


@contextlib.contextmanager
def answering(lm: Any, description: str, total: int, disable: bool) -> Iterator[tqdm]:
    """A progress bar. After it, also after an error or Ctrl-C, all answers so far are in the
    ``--use_cache`` file, and the steps' memory is the system's again."""
    hidden = True if disable or lm.rank else None
    try:
        with tqdm(total=total, desc=description, disable=hidden) as bar:
            yield bar
    finally:
        if lm.cache_hook.dbdict is not None:
            lm.cache_hook.dbdict.commit()  # answers are written by a thread
        return_freed_memory()
