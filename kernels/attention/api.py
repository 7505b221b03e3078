"""Local attention for the models: one signature, and the fastest kernel that can compute it."""

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
    """Causal attention over remembered keys and those of the queries' own tokens (section 2.3),
    multi-query or grouped-query, softmax in float32 or wider.

    Differentiable in q, keys and values. `griffin_eval.kernels.attention.reference` describes the
    three layouts: padded rows, rings and packed segments. Scores of T x T are never in memory.

    Args:
        q: [B, T, H, D] queries, of PyTorch, JAX or numpy (then the reference runs).
        keys, values: [B, Q, J], or [N, J] of packed segments, of the same dtype: J = D of one head
            of keys, K D of K heads side by side, each of which serves H / K neighbouring heads of
            queries. What no query sees must be finite.
        max_age: int [B, T], how many earlier tokens each query may see, fewer if the state holds
            fewer.
        past: P, remembered keys of each segment.
        lengths: int [S], tokens that are read; the result is undefined for other tokens.
        starts: int [S], starts of packed segments in the one row; None for padded rows.
        remembered: keys and values [R, P, J] that packed segments remember, and which of the R rows
            each segment does, int [S], from 0 to R - 1. The compiled kernel reads them in place.
        newest: int [B], slot of each row's own key where the Q slots are rings and T = 1; None for
            padded rows, whose remembered keys lie before those of the T tokens.
        blocks: of packed segments, from ``query_blocks`` of the framework's plain implementation.
        impl: an implementation of `registry.IMPLEMENTATIONS`, or ``auto``: see `choose`.

    Returns:
        [B, T, H D], the weighted values, heads joined, in the dtype of q.

    Raises:
        NotImplementedError: if the implementation asked for cannot compute this, and why.
        ArgumentError: shapes or devices that do not belong together.
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
    """The implementation that will run: the first that takes these arrays where they are.

    Args:
        q: queries.
        keys, values: as of `local_attention`; None for some like q.
        lengths, starts: as of `local_attention`; None for rows.
        impl: as of `local_attention`.

    Raises:
        NotImplementedError: if the one asked for does not take them, and why.
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
    """Check that arrays belong together, since kernels would read what is behind them.

    Raises:
        ArgumentError: they do not.
    """
    batch, length, heads, size = q.shape
    segments = len(lengths)
    slots = tuple(keys.shape)
    joined = slots[-1]  # dimensions of all heads of keys
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
            raise ArgumentError("packed segments (starts) lie in one row")
        if remembered is None:
            raise ArgumentError("packed segments (starts) need what they remember (remembered)")
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
