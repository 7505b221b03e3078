"""Everything that users see equals the committed list."""

import subprocess
import sys
from pathlib import Path

import pytest

SURFACE = Path(__file__).with_name("surface.py")


@pytest.mark.slow
def test_surface_is_as_committed(tmp_path):
    command = [sys.executable, str(SURFACE), "--check"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, (
        "what users see has changed: if this is intended, run `python tests/net/surface.py` and "
        f"commit surface.txt\n{done.stdout}{done.stderr}"
    )
