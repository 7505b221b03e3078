"""The package's command as a user types it."""

import subprocess
import sys
from pathlib import Path


def griffin_eval(*arguments) -> subprocess.CompletedProcess[str]:
    """Run ``griffin-eval`` of this environment and return the finished process."""
    program = Path(sys.executable).with_name("griffin-eval")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
