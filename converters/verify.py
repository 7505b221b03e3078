"""Compares two checkpoints of any formats, tensor by tensor."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.tensors import together


class Difference(NamedTuple):
    """A parameter that differs between two checkpoints.

    Attributes:
        what: Clause that describes the difference.
        largest: Largest absolute difference of two values; NaN where shapes differ or one of them
            is NaN.
        kind: ``values``, ``missing`` or ``shape``; ``dtype`` where the values are equal in two
            dtypes, ``rounded`` where they are equal once they are cast to one of the two dtypes.
    """

    name: str
    what: str
    largest: float
    kind: str = "values"


class Comparison(NamedTuple):
    """The result of a comparison: differing fields of the config, and differing parameters."""

    config: list[str]
    tensors: list[Difference]
    compared: int

    @property
    def same(self) -> bool:
        """Whether configs, dtypes and all bits are equal."""
        return not self.config and not self.tensors

    @property
    def same_but_for_dtypes(self) -> bool:
        """Whether configs are equal, and values too once they are cast to one of two dtypes."""
        kinds = {difference.kind for difference in self.tensors}
        return not self.config and kinds <= {"dtype", "rounded"}


def compare(
    one: Checkpoint, other: Checkpoint, progress: Callable[[int], None] = lambda nbytes: None
) -> Comparison:
    """Compare every parameter of two checkpoints, a piece at a time."""
    differing = [
        f"{field.name}: {getattr(one.config, field.name)} and {getattr(other.config, field.name)}"
        for field in dataclasses.fields(one.config)
        if getattr(one.config, field.name) != getattr(other.config, field.name)
    ]
    differences = []
    for name in one.dtypes | other.dtypes:
        if name not in one.dtypes or name not in other.dtypes:
            differences.append(Difference(name, "only in one of them", float("nan"), "missing"))
        elif difference := _compare(name, one, other, progress):
            differences.append(difference)
    return Comparison(differing, differences, len(one.dtypes | other.dtypes))


def _compare(
    name: str, one: Checkpoint, other: Checkpoint, progress: Callable[[int], None]
) -> Difference | None:
    a_shape, b_shape = one.shapes[name], other.shapes[name]
    a_dtype, b_dtype = one.dtypes[name], other.dtypes[name]
    if a_shape != b_shape:
        return Difference(name, f"shapes {a_shape} and {b_shape}", float("nan"), "shape")
    values, largest = 0, 0.0
    a_is_cast = b_is_cast = True
    pairs = together(one.pieces(name, check=False), other.pieces(name, check=False))
    for x, y in pairs:
        progress(x.nbytes)
        differ = None  # by their bytes, so that the sign of a zero counts
        if a_dtype == b_dtype:
            bits = np.dtype(f"u{x.itemsize}")
            differ = x.view(bits) != y.view(bits)
            if not differ.any():
                continue
        else:
            b_is_cast = b_is_cast and _equals_cast(x, y)
            a_is_cast = a_is_cast and _equals_cast(y, x)
        wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
        with np.errstate(invalid="ignore"):
            gap = np.abs(wide_x - wide_y)
        gap[wide_x == wide_y] = 0.0  # also two infinities
        differ = gap != 0 if differ is None else differ
        gap = gap[differ]
        values += len(gap)
        largest = (
            max(largest, float(gap.max(initial=0))) if not np.isnan(gap).any() else float("nan")
        )
    if a_dtype != b_dtype:
        dtypes = f"{a_dtype} and {b_dtype}"
        if not values:
            return Difference(name, f"{dtypes}, equal values", largest, "dtype")
        kind = "rounded" if (a_is_cast or b_is_cast) and np.isfinite(largest) else "values"
        return Difference(name, f"{dtypes}, {_differ(values)}", largest, kind)
    return Difference(name, _differ(values), largest) if values else None


def _equals_cast(array: np.ndarray, cast: np.ndarray) -> bool:
    """Return whether the second array is the first one, cast to its dtype, in every bit."""
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(cast.dtype).tobytes() == cast.tobytes()


def _differ(values: int) -> str:
    return "1 value differs" if values == 1 else f"{values} values differ"
