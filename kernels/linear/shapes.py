"""Shapes of the arrays of a linear map that belong together: kernels would read and write what is
behind."""

from typing import Any

from griffin_eval.errors import ArgumentError


def check_widths(x: Any, weight: Any) -> None:
    """Checks that x [..., I] has as many inputs as a weight [O, I], of any framework.

    Raises:
        ArgumentError: it has not.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            f"linear: x must have the {weight.shape[1]} inputs of a weight of "
            f"{list(weight.shape)}, found {x.shape[-1]} in an x of {list(x.shape)}"
        )
