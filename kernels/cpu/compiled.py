"""The compiled kernels for the CPU (each operator's ``cpu.c``), where a C compiler built them."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

from griffin_eval.errors import BadInput
from griffin_eval.kernels import devices

NOT_BUILT = "the compiled kernels are not there: griffin-eval was installed without a C compiler"
MOST_HEAD_DIM = 256  # of attention/cpu.c
TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}  # of cpu/floats.h


@functools.cache
def library() -> ctypes.CDLL | None:
    """The loaded library; None where it was not built.

    Raises:
        BadInput: it was built from older sources than there are, in a checkout.
    """
    path = Path(__file__).parent.with_name("_cpu.so")
    if not path.is_file():
        return None
    built = path.stat().st_mtime
    for source in path.parent.glob("*/*.[ch]"):
        if source.stat().st_mtime > built:
            raise BadInput(
                f"{source} is newer than the compiled kernels, {path}, which may not fit: "
                f"install the checkout again (pip install -e {path.parents[1]})"
            )
    loaded = ctypes.CDLL(str(path))
    address, number = ctypes.c_void_p, ctypes.c_int64
    for name, arguments in {
        "griffin_rglru": [ctypes.c_int, address, address, address, number],
        "griffin_attention": [address, address, address, number],
        "griffin_linear": [address] * 6,
        "griffin_packed": [address] * 8,
        "griffin_unpack": [address] * 5,
        "griffin_sum": [address, address, address, number, number],
        "griffin_pool": [address],
        "griffin_xla_threads": [number],
    }.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether the processor multiplies in bfloat16, and the library was built to use that."""
    loaded = library()
    return loaded is not None and loaded.griffin_multiplies_bfloat16() != 0


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


@functools.cache
def register_ffi_targets() -> str | None:
    """Registers the kernels as XLA FFI targets, ``griffin_…``, before a program that calls them is
    compiled or loaded. Returns None, or the reason they are missing."""
    import jax

    loaded = library()
    if loaded is None:
        return NOT_BUILT
    jax.devices("cpu")  # so that one which refuses a kernel says so below, and still starts
    linear, scans = ("linear", "packed", "unpack"), ("scan", "scan_backward")
    for name in ("attention", *linear, *scans, "gated", "gated_backward"):
        handler = jax.ffi.pycapsule(getattr(loaded, f"griffin_xla_{name}"))
        try:
            jax.ffi.register_ffi_target(f"griffin_{name}", handler, platform="cpu")
        except jax.errors.JaxRuntimeError as error:
            return f"this version of JAX does not take the compiled kernels: {error}"
    loaded.griffin_xla_threads(usable_cpus())
    return None


def missing_in_jax(works: Callable[[], bool]) -> str | None:
    """Self-test of a kernel in JAX. Returns None, or the reason it cannot be used.

    Args:
        works: whether the kernel gives the right result. (Which versions of its interface XLA
            takes, it says when it compiles.)
    """
    import jax

    reason = register_ffi_targets()
    if reason is not None:
        return reason

    def on_cpu() -> bool:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return works()

    try:
        if devices.untraced(on_cpu):
            return None
    except jax.errors.JaxRuntimeError as error:
        return f"this version of JAX does not call the compiled kernels: {error}"
    return "this version of JAX does not call the compiled kernels as it should"


def usable_cpus() -> int:
    """How many CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
