"""Every command and every piece of Python in README.md and docs/ runs as it stands."""

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
MAKE = {"make demo", "make test"}  # these two are what runs the demo and the tests
# Lines that this page's test leaves out: they make an environment, or run the tests.
ELSEWHERE = ("make ", "pip install ")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of what a reader would type, in order."""
    return re.findall(r"^```(bash|python)\n(.*?)^```", page.read_text(), re.M | re.S)


def test_readme_is_short_and_begins_with_two_commands():
    assert len(README.read_text().splitlines()) <= 150
    first = [line.split("#")[0].strip() for line in blocks(README)[0][1].splitlines()]
    assert set(first) == MAKE


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
    """The blocks of a page, one after the other in one folder."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        # Commands run to their end here; other tests compile as users do, and look at numbers.
        "XLA_FLAGS": QUICK_FLAGS,
    }
    # `python -m benchmarks.NAME` and `experiments.NAME` run in a checkout, which has them.
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


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    """Files and headings that a page links to exist."""
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def anchors(page: Path) -> set[str]:
    """The headings of a page, as GitHub turns them into anchors."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_commands_tasks_and_python_names_are_documented():
    """What exists is in a table: commands and public names in one page each, tasks in theirs."""
    text = {name_of(page): page.read_text() for page in PAGES}
    group = typer.main.get_group(app).commands.items()
    commands = {name for name, command in group if not command.hidden}
    tasks = {file.stem for file in (ROOT / "griffin_eval" / "tasks").rglob("griffin_*.yaml")}
    of_tasks = "".join(page for name, page in text.items() if name.startswith("docs/tasks/"))
    assert {name for name in commands if f"`{name}`" not in text["README.md"]} == set()
    assert {name for name in tasks if f"`{name}`" not in of_tasks} == set()
    public = {n for n in griffin_eval.__all__ if not re.search(rf"\b{n}\b", text["docs/python.md"])}
    assert public == set()


def test_the_latest_release_is_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## ([0-9.]+) - ", changelog, re.M)[0] == griffin_eval.__version__


def test_every_page_is_linked_from_the_readme():
    """A page that nothing links to is not found."""
    readme = README.read_text()
    assert [page for page in map(name_of, PAGES[1:]) if page not in readme] == []
