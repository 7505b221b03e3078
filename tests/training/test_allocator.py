"""Training processes, and only these, reuse freed memory without page faults."""

import ctypes
import os
import subprocess
import sys

import pytest

from griffin_eval.training import allocator

PROGRAM = """
import ctypes, resource, threading
from griffin_eval.training.allocator import use_one_heap

assert {call} == {right}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, size = [ctypes.c_void_p], 64 << 20
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def use():
    array = libc.malloc(size)
    libc.memset(array, 1, size)
    libc.free(array)

def count():
    use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        use()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=count)
thread.start()
thread.join()
"""

GLIBC = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc"
)


def faults(call: str, right: str, platforms: str = "cpu") -> int:
    """Count a thread's page faults while it reuses the memory that it freed, three times."""
    program = PROGRAM.format(call=call, right=right)
    environment = os.environ | {"JAX_PLATFORMS": platforms}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@GLIBC
def test_memory_that_was_freed_is_not_cleared_again():
    assert faults("use_one_heap()", "True") < 100
    assert faults("None", "None") > 90  # the default: three mappings, of huge pages at best


@GLIBC
def test_accelerators_leave_glibc_alone():
    """On accelerators many threads compile, and arrays are not glibc's."""
    assert faults("use_one_heap()", "False", platforms="cuda,cpu") > 90


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_other_c_libraries_are_left_alone(platform, monkeypatch):
    def library(name):
        if platform != "linux":
            raise TypeError("there is no such library")
        return object()  # musl has no mallopt

    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(sys, "platform", platform)
    assert not allocator.use_one_heap()
