"""Dotted names in strings refer to existing modules and attributes.

`make check` checks the import contracts (`[tool.importlinter]` in pyproject.toml), which do not
see imports by name.
"""

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import griffin_eval

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("griffin_eval", "converters", "kernels", "model_jax", "model_torch")
SOURCES = sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py"))
NAME = re.compile(r"griffin_eval(\.\w+)+")
REFERENCE = re.compile(r"`(griffin_eval(?:\.\w+)+)`")


def exists(name: str) -> bool:
    """Return whether a dotted name is a module or an attribute of one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
            continue
        for part in parts[length:]:
            if not hasattr(value, part):
                return part in getattr(value, "__annotations__", {})
            value = getattr(value, part)
        return True
    return False


def strings(path: Path) -> set[str]:
    """Return the dotted names in a file's strings, and in backticks in its docstrings."""
    names, nodes = set(), list(ast.walk(ast.parse(path.read_text())))
    formatted = {id(part) for n in nodes if isinstance(n, ast.JoinedStr) for part in n.values}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in formatted:
                continue
            if NAME.fullmatch(node.value.partition(":")[0]):
                names.add(node.value.replace(":", "."))
            names |= set(REFERENCE.findall(node.value))
    return names


@pytest.mark.ci
@pytest.mark.parametrize("top", TOPS)
def test_names_in_strings_exist(top):
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        if path.is_relative_to(ROOT / top)
        for name in sorted(strings(path))
        if name != "griffin_eval.kernels._cpu" and not exists(name)
    ]
    assert not missing


@pytest.mark.ci
def test_modules_that_are_chosen_by_framework_exist():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.JoinedStr):
                continue
            parts = [v.value if isinstance(v, ast.Constant) else "*" for v in node.values]
            pattern = "".join(map(str, parts))
            if re.fullmatch(r"griffin_eval\.[\w.*]+", pattern):
                files = pattern.partition(".")[2].replace(".", "/") + ".py"
                found = [*ROOT.glob(files), *(ROOT / "griffin_eval").glob(files)]
                assert found, f"{path}: {pattern}"


def test_tasks_name_functions_that_exist():
    tasks = Path(griffin_eval.__file__).parent / "tasks"
    named = [
        (path, match)
        for path in tasks.rglob("*.yaml")
        for match in re.findall(r"!function (\w+)\.(\w+)", path.read_text())
    ]
    assert named
    for path, (module, function) in named:
        dotted = ".".join(path.parent.relative_to(tasks.parent.parent).parts)
        assert exists(f"{dotted}.{module}.{function}"), path
