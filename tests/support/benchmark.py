"""The benchmarks as a user runs them from a checkout."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def benchmark(name: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m benchmarks.NAME`` in the checkout and return the finished process."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"} | variables
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
