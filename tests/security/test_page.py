"""The tests that docs/security.md names exist."""

import re
from pathlib import Path


def test_each_row_names_tests_that_exist():
    """Each row of the tables in docs/security.md names its test as FILE::FUNCTION."""
    root = Path(__file__).resolve().parents[2]
    lines = (root / "docs" / "security.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and "---" not in line]
    rows = [row for row in rows if "| test |" not in row]
    assert len(rows) >= 20
    for row in rows:
        named = re.findall(r"`(\w+(?:/\w+)+\.py)::(\w+)`", row)
        assert named, row
        for file, function in named:
            assert f"\ndef {function}(" in (root / "tests" / file).read_text(), (file, function)
