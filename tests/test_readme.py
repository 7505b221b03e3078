"""Every command and every piece of Python in the README runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
MAKE = {"make demo", "make test"}  # these two are what runs the demo and the tests


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def test_the_two_commands_come_first():
    first = [line.split("#")[0].strip() for line in blocks("bash")[0].splitlines()]
    assert set(first) == MAKE


@pytest.mark.slow
def test_commands_and_python(tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    commands = "".join(blocks("bash")[1:])
    assert commands.count("lm_eval") >= 3
    steps = [
        ["bash", "-euxc", commands],
        *([sys.executable, "-c", code] for code in blocks("python")),
    ]
    for step in steps:
        done = subprocess.run(
            step, cwd=tmp_path, env=os.environ | {"PATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
