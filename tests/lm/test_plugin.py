"""The stock lm_eval knows our model and tasks, and no Python start pays or breaks for it.

What happens at interpreter start is tried in fresh interpreters, the rest in this one.
"""

import ast
import importlib
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
import types
import venv
from pathlib import Path

import pytest

import griffin_eval
from griffin_eval import _plugin
from griffin_eval.errors import BadInput

FOLDER = Path(griffin_eval.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
PTH = "griffin_eval_plugin.pth"


def python(code: str, *flags: str, **env: str) -> str:
    """Return the output of a fresh interpreter, which must print no errors and exit with 0."""
    run = subprocess.run(
        [sys.executable, *flags, "-c", code],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.strip()


def test_start_imports_only_itself():
    code = f"""
import os, sys
before = set(sys.modules)
sys.path.append({str(FOLDER.parent)!r})
from griffin_eval._plugin import start; start()
print(*sorted(set(sys.modules) - before))
"""
    assert python(code, "-S") == "griffin_eval griffin_eval._plugin"


@pytest.mark.ci
def test_get_model_needs_no_other_import():
    code = """
from lm_eval.api.registry import get_model
model = get_model("griffin")
print(model.__module__, model.__name__)
"""
    assert python(code) == "griffin_eval.lm.model GriffinLM"


KNOWN = """
import lm_eval.models
from lm_eval.api.registry import model_registry
print("griffin" in model_registry)
"""


def test_model_stays_a_string_until_used():
    assert (
        python(KNOWN + "import sys; print('griffin_eval.lm.model' in sys.modules)") == "True\nFalse"
    )


def test_opt_out():
    assert python(KNOWN, GRIFFIN_EVAL_NO_PLUGIN="1") == "False"


def test_stands_aside_for_entry_points():
    later_lm_eval = "import lm_eval.api.registry as r; r.load_plugins = lambda group, registry: []"
    assert python(later_lm_eval + KNOWN) == "False"
    (entry,) = importlib.metadata.entry_points(group="lm_eval.models", name="griffin")
    assert entry.value == _plugin.TARGET


@pytest.mark.ci
def test_install_after_lm_eval_and_twice():
    code = """
import sys, lm_eval.models
from lm_eval.tasks.manager import TaskManager
from griffin_eval import _plugin
from griffin_eval.errors import BadInput
_plugin.install(); _plugin.install()
wrapped_twice = hasattr(TaskManager.__init__.__wrapped__, "__wrapped__")
print(sys.meta_path.count(_plugin._Finder), wrapped_twice)
"""
    assert python(code + KNOWN, GRIFFIN_EVAL_NO_PLUGIN="1") == "1 False\nTrue"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the interpreter of an empty virtual environment, and the folder of its packages."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    return folder / "bin" / "python", packages


def start_line() -> str:
    """Return the line that setup.py writes into the .pth file."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    (line,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LINE"
    )
    return eval(compile(ast.Expression(line), "setup.py", "eval"))


WHOLE = {name: (FOLDER / name).read_bytes() for name in ("__init__.py", "_plugin.py")}
# Contents of a package's folder in which Python finds nothing else.
BROKEN = {
    "plugin cut off": {"__init__.py": b"", "_plugin.py": WHOLE["_plugin.py"][:1500]},
    "imports itself for ever": {"__init__.py": b"def f(): f()\nf()"},
    "a program of that name": {"__init__.py": b"import sys; sys.exit('usage: griffin_eval')"},
    "whole, without lm_eval": WHOLE,
}


def test_broken_installations_do_not_break_python(environment):
    interpreter, packages = environment
    package = packages / "griffin_eval"
    (packages / PTH).write_text(start_line())
    for content in BROKEN.values():
        shutil.rmtree(package, ignore_errors=True)
        for name, text in content.items():
            package.mkdir(exist_ok=True)
            (package / name).write_bytes(text)
        starts(interpreter)
    starts(interpreter, PYTHONWARNINGS="error", PYTHONDEVMODE="1")


def starts(interpreter: Path, **env: str) -> None:
    """Assert that an interpreter starts, says nothing by itself and ends well."""
    kept = {name: each for name, each in os.environ.items() if not name.startswith("PYTHON")}
    run = subprocess.run(
        [interpreter, "-c", "import json; print('up')"],
        env=kept | {"PYTHONDONTWRITEBYTECODE": "1"} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "up\n", "")


def test_failing_hook_is_said_not_raised():
    with pytest.warns(RuntimeWarning, match="could not add itself to lm_eval.tasks.manager"):
        _plugin._run_hook(types.ModuleType("lm_eval.tasks.manager"))


def test_only_lm_evals_command_ends_with_one_sentence():
    code = """
import logging, sys, types
from lm_eval._cli import HarnessCLI
from lm_eval.utils import setup_logging

setup_logging()
before = sys.excepthook is sys.__excepthook__, logging.getLogger("griffin_eval").handlers
HarnessCLI.execute(None, types.SimpleNamespace(func=lambda args: None))
ours, theirs = logging.getLogger("griffin_eval"), logging.getLogger("lm_eval")
same = ours.handlers == theirs.handlers and ours.level == theirs.level
print(*before, sys.excepthook.__name__, same)
"""
    assert python(code) == "True [] one_sentence True"


@pytest.fixture
def indexed(monkeypatch):
    """Record the folders that a TaskManager would read, in a list, without reading them."""
    from lm_eval.tasks._index import TaskIndex

    seen = []
    monkeypatch.setattr(TaskIndex, "build", staticmethod(lambda paths: seen.extend(paths) or {}))
    return seen


@pytest.mark.parametrize(
    "include, expected",
    [(None, []), ("mine", ["mine"]), (["a", Path("b")], ["a", "b"])],
)
def test_tasks_come_after_lm_evals_and_before_the_users(indexed, include, expected):
    import lm_eval.tasks

    lm_eval.tasks.TaskManager(include_path=include)
    defaults = Path(lm_eval.tasks.__file__).parent
    assert indexed == [defaults, Path(_plugin.TASKS), *map(Path, expected)]


def test_no_defaults_means_no_defaults(indexed):
    from lm_eval.tasks import TaskManager

    TaskManager(None, "mine", False)
    assert indexed == [Path("mine")]


@pytest.mark.slow
def test_tasks_are_listed():
    from lm_eval.tasks import TaskManager

    ours = {
        line.partition(":")[2].strip()
        for path in Path(_plugin.TASKS).rglob("*.yaml")
        for line in path.read_text().splitlines()
        if line.startswith("task: ")  # a group has a list there
    }
    assert ours
    assert ours <= set(TaskManager().all_tasks)


def test_a_checkpoint_that_is_not_there_is_refused_before_tasks_are_read():
    for name in ("/nowhere", "nowhere", "./nowhere", "a/b/c/d"):
        with pytest.raises(BadInput, match="no such folder"):
            _plugin._refuse_missing(types.SimpleNamespace(model_args={"pretrained": name}))
    for other in ({"pretrained": "organisation/name"}, {"pretrained": str(ROOT)}, {}, None, "a=b"):
        _plugin._refuse_missing(types.SimpleNamespace(model_args=other))


def test_messages_that_do_not_apply_are_left_out_in_any_program(caplog):
    """Not only in the stock command: sweeps and notebooks build tasks, too."""
    importlib.import_module("lm_eval.tasks.manager")
    log = logging.getLogger("lm_eval.api.task")
    for task in ("griffin_passkey", "ruler_qa"):
        log.warning("%s: Custom kwargs can be passed to `--metadata`", task)
    assert [record.args for record in caplog.records] == [("ruler_qa",)]
