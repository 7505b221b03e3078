"""Parameters of which the fast run takes a few and `make test-slow` the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def fast(chosen: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """All the values as parameters of a test, marked slow but for the chosen ones."""
    chosen, values = list(chosen), list(values)
    unknown = [value for value in chosen if value not in values]
    assert not unknown, f"{unknown} are not among {values}"
    return [v if v in chosen else pytest.param(v, marks=pytest.mark.slow) for v in values]


def slow(*values: Any) -> Any:
    """One set of values of a parametrised test, marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def exhaustive(*values: Any) -> Any:
    """One set of values of a parametrised test, for `make test-exhaustive` alone."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.exhaustive])
