"""Benchmarks beside peers and limits, run from a checkout: ``python -m benchmarks.scan --help``."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Later imports find installed packages only: the checkout's folder `kernels` would hide the package
# of that name from PyPI, which transformers imports.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
