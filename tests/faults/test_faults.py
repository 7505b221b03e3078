"""A sample of `make faults` and `make faults-remote`: each kind of fault, for every container."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="calls are failed by LD_PRELOAD")
def test_a_sample_of_faults():
    command = [sys.executable, HERE / "run.py", "--sample", "2"]
    command += ["--sources", "sharded", "deepmind-torch", "--before", "absent"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "72 faults, 0 failures" in done.stdout


@pytest.mark.slow
def test_a_sample_of_failing_requests():
    command = [sys.executable, HERE / "remote.py", "--sample", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(HERE)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "28 faults, 0 failures" in done.stdout
