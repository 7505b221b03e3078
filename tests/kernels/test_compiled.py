"""The compiled kernels choose their instructions at run time: on processors without AVX too."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import griffin_eval
from griffin_eval.checkpoints import folder
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
        compiled._loaded.__wrapped__()


CANNOT_LOAD = """
import ctypes, logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
class Refusing(ctypes.CDLL):
    def __init__(self, name, *rest, **more):
        if str(name).endswith("_cpu.so"):
            raise OSError("version `GLIBC_2.99' not found")
        super().__init__(name, *rest, **more)
ctypes.CDLL = Refusing
import griffin_eval, griffin_eval.checkpoints
folder = griffin_eval.checkpoints.folder("bytes_griffin")
for framework in ("torch", "jax"):
    model = griffin_eval.Evaluator(folder, framework=framework, dtype="float32")
    [score] = model.score(["import os"])
    print(framework, score.total)
from griffin_eval import doctor
print(doctor.machine()["compiled kernels"])
"""


def test_kernels_that_cannot_be_loaded_are_named_and_plain_ones_run():
    done = subprocess.run([sys.executable, "-c", CANNOT_LOAD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    warning, *scores, fact = done.stdout.splitlines()
    assert "cannot be loaded (version `GLIBC_2.99' not found)" in warning
    assert warning.startswith(fact) and warning.endswith("slower kernels run instead")
    model = griffin_eval.Evaluator(folder("bytes_griffin"), framework="torch", dtype="float32")
    [usual] = model.score(["import os"])
    for line, framework in zip(scores, ("torch", "jax"), strict=True):
        name, total = line.split()
        assert name == framework and float(total) == pytest.approx(usual.total, rel=1e-5)
