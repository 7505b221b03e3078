"""The compiled kernels for the CPU (cpu.c), if the installation could build them."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

NOT_BUILT = "the compiled kernels are not there: griffin-eval was installed without a C compiler"
MOST_HEAD_DIM = 256  # of attention_cpu.c


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library; None where it was not built."""
    found = find_spec("griffin_eval.kernels._cpu")
    if found is None or found.origin is None:
        return None
    loaded = ctypes.CDLL(found.origin)
    address, number = ctypes.c_void_p, ctypes.c_int64
    for name, arguments in {
        "griffin_rglru": [ctypes.c_int, address, address, address, number],
        "griffin_attention": [address, address, address, number],
        "griffin_sum": [address, address, address, number, number],
        "griffin_pool": [address],
        "griffin_xla_threads": [number],
    }.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


@functools.cache
def library_for_torch() -> ctypes.CDLL | None:
    """The library on PyTorch's threads, where these are of the GNU OpenMP that it brings."""
    import torch

    loaded = library()
    if loaded is None:
        return None
    for path in Path(torch.__file__).with_name("lib").glob("libgomp*.so*"):
        with contextlib.suppress(OSError):  # it is there, but PyTorch has not loaded it
            openmp = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
            loaded.griffin_pool(ctypes.cast(openmp.GOMP_parallel, ctypes.c_void_p))
    return loaded


def missing_in_jax(names: list[str], works: Callable[[], bool]) -> str | None:
    """Registers kernels as calls from XLA, ``griffin_…``; why they cannot be called, if so.

    Args:
        names: of the kernels.
        works: whether one of them gives the right result. (Which versions of its interface XLA
            takes, it says when it compiles.)
    """
    import jax

    loaded = library()
    if loaded is None:
        return NOT_BUILT
    for name in names:
        handler = jax.ffi.pycapsule(getattr(loaded, f"griffin_xla_{name}"))
        jax.ffi.register_ffi_target(f"griffin_{name}", handler, platform="cpu")
    loaded.griffin_xla_threads(usable_cpus())
    try:
        with jax.ensure_compile_time_eval(), jax.default_device(jax.devices("cpu")[0]):
            if works():
                return None
    except jax.errors.JaxRuntimeError as error:
        return f"this version of JAX does not call the compiled kernels: {error}"
    return "this version of JAX does not call the compiled kernels as it should"


def usable_cpus() -> int:
    """How many CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
