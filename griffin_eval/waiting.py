"""How long threads of PyTorch wait awake for each other."""

import os
import sys

# At the end of each product, OpenMP's threads wait for the last one in a loop. If another process
# has its core, they use up their share of the processor: PyTorch was 15 to 20 times slower beside
# one busy process. With 200 turns it was 1.5 times slower, and as fast as ever without one.
SPIN_COUNT = "200"
VARIABLE = "GOMP_SPINCOUNT"


def share_the_processor() -> None:
    """Let PyTorch's threads sleep soon while they wait, unless the user said how they wait.

    GNU OpenMP reads the variable when PyTorch is imported: call this before. It is for commands,
    whose process is their own, and not for a library.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(VARIABLE, SPIN_COUNT)
