"""The package's command as a user types it."""

import subprocess
import sys
from pathlib import Path


def griffin_eval(*arguments) -> subprocess.CompletedProcess[str]:
    """Runs ``griffin-eval`` of this environment; gives its exit code and what it printed."""
    program = Path(sys.executable).with_name("griffin-eval")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
