"""The compiled kernels that are older than their sources, or cannot be loaded."""

import os
import subprocess
import sys

import pytest

import griffin_eval
from griffin_eval.checkpoints import folder
from griffin_eval.errors import BadInput
from griffin_eval.kernels.cpu import compiled


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
model = griffin_eval.Evaluator(folder, framework="torch", dtype="float32")
[score] = model.score(["import os"])
print(score.total)
from griffin_eval import doctor
print(doctor.machine()["compiled kernels"])
"""


def test_kernels_that_cannot_be_loaded_are_named_and_plain_ones_run():
    done = subprocess.run([sys.executable, "-c", CANNOT_LOAD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    warning, total, fact = done.stdout.splitlines()
    assert "cannot be loaded (version `GLIBC_2.99' not found)" in warning
    assert warning.startswith(fact) and warning.endswith("slower kernels run instead")
    model = griffin_eval.Evaluator(folder("bytes_griffin"), framework="torch", dtype="float32")
    [usual] = model.score(["import os"])
    assert float(total) == pytest.approx(usual.total, rel=1e-5)
