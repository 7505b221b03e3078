"""How glibc hands out memory in a training process.

XLA allocates every array of a step anew and frees it again. By default glibc maps large arrays and
returns them to the kernel, which clears their pages at the next step: up to half of the time of a
small model's step. Where JAX computes on an accelerator these arrays are not of glibc, and many
threads that compile would wait for each other at its one heap.
"""

import ctypes
import os
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

# The parameters of glibc's mallopt (malloc.h), and their values here.
SETTINGS = {
    -8: 1,  # M_ARENA_MAX: no heaps of threads: XLA's are, and such heaps cannot hold its arrays
    -4: 0,  # M_MMAP_MAX: no array is a mapping of its own
    -1: -1,  # M_TRIM_THRESHOLD: what is free at the end of the heap is never returned
    -2: 256 << 20,  # M_TOP_PAD: bytes by which the heap grows
}


def use_one_heap() -> bool:
    """Make all threads of this process share one heap that keeps freed memory, if JAX will compute
    on the CPU.

    Call it before JAX starts its threads. From then on the memory of the process does not shrink.
    Only glibc has these settings; return whether it took all of them.
    """
    if not sys.platform.startswith("linux") or not _only_cpu():
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(*setting) for setting in SETTINGS.items()])


def _only_cpu() -> bool:
    """Return whether JAX can find no other device, by JAX_PLATFORMS or by installed packages."""
    if asked := os.environ.get("JAX_PLATFORMS"):
        return asked == "cpu"
    modules = "jax_plugins", "libtpu"
    return not entry_points(group="jax_plugins") and not any(map(find_spec, modules))
