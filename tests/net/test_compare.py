"""compare.py reports all differences and nothing else; shell scripts act as interpreters."""

import importlib.util
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HEADER = "#!/bin/sh\n"


@pytest.fixture(scope="module")
def tool():
    """Import compare.py from its path, since tests/net is not importable."""
    spec = importlib.util.spec_from_file_location("compare", HERE / "compare.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare"] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    yield module
    del sys.modules["compare"], sys.modules["cases"]
    sys.path.remove(str(HERE))


@pytest.fixture
def sides(tool, tmp_path):
    """Return a function that writes a `griffin-eval` script for each side and returns the sides."""

    def write(before: str, after: str):
        found = []
        for name, text in (("before", before), ("after", after)):
            bin = tmp_path / name / "bin"
            bin.mkdir(parents=True)
            program = bin / "griffin-eval"
            program.write_text(HEADER + text)
            program.chmod(0o755)
            folder = tmp_path / name / "work"
            found.append(tool.Side(name, bin / "python", folder, {str(bin): "<bin>"}, "1.2.3"))
        return found

    return write


def reported(tool, sides, rtol=0.0, **options) -> list[str]:
    """Run one case on both sides and return the lines that are printed."""
    case = tool.Case("group/name", ("griffin-eval go",), **options)
    said: list[str] = []
    tool.compare_all(sides, [case], jobs=2, rtol=rtol, show=said.append)
    return said


def test_what_differs_from_run_to_run_alone_is_the_same(tool, sides):
    text = (
        'echo "$PWD took {} s at 2026-11-2{} 10:00:00, version 1.2.3, {} tokens/s"\n'
        'echo "$0: $TMPDIR/tmp{}" >&2; printf "  5%|##  |\\rdone\\n" >&2\n'
        'printf \'{{"loss": 1.5, "seconds": {}}}\' > metrics.json; echo {} > figure.svg\n'
    )
    before, after = (
        text.format(*row) for row in ((1.5, 3, 9, "abcd1234", 1, 1), (20, 4, 1, "wxyz5678", 2, 2))
    )
    assert reported(tool, sides(before, after)) == ["group/name: same"]


def test_a_tolerance_is_of_numbers_alone(tool):
    assert tool.equal("a 1.0000001 b", "a 1.0000002 b", 1e-5)
    assert not tool.equal("a 1.0000001 b", "a 1.0000002 b", 0.0)
    assert not tool.equal("a 1.0 b", "a 1.0 c", 1e-5)
    assert not tool.equal("a 1.0", "a 1.1", 1e-5)


def test_a_message_and_an_exit_code_that_differ(tool, sides):
    before, after = "echo 'no such folder' >&2; exit 2", "echo 'no such file' >&2; exit 1"
    said = reported(tool, sides(before, after), exit=2)
    assert "    after: exit code 1, the case expects 2" in said
    assert "    -no such folder" in said and "    +no such file" in said


def test_a_missing_file_and_a_changed_key(tool, sides):
    before = "echo text > a.txt; echo '{\"loss\": 1.5}' > b.json"
    said = reported(tool, sides(before, "echo '{\"loss\": 1.25}' > b.json"))
    assert any("before: files/a.txt" in line for line in said) and "    +(absent)" in said
    assert any("files/b.json" in line for line in said)
    assert '    - "loss": 1.5' in said and '    + "loss": 1.25' in said


def test_a_command_that_hangs_ends_and_is_reported(tool, sides):
    said = reported(tool, sides("sleep 60", "sleep 60"), timeout=0.2)
    assert said[0] == "group/name: differs"
    assert "    before: 1 exit code: no end within 0.2 s" in said
    assert "    after: 1 exit code: no end within 0.2 s" in said


def test_two_failures_alike_are_not_the_same(tool, sides):
    said = reported(tool, sides("exit 3", "exit 3"))
    assert said[0] == "group/name: differs" and len(said) == 3


def test_a_case_brings_those_that_it_needs(tool):
    ids = [case.id for case in tool.selected(["convert/pt-to-hf"])]
    assert ids == ["convert/hf-to-pt", "convert/pt-to-hf"]
    assert len(ids) < len(tool.selected(["*"])) == len({case.id for case in tool.CASES})
