"""The linear recurrence in JAX: a blocked two-pass scan with its own backward pass."""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Inexact

_STEPWISE = 8  # up to this length an unrolled loop is shorter than the two passes


@jax.custom_vjp
def linear_scan(
    a: Inexact[Array, "B T D"], x: Inexact[Array, "B T D"], h0: Inexact[Array, "B D"]
) -> Inexact[Array, "B T D"]:
    """Compute h_t = a_t * h_{t-1} + x_t (equation 4, with gated input).

    a, x and h0 have one dtype: float32, float64, or complex numbers of these. Differentiable in all
    three. Return every h_t.
    """
    return _scan(a, x, h0)


def _forward(a, x, h0):
    h = _scan(a, x, h0)
    return h, (a, h, h0)


def _backward(saved, dh):
    # The adjoint is the same recurrence backwards: g_t = dh_t + a_{t+1} g_{t+1}. For complex
    # numbers JAX passes dL/dRe - i dL/dIm, so that nothing is conjugated.
    a, h, h0 = saved
    shifted = jnp.concatenate([a[:, 1:], jnp.zeros_like(a[:, :1])], 1)
    g = _scan(shifted[:, ::-1], dh[:, ::-1], jnp.zeros_like(h0))[:, ::-1]
    previous = jnp.concatenate([h0[:, None], h[:, :-1]], 1)
    return g * previous, g, a[:, 0] * g[:, 0]


linear_scan.defvjp(_forward, _backward)


def _scan(a: Array, x: Array, h0: Array) -> Array:
    batch, length, width = x.shape
    if length <= _STEPWISE:
        steps = []
        h = h0
        for t in range(length):
            h = a[:, t] * h + x[:, t]
            steps.append(h)
        return jnp.stack(steps, 1)

    # About sqrt(T) blocks of sqrt(T) steps: first all blocks at once from zero states, then the
    # state from block to block.
    block = math.isqrt(length - 1) + 1
    blocks = -(-length // block)
    pad = ((0, 0), (0, blocks * block - length), (0, 0))
    a = jnp.pad(a, pad, constant_values=1).reshape(batch, blocks, block, width)
    x = jnp.pad(x, pad).reshape(batch, blocks, block, width)

    def within(carry, step):
        decay, h = carry  # decay: product of a since the start of the block
        a_t, x_t = step
        carry = (decay * a_t, a_t * h + x_t)
        return carry, carry

    start = (jnp.ones_like(a[:, :, 0]), jnp.zeros_like(x[:, :, 0]))
    _, (decay, h) = lax.scan(within, start, (jnp.moveaxis(a, 2, 0), jnp.moveaxis(x, 2, 0)))

    def across(before, last):
        decay_last, h_last = last
        return decay_last * before + h_last, before

    _, before = lax.scan(across, h0, (jnp.moveaxis(decay[-1], 1, 0), jnp.moveaxis(h[-1], 1, 0)))
    h = h + decay * jnp.moveaxis(before, 0, 1)[None]
    return jnp.moveaxis(h, 0, 2).reshape(batch, -1, width)[:, :length]
