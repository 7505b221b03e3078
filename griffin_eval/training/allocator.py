"""glibc's memory allocator in a training process.

XLA allocates every array of a step anew and frees it again. By default glibc maps large arrays and
returns them to the kernel, which clears their pages at the next step: up to half of the time of a
small model's step. On an accelerator glibc does not hold these arrays, and the many threads that
compile would contend for a single heap.
"""

import ctypes
import os
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

# Parameters of glibc's mallopt (malloc.h) and their values.
SETTINGS = {
    -8: 1,  # M_ARENA_MAX: one heap for all threads; heaps of XLA's threads cannot hold its arrays
    -4: 0,  # M_MMAP_MAX: never map arrays separately
    -1: -1,  # M_TRIM_THRESHOLD: never return free memory at the end of the heap
    -2: 256 << 20,  # M_TOP_PAD: bytes by which the heap grows
}


def use_one_heap() -> bool:
    """Make all threads share one heap that keeps freed memory, if JAX will compute on the CPU.

    Call it before JAX starts its threads. Afterwards the memory of the process does not shrink.
    Return whether it took effect, which needs glibc.
    """
    if not sys.platform.startswith("linux") or not _only_cpu():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(*setting) for setting in SETTINGS.items()])


def _only_cpu() -> bool:
    """Return whether JAX_PLATFORMS or the installed packages leave JAX only the CPU."""
    if asked := os.environ.get("JAX_PLATFORMS"):
        return asked == "cpu"
    modules = "jax_plugins", "libtpu"
    return not entry_points(group="jax_plugins") and not any(map(find_spec, modules))
