"""The global random number generators."""

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np


@contextlib.contextmanager
def unchanged_generators() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and PyTorch at the end of the block.

    Importing JAX draws from NumPy's generator. Since lm_eval seeds it before a model is loaded,
    sampled answers would depend on whether JAX was imported before.
    """
    python, numpy = random.getstate(), np.random.get_state()
    torch: Any = sys.modules.get("torch")
    state = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch is not None:
            torch.set_rng_state(state)
