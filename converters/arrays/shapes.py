"""Checks of the shapes and offsets that untrusted files state."""

from typing import TypeGuard

MAX_DIMENSIONS = 32  # of numpy's arrays, before version 2


def are_naturals(values: object) -> TypeGuard[list[int] | tuple[int, ...]]:
    """Whether this is a list or tuple of integers from 0 to 2**63 - 1."""
    return isinstance(values, list | tuple) and all(
        type(n) is int and 0 <= n < 1 << 63 for n in values
    )
