"""Local attention for the models: one signature, and the fastest kernel that can compute it."""

from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from griffin_eval.errors import ArgumentError
from griffin_eval.kernels import devices
from griffin_eval.kernels.attention.reference import Remembered

# The implementations of each framework, the one to prefer first; the last takes everything.
IMPLEMENTATIONS = {
    "torch": {"cpu": "cpu_torch", "plain": "plain_torch"},
    "jax": {"tpu": "tpu_jax", "cpu": "cpu_jax", "plain": "plain_jax"},
    "numpy": {"reference": "reference"},
}


class Choice(NamedTuple):
    """An implementation, and the reasons for which those preferred to it cannot run.

    Attributes:
        name: a key of `IMPLEMENTATIONS` of the framework.
        refused: reason by name of each implementation that comes before it.
    """

    name: str
    refused: dict[str, str]


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
        impl: a key of `IMPLEMENTATIONS` of the framework, or ``auto``: see `choose`.

    Returns:
        [B, T, H D], the weighted values, heads joined, in the dtype of q.

    Raises:
        NotImplementedError: if the implementation asked for cannot compute this, and why.
        ArgumentError: shapes or devices that do not belong together.
    """
    _check_shapes(q, keys, values, max_age, past, lengths, starts, remembered, newest)
    module = _module(choose(q, keys, values, lengths=lengths, starts=starts, impl=impl).name, q)
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
    known = IMPLEMENTATIONS[devices.framework(q)]
    if impl not in (*known, "auto"):
        raise NotImplementedError(
            f"there is no implementation {impl!r} in {devices.framework(q)}: expected auto, "
            + ", ".join(known)
        )
    refused: dict[str, str] = {}
    for name in known:
        if impl not in (name, "auto"):
            continue
        reason = _unsupported(name, q, keys, values, lengths, starts)
        if reason is None:
            return Choice(name, refused)
        if impl != "auto":
            raise NotImplementedError(reason)
        refused[name] = reason
    raise AssertionError("plain implementations take everything")


def _unsupported(
    name: str, q: Any, keys: Any, values: Any, lengths: Any, starts: Any
) -> str | None:
    if name in ("plain", "reference"):
        return None
    platform = devices.platform(q)
    if platform != name:
        return f"the {name} kernel runs on {name}, and q is on {platform}"
    if name == "tpu" and starts is not None and len(lengths) > 1:
        return "splash attention takes rows or one packed segment"
    keys, values = (q if keys is None else keys), (q if values is None else values)
    return _module(name, q).unsupported(q, keys, values)


def _module(name: str, q: Any) -> ModuleType:
    file = IMPLEMENTATIONS[devices.framework(q)][name]
    return import_module(f"griffin_eval.kernels.attention.{file}")


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
    expected |= {"values": (values, slots), "max_age": (max_age, (batch, length))}
    for name, (array, shape) in expected.items():
        if tuple(array.shape) != shape:
            raise ArgumentError(
                f"{name} must have the shape {list(shape)} beside a q of {list(q.shape)}, "
                f"found {list(array.shape)}"
            )
    arrays = {"keys": keys, "lengths": lengths} | {
        name: array for name, (array, _) in expected.items()
    }
    if wrong := devices.elsewhere("q", q, arrays):
        raise ArgumentError("; ".join(wrong))
