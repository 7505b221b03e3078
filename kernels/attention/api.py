"""Local attention: one signature for the models, and the fastest kernel that supports the call."""

from types import ModuleType
from typing import Any

from griffin_eval.errors import ArgumentError
from griffin_eval.kernels import devices, registry
from griffin_eval.kernels.attention.reference import Remembered
from griffin_eval.kernels.registry import Choice, Trial


def local_attention(
    q: Any,
    keys: Any,
    values: Any,
    max_age: Any,
    *,
    past: int,
    lengths: Any,
    starts: Any = None,
    remembered: Remembered | None = None,
    newest: Any = None,
    blocks: Any = None,
    impl: str = "auto",
) -> Any:
    """Compute causal attention over remembered keys and those of the queries' tokens (section 2.3).

    Attention is multi-query or grouped-query, with the softmax in float32 or wider. It is
    differentiable in q, keys and values, and never stores scores of T x T.
    `griffin_eval.kernels.attention.reference` describes the three layouts: padded rows, rings and
    packed segments.

    Args:
        q: [B, T, H, D] queries, of PyTorch, JAX or numpy (which uses the reference).
        keys, values: [B, Q, J], or [N, J] for packed segments, in the dtype of q. J = K D for K key
            heads side by side, each of which serves H / K neighbouring query heads. Entries that no
            query sees must be finite.
        max_age: int [B, T], largest number of earlier tokens that each query sees.
        past: P, number of remembered keys of each segment.
        lengths: int [S], number of tokens to read; the result is undefined for other tokens.
        starts: int [S], starts of packed segments in the one row; None for padded rows.
        remembered: Keys and values [R, P, J] of packed segments, and the row of each segment, int
            [S], from 0 to R - 1. The compiled kernel reads them in place.
        newest: int [B], slot of each row's own key if the Q slots are rings and T = 1; None for
            padded rows, whose remembered keys precede those of the T tokens.
        blocks: Blocks of packed segments, from ``query_blocks`` of the framework's plain
            implementation.
        impl: Name of an implementation in `registry.IMPLEMENTATIONS`, or ``auto``: see `choose`.

    Returns:
        [B, T, H D], the weighted values, heads joined, in the dtype of q.

    Raises:
        NotImplementedError: The named implementation does not support this call.
        ArgumentError: Shapes, devices or dtypes do not match.
    """
    _check_shapes(q, keys, values, max_age, past, lengths, starts, remembered, newest)
    choice = choose(q, keys, values, lengths=lengths, starts=starts, impl=impl)
    module = registry.module("attention", choice.name, q)
    layout = {"past": past, "lengths": lengths, "starts": starts, "newest": newest}
    layout["remembered"] = remembered
    if devices.framework(q) != "numpy":
        layout["blocks"] = blocks
    return module.local_attention(q, keys, values, max_age, **layout)


def choose(
    q: Any,
    keys: Any = None,
    values: Any = None,
    *,
    lengths: Any = None,
    starts: Any = None,
    impl: str = "auto",
) -> Choice:
    """Return the first implementation that supports these arrays on their device.

    Arguments are those of `local_attention`; keys and values default to arrays like q, lengths and
    starts to padded rows.

    Raises:
        NotImplementedError: The named implementation does not support them.
    """
    several = starts is not None and lengths is not None and len(lengths) > 1
    keys, values = (q if keys is None else keys), (q if values is None else values)

    def trial(module: ModuleType) -> Trial:
        return module.trial(q, keys)

    needs = [registry.SEVERAL_SEGMENTS] * several
    return registry.choose("attention", q, keys, values, needs=needs, trial=trial, impl=impl)


def _check_shapes(
    q: Any,
    keys: Any,
    values: Any,
    max_age: Any,
    past: int,
    lengths: Any,
    starts: Any,
    remembered: Remembered | None,
    newest: Any,
) -> None:
    """Check that arrays belong together, since kernels would read beyond smaller ones.

    Raises:
        ArgumentError: Shapes, devices or dtypes do not match.
    """
    batch, length, heads, size = q.shape
    segments = len(lengths)
    slots = tuple(keys.shape)
    joined = slots[-1]  # size of all key heads together
    if not joined or joined % size or heads % (joined // size):
        raise ArgumentError(
            f"the last axis of keys must be {size} or a multiple of it, of as many heads as divide "
            f"{heads}, beside a q of {list(q.shape)}, found {list(slots)}"
        )
    if starts is None:
        expected = {"lengths": (lengths, (batch,))}
        if len(slots) != 3 or slots[0] != batch or slots[1] < past + length:
            raise ArgumentError(
                f"keys must have the shape [{batch}, {past + length} or more, {joined}] beside a q "
                f"of {list(q.shape)}, found {list(slots)}"
            )
        if newest is not None:
            if length != 1:
                raise ArgumentError(f"rings (newest) take one query a row, found {length}")
            expected["newest"] = newest, (batch,)
    else:
        if batch != 1:
            raise ArgumentError("packed segments (starts) must lie in one row")
        if remembered is None:
            raise ArgumentError("packed segments (starts) need remembered=")
        _check_dtypes(q, remembered)
        kept = len(remembered.keys), past, joined
        expected = {
            "starts": (starts, (segments,)),
            "keys": (keys, (length, joined)),
            "remembered.keys": (remembered.keys, kept),
            "remembered.values": (remembered.values, kept),
            "remembered.rows": (remembered.rows, (segments,)),
        }
        slots = length, joined
    expected = {
        "keys": (keys, tuple(keys.shape)),
        "values": (values, slots),
        "max_age": (max_age, (batch, length)),
        "lengths": (lengths, (segments,)),
    } | expected
    registry.check_shapes("q", q, expected)


def _check_dtypes(q: Any, remembered: Remembered) -> None:
    """Check the dtype of remembered keys and values, which the compiled kernel reads like q. In JAX
    they may be stored as the bits of 16-bit floats, uint16."""
    for name in ("keys", "values"):
        dtype = getattr(remembered, name).dtype
        if str(dtype) not in (str(q.dtype), "uint16"):
            raise ArgumentError(
                f"remembered.{name} must have the dtype of q, {q.dtype}, found {dtype}"
            )
