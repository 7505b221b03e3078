"""Settings of a whole process that make models faster and smaller on a CPU.

Commands call `tune_process`, since their process is their own. A library leaves it to its user.
"""

import contextlib
import ctypes
import os
import sys

# At the end of each product, OpenMP's threads wait for the last one in a loop. If another process
# has its core, they use up their share of the processor: PyTorch was 15 to 20 times slower beside
# one busy process. With 200 turns it was 1.5 times slower, and as fast as ever without one.
SPIN_VARIABLE, SPIN_COUNT = "GOMP_SPINCOUNT", "200"
# Programs that oneDNN and PyTorch's layer over it keep, each. It makes one of 60 kB for each number
# of rows that a matrix is multiplied with, and keeps 1,024 by default. Steps have many.
PRODUCT_VARIABLES, PRODUCTS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "128"
# Parameters of glibc's mallopt (malloc.h). By default it returns large blocks to the system, and
# new pages cost more than what is computed on them.
MMAP_THRESHOLD, TRIM_THRESHOLD, KEPT = -3, -1, 1 << 30


def share_processor() -> None:
    """Let PyTorch's threads sleep soon while they wait, unless the user said how they wait.

    GNU OpenMP reads the variable when PyTorch is imported: call this before.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN_VARIABLE, SPIN_COUNT)


def tune_process() -> None:
    """Make PyTorch models faster and smaller in this process. Call it before PyTorch is imported.

    Threads sleep soon while they wait for each other (``GOMP_SPINCOUNT``), oneDNN keeps fewer
    programs, and glibc keeps freed memory for the next step. Variables that the user set stay.
    """
    share_processor()
    for name in PRODUCT_VARIABLES:
        os.environ.setdefault(name, PRODUCTS)
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(MMAP_THRESHOLD, KEPT)
        libc.mallopt(TRIM_THRESHOLD, KEPT)
