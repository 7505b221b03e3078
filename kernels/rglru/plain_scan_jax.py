"""The linear recurrence in JAX: a blocked two-pass scan with a backward pass of its own."""

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
    """Computes h_t = a_t * h_{t-1} + x_t (equation 4, its input already gated).

    Args:
        a: decay of each step, float32 or float64, or complex numbers of these.
        x: input of each step, of the same dtype.
        h0: state before the first step, of the same dtype.

    Returns:
        Every h_t; the last one is the state to carry on. Differentiable in all three arguments.
    """
    return _scan(a, x, h0)


def _forward(a, x, h0):
    h = _scan(a, x, h0)
    return h, (a, h, h0)


def _backward(saved, dh):
    # The adjoint is the same recurrence read backwards: g_t = dh_t + a_{t+1} g_{t+1}. Of a complex
    # number JAX hands on dL/dRe - i dL/dIm, so that nothing is conjugated.
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

    # About sqrt(T) blocks of sqrt(T) steps: first every block by itself and all of them at once,
    # then the state handed from block to block.
    block = math.isqrt(length - 1) + 1
    blocks = -(-length // block)
    pad = ((0, 0), (0, blocks * block - length), (0, 0))
    a = jnp.pad(a, pad, constant_values=1).reshape(batch, blocks, block, width)
    x = jnp.pad(x, pad).reshape(batch, blocks, block, width)

    def within(carry, step):
        decay, h = carry  # decay: product of a since the block began
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
