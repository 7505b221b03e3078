"""The compiled kernels choose their instructions at run time: on processors without AVX too."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from griffin_eval.errors import BadInput
from griffin_eval.kernels.cpu import compiled

PROGRAM = Path(__file__).with_name("older_processor.py")


def run(*emulator: str) -> subprocess.CompletedProcess[str]:
    command = [*emulator, sys.executable, str(PROGRAM)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(compiled.library() is None, reason=compiled.NOT_BUILT)
def test_on_this_processor():
    done = run()
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(compiled.library() is None, reason=compiled.NOT_BUILT)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are processors of another kind")
@pytest.mark.skipif(
    shutil.which("qemu-x86_64") is None, reason="did not run: qemu-user is not installed"
)
@pytest.mark.parametrize("processor", ["Nehalem", "Haswell"])
def test_on_an_emulated_processor(processor):
    """SSE4.2 without AVX; AVX2 without AVX-512."""
    done = run("qemu-x86_64", "-cpu", processor)
    assert done.returncode == 0, done.stderr


def test_kernels_older_than_their_sources_are_refused(tmp_path, monkeypatch):
    (tmp_path / "kernels" / "cpu").mkdir(parents=True)
    built, source = tmp_path / "kernels" / "_cpu.so", tmp_path / "kernels" / "cpu" / "xla.c"
    built.touch()
    source.touch()
    os.utime(built, (1, 1))
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "kernels" / "cpu" / "compiled.py"))
    with pytest.raises(BadInput, match=r"xla\.c is newer than the compiled kernels.*pip install"):
        compiled.library.__wrapped__()
