"""Unsafe calls that this package's code must not contain."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("griffin_eval", "converters", "kernels", "model_jax", "model_torch")
TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for top in TOPS
    for path in sorted((ROOT / top).rglob("*.py"))
}
CALLS = [
    (path, ast.unparse(node.func), {each.arg: ast.unparse(each.value) for each in node.keywords})
    for path, tree in TREES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.Call)
]


def places(*names: str) -> set[str]:
    """Return the files that call one of these functions."""
    return {path for path, name, _ in CALLS if name in names}


def test_pickles_are_read_where_only_this_user_can_have_written_them():
    readers = ("pickle.load", "pickle.loads", "pickle.Unpickler", "dill.load", "dill.loads")
    assert places(*readers, "cloudpickle.load", "cloudpickle.loads", "joblib.load") == {
        "griffin_eval/runners/compiled_jax.py",  # files whose owner and mode are checked
        "griffin_eval/runners/jax_leaders.py",  # messages of the run's other processes
        "griffin_eval/runners/jax_parallel.py",  # messages of the run's other processes
        "griffin_eval/runners/replay.py",  # messages of the leading process
        "griffin_eval/runners/torch_parallel.py",  # messages of the leading process
    }
    found = [(path, given) for path, name, given in CALLS if name.endswith("torch.load")]
    assert all(given.get("weights_only") == "True" for _, given in found)
    assert not [path for path, _, given in CALLS if given.get("allow_pickle", "False") != "False"]


def test_trust_remote_code_is_never_set():
    given = {each["trust_remote_code"] for _, _, each in CALLS if "trust_remote_code" in each}
    assert given == {"False"}


@pytest.mark.parametrize(
    "names",
    [
        ("eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"),
        ("tempfile.mktemp", "tarfile.open", "shutil.unpack_archive"),
    ],
    ids=["code", "files"],
)
def test_dangerous_functions_are_not_called(names):
    assert not places(*names)
    assert not [path for path, name, _ in CALLS if name.endswith((".extractall", ".extract"))]


def test_no_command_goes_through_a_shell_or_imports_from_where_the_user_is():
    assert not [path for path, _, given in CALLS if given.get("shell", "False") != "False"]
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.List) and node.elts:
                words = [ast.unparse(each) for each in node.elts]
                if words[0] == "sys.executable" and {"'-c'", "'-m'"} & set(words):
                    assert words[1] == "'-P'", path


def test_templates_of_this_package_escape():
    environments = [given for _, name, given in CALLS if name.endswith("Environment")]
    assert environments and all(each.get("autoescape") == "True" for each in environments)
    assert not places("jinja2.Template", "Template")
