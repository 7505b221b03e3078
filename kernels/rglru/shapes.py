"""Checks of the shapes and devices of a recurrence's arrays, beyond which kernels would read."""

from typing import Any

from griffin_eval.errors import ArgumentError
from griffin_eval.kernels.registry import check_shapes
from griffin_eval.kernels.rglru.reference import Gates


def check_scan(x: Any, a: Any, h0: Any, resets: Any, lengths: Any, starts: Any) -> None:
    """Check the arguments of ``linear_scan``.

    Raises:
        ArgumentError: Shapes or devices do not match, with all of them in the message, or resets
            are not bool.
    """
    _check(x, {"a": (a, x.shape)}, h0, resets, lengths, starts)


def check_rglru(x: Any, gates: Gates, h0: Any, resets: Any, lengths: Any, starts: Any) -> None:
    """Check the arguments of ``rglru``.

    Raises:
        ArgumentError: Shapes or devices do not match, with all of them in the message, or resets
            are not bool.
    """
    blocks, _, out = gates.input_weight.shape
    if x.shape[2] % blocks:
        raise ArgumentError(f"gates of {blocks} blocks do not divide an x of {list(x.shape)}")
    if gates.imaginary_param is None:
        out = x.shape[2] // blocks
    weight = blocks, x.shape[2] // blocks, out
    expected = {
        "recurrent_param": (gates.recurrent_param, (blocks * out,)),
        "input_weight": (gates.input_weight, weight),
        "input_bias": (gates.input_bias, (blocks, out)),
        "recurrent_weight": (gates.recurrent_weight, weight),
        "recurrent_bias": (gates.recurrent_bias, (blocks, out)),
        "imaginary_param": (gates.imaginary_param, (blocks * out,)),
    }
    _check(x, expected, h0, resets, lengths, starts)


def _check(
    x: Any, expected: dict[str, Any], h0: Any, resets: Any, lengths: Any, starts: Any
) -> None:
    batch, time, width = x.shape
    states = batch
    if starts is not None:
        if batch != 1 or lengths is None:
            raise ArgumentError("packed segments (starts) must lie in one row and have lengths")
        states = len(starts)
    layout = {
        "h0": (h0, (states, width)),
        "resets": (resets, (batch, time)),
        "lengths": (lengths, (states,)),
        "starts": (starts, (states,)),
    }
    check_shapes("x", x, expected | layout)
    if resets is not None and str(resets.dtype).removeprefix("torch.") != "bool":
        raise ArgumentError(f"resets must be bool, found {resets.dtype}")
