"""Only commands tune the process, and they do so before PyTorch is imported."""

import os
import subprocess
import sys

import pytest
from slow import fast

from griffin_eval import process
from griffin_eval.checkpoints import folder

# Print the variable and exit where the program is about to import PyTorch.
PROBE = """
import os, sys
class Probe:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch":
            print("before torch:", os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Probe)
"""
CHECKPOINT = str(folder("bytes_griffin"))
MODEL_ARGS = ["--model_args", f"pretrained={CHECKPOINT},framework=torch", "--tasks", "x"]
MAIN = "import griffin_eval.cli.main as program; program.main()"
LM_EVAL = "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
ENTRIES = {
    "lm_eval --model griffin": (LM_EVAL, ["--model", "griffin", *MODEL_ARGS]),
    "lm_eval run": (LM_EVAL, ["run", "--model", "griffin", *MODEL_ARGS]),
    "lm_eval run --config": (LM_EVAL, ["run", "--config", "CONFIG"]),
    "griffin-eval run": (MAIN, ["run", "--model", "griffin", *MODEL_ARGS]),
    "score": (MAIN, ["score", CHECKPOINT, "TEXT", "--framework", "torch"]),
    "read": (MAIN, ["read", CHECKPOINT, "TEXT", "--save", "STATE", "--framework", "torch"]),
    "memory": (MAIN, ["memory", CHECKPOINT, "--framework", "torch"]),
    "serve": (MAIN, ["serve", CHECKPOINT, "--port", "0", "--framework", "torch"]),
    "sweep": (MAIN, ["sweep", CHECKPOINT, CHECKPOINT + "/.", "--tasks", "x", "-o", "OUTPUT"]),
    "doctor": (MAIN, ["doctor"]),
}
OTHERS = {
    "lm_eval --model hf": (
        LM_EVAL,
        ["--model", "hf", "--model_args", "pretrained=x", "--tasks", "x"],
    ),
    "griffin_eval.Evaluator": (
        f"import griffin_eval; griffin_eval.Evaluator({CHECKPOINT!r}, framework='torch')",
        [],
    ),
    "griffin_eval.load": (
        f"import griffin_eval; griffin_eval.load({CHECKPOINT!r}, framework='torch')",
        [],
    ),
}


def untuned():
    """Return this process's environment without variables that commands may have set."""
    names = {process.SPIN_VARIABLE, *process.PRODUCT_VARIABLES}
    return {name: value for name, value in os.environ.items() if name not in names}


def before_torch(entry, tmp_path, **environment):
    code, arguments = entry
    (tmp_path / "TEXT").write_text("import os")
    (tmp_path / "CONFIG").write_text(
        f"model: griffin\nmodel_args: {{pretrained: {CHECKPOINT}}}\ntasks: [x]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", PROBE + code, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=untuned() | environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("before torch: ")]
    assert lines, done.stderr
    return lines[0].removeprefix("before torch: ")


@pytest.mark.parametrize("name", fast(["lm_eval --model griffin", "score"], list(ENTRIES)))
def test_commands_set_it(name, tmp_path):
    assert before_torch(ENTRIES[name], tmp_path) == "2000"


@pytest.mark.parametrize("name", fast(["griffin_eval.Evaluator"], list(OTHERS)))
def test_other_models_and_libraries_are_left_alone(name, tmp_path):
    assert before_torch(OTHERS[name], tmp_path) == "None"


def test_a_library_changes_no_setting_of_the_process():
    code = (
        "import ctypes, os, griffin_eval\n"
        "changes = []\n"
        "before = dict(os.environ)\n"
        "class Watched(ctypes.CDLL):\n"
        "    def __getattr__(self, name):\n"
        "        changes.append(name)\n"
        "        return super().__getattr__(name)\n"
        "ctypes.CDLL = Watched\n"
        f"model = griffin_eval.Evaluator({CHECKPOINT!r}, framework='torch')\n"
        "model.score(['import os'])\n"
        "assert dict(os.environ) == before and 'mallopt' not in changes, changes\n"
        "griffin_eval.tune_process()\n"
        "assert dict(os.environ) != before and 'mallopt' in changes\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=untuned()
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("environment", "value"),
    [({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "None")],
)
def test_what_the_user_set_stays(environment, value, tmp_path):
    assert before_torch(ENTRIES["score"], tmp_path, **environment) == value
