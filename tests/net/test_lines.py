"""The comparison of lines that tests run before and after a change."""

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("lines", Path(__file__).with_name("lines.py"))
lines = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lines)
BEFORE = "import os\n\n\ndef f():\n    return 1\n\n\ndef g():\n    return 2\n"
AFTER = "import os\n\n\ndef g():\n    return 2\n\n\ndef h():\n    return 3\n"


@pytest.mark.parametrize("numbers", [set(), {7}, {1, 2, 3, 7}, {2, 4, 5, 9, 10, 11}])
def test_numbers_are_written_as_ranges(numbers):
    assert lines.numbers(lines.ranges(numbers)) == numbers


def test_ranges_are_short():
    assert lines.ranges([3, 1, 2, 7]) == "1-3,7"


@pytest.mark.parametrize(
    ("ran_after", "expected"), [({1, 4, 5}, []), ({1, 4}, [5]), ({1, 4, 8, 9}, [5])]
)
def test_surviving_lines_are_those_that_are_still_there(ran_after, expected):
    """Lines that went, and new ones, are not asked for."""
    assert lines.lost(BEFORE, AFTER, {1, 4, 5, 8, 9}, ran_after) == expected
