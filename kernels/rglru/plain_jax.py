"""The recurrences in plain JAX, on any device and in any precision."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Complex, Float, Inexact, Int

from griffin_eval.kernels.rglru.plain_scan_jax import linear_scan as blocked_scan
from griffin_eval.kernels.rglru.reference import MAX_SQRT_GRADIENT, C, Gates


def accumulation_dtype(dtype: Any) -> Any:
    """Return float32, or the dtype itself if it is wider."""
    return dtype if jnp.dtype(dtype).itemsize >= 4 else jnp.float32


def linear_scan(
    a: Inexact[Array, "B T D"],
    x: Inexact[Array, "B T D"],
    h0: Inexact[Array, "S D"],
    *,
    resets: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " S"] | None = None,
    starts: Int[Array, " S"] | None = None,
    scan: Callable[[Array, Array, Array], Array] = blocked_scan,
) -> tuple[Inexact[Array, "B T D"], Inexact[Array, "S D"]]:
    """See `griffin_eval.kernels.rglru.api.linear_scan`; ``scan`` reads rows without resets."""
    dtype, wider = x.dtype, accumulation_dtype(x.dtype)
    a, x, h0 = a.astype(wider), x.astype(wider), h0.astype(wider)
    if resets is not None:
        a = jnp.where(resets[:, :, None], 0.0, a)
    time = x.shape[1]
    if starts is None:
        if lengths is not None:
            padding = (jnp.arange(time, dtype=lengths.dtype)[None] >= lengths[:, None])[:, :, None]
            a, x = jnp.where(padding, 1.0, a), jnp.where(padding, 0.0, x)
        h = scan(a, x, h0)
        return h.astype(dtype), h[:, -1]
    # One recurrence over the whole row: the first step of a segment forgets the previous state
    # (a = 0) and has the segment's own state as part of its input (a h0 + x).
    assert lengths is not None
    read = (lengths > 0)[:, None]
    some, first = (lengths > 0).astype(jnp.int32), jnp.minimum(starts, time - 1)
    begins = jnp.zeros(time + 1, jnp.int32).at[first].add(some)
    inside = jnp.cumsum(begins.at[first + lengths].add(-some))[None, :-1, None] > 0
    x = jnp.where(inside, x, 0.0)
    x = x.at[0, first].add(jnp.where(read, a[0, first] * h0, 0.0))
    a = jnp.where(inside & (begins[None, :-1, None] == 0), a, 0.0)
    h = scan(a, x, jnp.zeros_like(h0[:1]))
    return h.astype(dtype), jnp.where(read, h[0, jnp.maximum(starts + lengths - 1, 0)], h0)


def rglru(
    x: Float[Array, "B T L"],
    gates: Gates,
    h0: Float[Array, "S L"],
    *,
    resets: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " S"] | None = None,
    starts: Int[Array, " S"] | None = None,
    c: float = C,
    scan: Callable[[Array, Array, Array], Array] = blocked_scan,
) -> tuple[Float[Array, "B T L"], Float[Array, "S L"]]:
    """See `griffin_eval.kernels.rglru.api.rglru`; ``scan`` reads rows without resets."""
    wider = accumulation_dtype(x.dtype)
    x_t = x.astype(wider)
    # (1) and (2): r_t = sigma(W_a x_t + b_a), i_t = sigma(W_x x_t + b_x)
    r_t = jax.nn.sigmoid(block_diagonal(x, gates.recurrent_weight, gates.recurrent_bias))
    i_t = jax.nn.sigmoid(block_diagonal(x, gates.input_weight, gates.input_bias))
    log_a = _log_decay(r_t, gates, c)
    # (4): h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t); a document starts with h_t = i_t x_t.
    multiplier = bounded_sqrt(-jnp.expm1(2 * log_a))
    if resets is not None:
        multiplier = jnp.where(resets[:, :, None], 1.0, multiplier)
    layout = {"resets": resets, "lengths": lengths, "starts": starts, "scan": scan}
    if gates.imaginary_param is None:
        h, last = linear_scan(jnp.exp(log_a), multiplier * i_t * x_t, h0, **layout)
        return h.astype(x.dtype), last
    radius, angle = jnp.exp(log_a), gates.imaginary_param.astype(wider)[None, None] * r_t
    a_t = lax.complex(radius * jnp.cos(angle), radius * jnp.sin(angle))
    gated = jnp.concatenate([multiplier * i_t] * 2, -1) * x_t
    h, last = linear_scan(a_t, _joined(gated), _joined(h0.astype(wider)), **layout)
    return _halves(h).astype(x.dtype), _halves(last)


def total_decay(
    x: Float[Array, "B T L"],
    gates: Gates,
    *,
    resets: Bool[Array, "B T"],
    lengths: Int[Array, " B"],
    c: float = C,
) -> Float[Array, "B L"]:
    """Return the share of the initial states that is left after the last step: the product of all
    a_t of the RG-LRU, in float32 or wider. Arguments are those of `rglru` for rows."""
    r_t = jax.nn.sigmoid(block_diagonal(x, gates.recurrent_weight, gates.recurrent_bias))
    time = jnp.arange(x.shape[1], dtype=lengths.dtype)[None]
    log_a = jnp.where(resets[:, :, None], -jnp.inf, _log_decay(r_t, gates, c))
    return jnp.exp(jnp.sum(jnp.where((time < lengths[:, None])[:, :, None], log_a, 0.0), 1))


def _log_decay(r_t: Float[Array, "B T L"], gates: Gates, c: float) -> Float[Array, "B T L"]:
    """Return the logarithm of a_t = sigma(-Lambda)^(c r_t) (3)."""
    return -c * jax.nn.softplus(gates.recurrent_param.astype(r_t.dtype))[None, None] * r_t


def _joined(halves: Float[Array, "*N L"]) -> Complex[Array, "*N Z"]:
    """Return complex numbers from real parts followed by imaginary parts."""
    return lax.complex(*jnp.split(halves, 2, -1))


def _halves(numbers: Complex[Array, "*N Z"]) -> Float[Array, "*N L"]:
    """Invert `_joined`."""
    return jnp.concatenate([numbers.real, numbers.imag], -1)


def block_diagonal(
    x: Float[Array, "B T L"], weight: Float[Array, "G I O"], bias: Float[Array, "G O"]
) -> Float[Array, "B T M"]:
    """Compute x W + b in float32 or wider; W has G blocks of I x O on its diagonal, M = G O."""
    (batch, length, _), wider = x.shape, accumulation_dtype(x.dtype)
    blocks = x.astype(wider).reshape(batch, length, *weight.shape[:2])
    # By default accelerators round float32 factors to fewer bits, TPUs to bfloat16.
    rounded = x.dtype == weight.dtype == jnp.bfloat16
    precision = None if rounded else lax.Precision.HIGHEST
    y = jnp.einsum("btgi,gio->btgo", blocks, weight.astype(wider), precision=precision)
    return (y + bias.astype(wider)[None, None]).reshape(batch, length, -1)


@jax.custom_vjp
def bounded_sqrt(x: Array) -> Array:
    """Return sqrt(x) with a derivative of at most ``MAX_SQRT_GRADIENT``, for a_t near 1."""
    return jnp.sqrt(x)


bounded_sqrt.defvjp(
    lambda x: (jnp.sqrt(x), x),
    lambda x, g: (g / jnp.sqrt(jnp.maximum(4 * x, MAX_SQRT_GRADIENT**-2)),),
)
