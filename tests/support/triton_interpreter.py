"""The Triton kernels, interpreted on the CPU."""

import functools
import importlib.util

import pytest

KERNELS = "griffin_eval.kernels.rglru.triton_kernels"


@functools.cache
def interpreted_kernels(name=KERNELS):
    """Import a copy of the module with interpreted kernels, a choice made at its import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        origin = importlib.util.find_spec(name).origin
        spec = importlib.util.spec_from_file_location("interpreted_triton_kernels", origin)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    assert module.INTERPRETED
    return module
