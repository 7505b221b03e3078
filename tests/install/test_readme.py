"""Every command and every Python block in README.md and docs/ runs unchanged."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from xla_options import QUICK_FLAGS

import griffin_eval
from griffin_eval.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
# Lines that the test leaves out: they create an environment or run the tests.
ELSEWHERE = ("make ", "pip install ")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and text of every block that a reader would type, in order."""
    return re.findall(r"^```(bash|python)\n(.*?)^```", page.read_text(), re.M | re.S)


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 110


def test_the_demo_types_the_quick_start_until_a_command_fails(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(
        "```bash\necho install\n```\n## Quick start\n```bash\necho one > file\ncat file\n```\n"
        "```text\none\n```\n```bash\n(exit 3)\necho after\n```\n## More\n```bash\necho more\n```\n"
    )
    demo = [sys.executable, ROOT / ".ci" / "demo.py", readme, tmp_path / "scratch"]
    done = subprocess.run(demo, capture_output=True, text=True)
    assert done.stdout == "$ echo one > file\n$ cat file\none\n$ (exit 3)\n"
    assert done.returncode == 3
    assert (tmp_path / "scratch" / "file").exists()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.ci if page == README else pytest.mark.slow)
        for page in PAGES
        if blocks(page)
    ],
    ids=name_of,
)
def test_blocks_run(page, tmp_path):
    """The blocks of a page run one after the other in one folder."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        # Commands only need to succeed here, so full compilation is not needed.
        "XLA_FLAGS": QUICK_FLAGS,
    }
    # `python -m benchmarks.NAME` and `experiments.NAME` exist only in a checkout.
    environment.pop("PYTHONSAFEPATH", None)
    for name in ("benchmarks", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    for language, text in blocks(page):
        if language == "bash":
            lines = [line for line in text.splitlines() if not line.startswith(ELSEWHERE)]
            command = ["bash", "-euxo", "pipefail", "-c", "\n".join(lines)]
        else:
            command = [sys.executable, "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, text + done.stdout + done.stderr


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    """The cells of the notebook run one after the other in one process."""
    cells = json.loads((ROOT / "docs" / "first_hour.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code = [cell.removeprefix("%matplotlib inline\n") for cell in code]  # a command of Jupyter
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "half_lives.pdf").read_bytes().startswith(b"%PDF")


def test_commands_tasks_and_python_names_are_documented():
    """Tables in docs/ list every command, public name and task."""
    text = {name_of(page): page.read_text() for page in PAGES}
    group = typer.main.get_group(app).commands.items()
    commands = {name for name, command in group if not command.hidden}
    tasks = {file.stem for file in (ROOT / "griffin_eval" / "tasks").rglob("griffin_*.yaml")}
    of_tasks = "".join(page for name, page in text.items() if name.startswith("docs/tasks/"))
    readme = text["README.md"]
    assert {name for name in commands if f"`griffin-eval {name}" not in readme} == set()
    assert {name for name in tasks if f"`{name}`" not in of_tasks} == set()
    public = {n for n in griffin_eval.__all__ if not re.search(rf"\b{n}\b", text["docs/python.md"])}
    assert public == set()


def test_the_latest_release_is_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## ([0-9.]+) - ", changelog, re.M)[0] == griffin_eval.__version__


def test_every_page_is_linked_from_the_index():
    """Readers find only pages that the index links to."""
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]]
    assert [page for page in pages if f"({page}" not in index and page != "index.md"] == []
