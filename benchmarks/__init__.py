"""Benchmarks beside peers and limits, run from a checkout: ``python -m benchmarks.scan --help``."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Packages that are imported from here on are those installed: the checkout's folder `kernels` would
# hide PyPI's package of that name, which transformers imports.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
