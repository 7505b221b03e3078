"""The compiled kernels for the CPU (each operator's ``cpu.c``), if a C compiler built them."""

import contextlib
import ctypes
import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

from griffin_eval.errors import BadInput
from griffin_eval.kernels import devices, registry

logger = logging.getLogger(__name__)

NOT_BUILT = "the compiled kernels are not there: griffin-eval was installed without a C compiler"
MAX_HEAD_DIM = 256  # MAX_SIZE of attention/cpu.c
TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}  # enum Type of cpu/floats.h


def library() -> ctypes.CDLL | None:
    """Return the loaded library, or None if it was not built or cannot be loaded.

    Raises:
        BadInput: The library of a checkout is older than its sources.
    """
    loaded = _loaded()
    return None if isinstance(loaded, str) else loaded


def missing() -> str | None:
    """Return the reason why `library` is None, or None."""
    loaded = _loaded()
    return loaded if isinstance(loaded, str) else None


@functools.cache
def _loaded() -> ctypes.CDLL | str:
    """Return the loaded library, or the reason why there is none."""
    path = Path(__file__).parent.with_name("_cpu.so")
    if not path.is_file():
        return NOT_BUILT
    built = path.stat().st_mtime
    for source in path.parent.glob("*/*.[ch]"):
        if source.stat().st_mtime > built:
            raise BadInput(
                f"{source} is newer than the compiled kernels, {path}, which may not fit: "
                f"install the checkout again (pip install -e {path.parents[1]})"
            )
    try:
        return _declared(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:  # built on another machine or for another version
        reason = f"the compiled kernels cannot be loaded ({error}): install griffin-eval again"
        logger.warning("%s; slower kernels run instead", reason)
        return reason


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the library's functions."""
    address, number = ctypes.c_void_p, ctypes.c_int64
    for name, arguments in {
        "griffin_rglru": [ctypes.c_int, address, address, address, number],
        "griffin_attention": [address, address, address, number],
        "griffin_linear": [address] * 6,
        "griffin_sum": [address, address, address, number, number],
        "griffin_pool": [address],
        "griffin_xla_threads": [number],
    }.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


@functools.cache
def library_for_torch() -> ctypes.CDLL | None:
    """Return the library, using PyTorch's threads if PyTorch brings GNU OpenMP."""
    import torch

    loaded = library()
    if loaded is None:
        return None
    for path in Path(torch.__file__).with_name("lib").glob("libgomp*.so*"):
        with contextlib.suppress(OSError):  # PyTorch may not have loaded it
            openmp = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
            loaded.griffin_pool(ctypes.cast(openmp.GOMP_parallel, ctypes.c_void_p))
    return loaded


@functools.cache
def register_ffi_targets() -> str | None:
    """Register the kernels as XLA FFI targets ``griffin_…``, before a program that calls them is
    compiled or loaded. Return None, or the reason why they are missing."""
    import jax

    loaded = _loaded()
    if isinstance(loaded, str):
        return loaded
    jax.devices("cpu")  # start the backend first, so that a rejected kernel raises an error below
    for name in ("attention", "linear", "scan", "scan_backward", "gated", "gated_backward"):
        handler = jax.ffi.pycapsule(getattr(loaded, f"griffin_xla_{name}"))
        try:
            jax.ffi.register_ffi_target(f"griffin_{name}", handler, platform="cpu")
        except jax.errors.JaxRuntimeError as error:
            return f"this version of JAX does not take the compiled kernels: {error}"
    loaded.griffin_xla_threads(usable_cpus())
    return None


def missing_in_jax(error: Callable[[], float]) -> str | None:
    """Return the reason why a compiled kernel cannot be used in JAX, or None.

    ``error`` computes a small problem and returns its error. XLA rejects unsupported versions of
    its interface only when it compiles.
    """
    import jax

    def on_cpu() -> float:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return error()

    return register_ffi_targets() or registry.fault(
        "the compiled kernels in this version of JAX", error, lambda: devices.untraced(on_cpu)
    )


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
