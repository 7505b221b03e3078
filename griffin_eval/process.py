"""Settings of the whole process that make models faster and smaller on a CPU.

Commands call `tune_process`; library users decide for themselves.
"""

import contextlib
import ctypes
import os
import sys

# OpenMP's threads wait for each other in a busy loop. If another process uses their core, this
# wastes their share of it: beside one busy process PyTorch took 50 to 90 times as long. With 2,000
# turns it takes 2.3 to 2.7 times as long there, and alone 1.05 to 1.25 times as long as with
# unlimited ones. 200 turns are faster beside a busy process, but alone took 1.4 to 1.8 times as
# long.
SPIN_VARIABLE, SPIN_COUNT = "GOMP_SPINCOUNT", "2000"
# Maximum number of programs that oneDNN and PyTorch's layer over it cache, 1,024 by default. Each
# takes 60 kB and serves one number of rows in a matrix product; steps have many.
PRODUCT_VARIABLES, PRODUCTS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "128"
# Parameters of glibc's mallopt (malloc.h). By default it returns large blocks to the system, and
# allocating new pages is slower than the computation on them.
MMAP_THRESHOLD, TRIM_THRESHOLD, KEPT = -3, -1, 1 << 30


def share_processor() -> None:
    """Let PyTorch's threads sleep soon while they wait, unless the user has set how they wait. Call
    this before PyTorch is imported, which is when GNU OpenMP reads the variable."""
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
