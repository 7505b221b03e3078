"""The compiled kernels for the CPU (cpu.c), if the installation could build them."""

import ctypes
import functools
import os
from importlib.util import find_spec

# What `griffin_rglru` computes, and the arrays it takes: float32 but for starts and lengths [S],
# which are int32, and resets [N], uint8. D columns, N tokens, S segments in ascending order; the
# products of the gates with x are [G, N, D / G]; decay = -8 softplus(Λ).
SCAN = 0  # starts lengths resets a x -> h last; `last` holds the states before when it is called
SCAN_BACKWARD = 1  # starts lengths resets a h0 h dh dlast -> da dx dh0
GATED = 2  # starts lengths resets x input recurrent input_bias recurrent_bias decay -> h last
GATED_BACKWARD = 3  # …as GATED, h0 h dh dlast -> dx dinput drecurrent ddecay dh0

NOT_BUILT = "the compiled kernels are not there: griffin-eval was installed without a C compiler"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library; None where it was not built."""
    found = find_spec("griffin_eval.kernels.rglru._cpu")
    if found is None or found.origin is None:
        return None
    loaded = ctypes.CDLL(found.origin)
    loaded.griffin_rglru.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.c_int64]
    loaded.griffin_rglru.restype = None
    loaded.griffin_sum.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int64]
    loaded.griffin_sum.restype = None
    loaded.griffin_pool.argtypes = [ctypes.c_void_p]
    loaded.griffin_pool.restype = None
    loaded.griffin_xla_threads.argtypes = [ctypes.c_int64]
    loaded.griffin_xla_threads.restype = None
    return loaded


def usable_cpus() -> int:
    """How many CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
