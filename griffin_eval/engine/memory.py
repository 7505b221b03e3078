"""Return of freed memory to the operating system."""

import contextlib
import ctypes


def return_freed_memory() -> None:
    """Return unused heap pages to the operating system if the C library is glibc.

    Small long-lived objects come to lie between the large buffers of steps and fragment the heap,
    so that a long-running process grows although it holds no more. The call takes milliseconds.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
