"""The stock lm_eval knows our model and tasks, and no Python start pays or breaks for it.

What happens at interpreter start is tried in fresh interpreters, the rest in this one.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import griffin_eval
from griffin_eval import _plugin

FOLDER = Path(griffin_eval.__file__).parent
PTH = "griffin_eval_plugin.pth"


def python(code: str, *flags: str, **env: str) -> str:
    """What a fresh interpreter prints; it must say nothing else, and exit with 0."""
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


def test_install_after_lm_eval_and_twice():
    code = """
import sys, lm_eval.models
from lm_eval.tasks.manager import TaskManager
from griffin_eval import _plugin
_plugin.install(); _plugin.install()
wrapped_twice = hasattr(TaskManager.__init__.__wrapped__, "__wrapped__")
print(sys.meta_path.count(_plugin._Finder), wrapped_twice)
"""
    assert python(code + KNOWN, GRIFFIN_EVAL_NO_PLUGIN="1") == "1 False\nTrue"


def test_a_second_finder_of_this_kind_does_not_loop():
    code = """
import sys
class Other:
    @classmethod
    def find_spec(cls, *args):
        specs = (f.find_spec(*args) for f in sys.meta_path if f is not cls)
        return next((spec for spec in specs if spec), None)
sys.meta_path.append(Other)
"""
    assert python(code + KNOWN) == "True"


@pytest.mark.parametrize(
    "source", ["raise RuntimeError", "import nowhere", "def start(): 1 / 0", "("]
)
def test_broken_package_does_not_break_python(tmp_path, source):
    package = tmp_path / "griffin_eval"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_plugin.py").write_text(source)
    assert python("print('up')", PYTHONPATH=str(tmp_path)) == "up"


def test_missing_package_does_not_break_python(tmp_path):
    installed = importlib.metadata.distribution("griffin-eval").locate_file(PTH)
    shutil.copy(str(installed), tmp_path)
    code = f"import site; site.addsitedir({str(tmp_path)!r}); import sys"
    assert python(code + "; print('griffin_eval' in sys.modules)", "-S") == "False"


def test_failing_hook_is_said_not_raised():
    with pytest.warns(RuntimeWarning, match="could not add itself to lm_eval.tasks.manager"):
        _plugin._run_hook(types.ModuleType("lm_eval.tasks.manager"))


def test_no_import_replaces_the_excepthook():
    code = """
import importlib, pkgutil, sys, warnings
import griffin_eval
from lm_eval.utils import setup_logging

setup_logging()  # as lm_eval's command does first
before = sys.excepthook, set(sys.modules)
for module in pkgutil.walk_packages(griffin_eval.__path__, "griffin_eval."):
    importlib.import_module(module.name)
print(sys.excepthook is before[0], len(set(sys.modules) - before[1]) > 100)
"""
    assert python(code).splitlines()[-1] == "True True"


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
    """The folders a TaskManager reads, as a list that grows; they are not read."""
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
