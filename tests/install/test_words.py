"""What `.ci/check_words.py` finds."""

import runpy
from pathlib import Path

import pytest

CHECK = runpy.run_path(str(Path(__file__).resolve().parents[2] / ".ci" / "check_words.py"))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("MOST_ROWS = 4", "MOST_ROWS"),
        ("_LEAST = 4", "_LEAST"),
        ("def _told(): ...", "_told"),
        ("def read(found): ...", "found"),
        ("sorted(rows, key=lambda each: each.x)", "each"),
        ("self._known = 1", "_known"),
        ("class Batch:\n    asked: int", "Batch.asked"),
        ("MAX_ROWS = 4\ndef read(rows, tokens_kept):\n    found = rows", None),
        ("class PoolRows:\n    kept: int", None),
    ],
)
def test_names_are_nouns(tmp_path, source, name):
    file = tmp_path / "module.py"
    file.write_text(source)
    assert [line.split(": ")[1] for line in CHECK["faults"](file)] == [name] * (name is not None)
