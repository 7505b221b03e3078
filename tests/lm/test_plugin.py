"""The stock lm_eval knows our model and tasks, and no Python start pays or breaks for it.

What happens at interpreter start is tried in fresh interpreters, the rest in this one.
"""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import types
import venv
from pathlib import Path

import pytest
from slow import fast

import griffin_eval
from griffin_eval import _plugin
from griffin_eval.errors import BadInput

FOLDER = Path(griffin_eval.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
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


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The interpreter of an empty virtual environment, and where its packages lie."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    return folder / "bin" / "python", packages


def start_line() -> str:
    """The line that setup.py writes into the .pth file."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    (line,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LINE"
    )
    return eval(compile(ast.Expression(line), "setup.py", "eval"))


WHOLE = {name: (FOLDER / name).read_bytes() for name in ("__init__.py", "_plugin.py")}
# What is in the package's folder, of which Python finds nothing else.
BROKEN = {
    "package deleted": {},
    "plugin deleted": {"__init__.py": b""},
    "plugin empty": {"__init__.py": b"", "_plugin.py": b""},
    "plugin cut off": {"__init__.py": b"", "_plugin.py": WHOLE["_plugin.py"][:1500]},
    "plugin of zeros": {"__init__.py": b"", "_plugin.py": bytes(4096)},
    "plugin of other bytes": {"__init__.py": b"", "_plugin.py": b"\xff\xfe\x00garbage"},
    "syntax error in the package": WHOLE | {"__init__.py": b"def ("},
    "a library is missing": WHOLE | {"__init__.py": b"import nowhere"},
    "another version's plugin": {"__init__.py": b"", "_plugin.py": b"def start(now): pass"},
    "start fails": {"__init__.py": b"", "_plugin.py": b"def start(): 1 / 0"},
    "imports itself for ever": {"__init__.py": b"def f(): f()\nf()"},
    "a program of that name": {"__init__.py": b"import sys; sys.exit('usage: griffin_eval')"},
    "folder in the plugin's place": {"__init__.py": b"", "_plugin.py/x": b""},
    "whole, without lm_eval": WHOLE,
}


CHOSEN = ["plugin cut off", "imports itself for ever", "whole, without lm_eval"]


@pytest.mark.parametrize("damage", fast(CHOSEN, BROKEN))
def test_broken_installations_do_not_break_python(damage, environment):
    interpreter, packages = environment
    (packages / PTH).write_text(start_line())
    shutil.rmtree(packages / "griffin_eval", ignore_errors=True)
    for name, content in BROKEN[damage].items():
        path = packages / "griffin_eval" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert starts(interpreter)


@pytest.mark.parametrize(
    "damage", fast(["stale bytecode"], ["stale bytecode", "link to nothing", "unreadable", "twice"])
)
def test_damaged_files_do_not_break_python(damage, environment):
    interpreter, packages = environment
    (packages / PTH).write_text(start_line() * (2 if damage == "twice" else 1))
    package = packages / "griffin_eval"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir()
    for name, content in WHOLE.items():
        (package / name).write_bytes(content)
    if damage == "stale bytecode":
        assert starts(interpreter, PYTHONDONTWRITEBYTECODE="")
        for file in (package / "__pycache__").glob("*.pyc"):
            file.write_bytes(file.read_bytes()[:40])
    elif damage == "link to nothing":
        (package / "_plugin.py").unlink()
        (package / "_plugin.py").symlink_to("nowhere.py")
    elif damage == "unreadable":
        (package / "_plugin.py").chmod(0)  # root reads it none the less
    assert starts(interpreter)


SURROUNDINGS = [
    {"HOME": "/nonexistent", "XDG_CACHE_HOME": "/proc/nowhere"},
    {"PYTHONPATH": f"/nonexistent::{os.devnull}:.:/proc/self/mem"},
    {"PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1"},
    {"PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "PYTHONOPTIMIZE": "2"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
]


@pytest.mark.parametrize(
    "variables", fast(SURROUNDINGS[2:3], SURROUNDINGS), ids=lambda v: next(iter(v))
)
def test_odd_surroundings_do_not_break_python(variables, environment):
    interpreter, packages = environment
    (packages / PTH).write_text(start_line())
    for name, content in WHOLE.items():
        (packages / "griffin_eval").mkdir(exist_ok=True)
        (packages / "griffin_eval" / name).write_bytes(content)
    assert starts(interpreter, **variables)


@pytest.mark.slow
def test_what_the_start_costs_is_printed():
    program = ROOT / "tests" / "reliability" / "startup.py"
    done = subprocess.run(
        [sys.executable, program, "--starts", "2"], capture_output=True, text=True, check=True
    )
    assert re.search(r"start-up file: \d+ µs at the median of 2 starts", done.stdout)


def starts(interpreter: Path, **env: str) -> bool:
    """Whether an interpreter starts, says nothing by itself and ends well."""
    kept = {name: each for name, each in os.environ.items() if not name.startswith("PYTHON")}
    run = subprocess.run(
        [interpreter, "-c", "import json; print('up')"],
        env=kept | {"PYTHONDONTWRITEBYTECODE": "1"} | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "up\n", "")
    return True


def test_failing_hook_is_said_not_raised():
    with pytest.warns(RuntimeWarning, match="could not add itself to lm_eval.tasks.manager"):
        _plugin._run_hook(types.ModuleType("lm_eval.tasks.manager"))


@pytest.mark.slow
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


@pytest.mark.parametrize("name", ["/nowhere", "nowhere", "./nowhere", "a/b/c/d"])
def test_a_checkpoint_that_is_not_there_is_refused_before_tasks_are_read(name):
    arguments = types.SimpleNamespace(model_args={"pretrained": name})
    with pytest.raises(BadInput, match="no such folder"):
        _plugin._refuse_missing(arguments)
    for other in ({"pretrained": "organisation/name"}, {"pretrained": str(ROOT)}, {}, None, "a=b"):
        _plugin._refuse_missing(types.SimpleNamespace(model_args=other))


def test_messages_that_mislead_are_dropped_and_no_others():
    metadata = "{}: Custom kwargs can be passed to `--metadata` in console"
    saving = "Saving per-task samples to {}/m/*.jsonl"
    assert _plugin._misleads(metadata.format("griffin_phonebook"))
    assert _plugin._misleads(saving.format("/results/.griffin-eval-x"))
    assert not _plugin._misleads(metadata.format("ruler"))
    assert not _plugin._misleads(saving.format("/results"))


def test_git_is_asked_in_a_repository_alone(tmp_path, monkeypatch):
    asked = []
    utils = types.SimpleNamespace(get_git_commit_hash=lambda: asked.append(1) or "hash")
    _plugin._look_for_git(utils)
    monkeypatch.delenv("GIT_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    assert utils.get_git_commit_hash() is None and not asked
    (tmp_path / ".git").mkdir()
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert utils.get_git_commit_hash() == "hash"
