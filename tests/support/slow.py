"""Sizes of tests: `make test` takes a few parameters and examples, `make test-all` the others."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def fast(chosen: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return all values as parameters of a test, marked slow except for the chosen ones."""
    chosen, values = list(chosen), list(values)
    unknown = [value for value in chosen if value not in values]
    assert not unknown, f"{unknown} are not among {values}"
    return [v if v in chosen else slow(v) for v in values]


def slow(*values: Any) -> Any:
    """Return one set of values of a parametrised test for `make test-all` only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def ci(*values: Any) -> Any:
    """Return one set of values of a parametrised test for `.ci/run` and `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.ci)


def examples(count: int) -> int:
    """Return the number of examples of a property, which `make test-all` multiplies by five."""
    return count * (5 if settings.get_current_profile_name() == "all" else 1)
