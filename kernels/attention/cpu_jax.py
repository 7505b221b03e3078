"""Local attention in JAX on a CPU, by a compiled kernel that XLA calls."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jaxtyping import Float, Int

from griffin_eval.kernels.attention import plain_jax
from griffin_eval.kernels.cpu import compiled


def unsupported(
    q: Float[Array | ShapeDtypeStruct, "B T H D"], keys: Any = None, values: Any = None
) -> str | None:
    """Return the reason why the kernel cannot read these queries, or None."""
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"the compiled kernel takes float32, bfloat16 or float16, not {q.dtype}"
    if q.shape[3] > compiled.MAX_HEAD_DIM:
        limit = compiled.MAX_HEAD_DIM
        return f"the compiled kernel takes heads of {limit} dimensions, not {q.shape[3]}"
    return compiled.missing_in_jax(_error)


def _error() -> float:
    one = jnp.ones((1, 1, 1, 1), jnp.float32)
    zero = jnp.zeros(1, jnp.int32)
    y = _call(0, one, one[0], 2 * one[0], zero[None], {"lengths": zero + 1})
    return abs(float(y[0, 0, 0]) - 2)


def local_attention(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "B Q J"] | Float[Array, "N J"],
    values: Float[Array, "B Q J"] | Float[Array, "N J"],
    max_age: Int[Array, "B T"],
    *,
    past: int,
    **layout: Any,
) -> Float[Array, "B T H*D"]:
    """See `griffin_eval.kernels.attention.api.local_attention`. Padding gets zeros; keys that no
    query sees are not read."""
    return _attention(past, q, keys, values, max_age, layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    past: int, q: Array, keys: Array, values: Array, max_age: Array, layout: dict[str, Any]
) -> Array:
    return _call(past, q, keys, values, max_age, layout)


def _attention_forward(past, *arrays):
    return _attention(past, *arrays), arrays


def _attention_backward(past, saved, grad):  # plain JAX recomputes the scores
    *floats, max_age, layout = saved

    def plain(q, keys, values):
        return plain_jax.local_attention(q, keys, values, max_age, past=past, **layout)

    return *jax.vjp(plain, *floats)[1](grad), None, None


_attention.defvjp(_attention_forward, _attention_backward)


def _call(
    past: int, q: Array, keys: Array, values: Array, max_age: Array, layout: dict[str, Any]
) -> Array:
    batch, length, heads, size = q.shape
    starts = layout.get("starts")
    if starts is None:
        starts = length * jnp.arange(batch, dtype=jnp.int32)
    newest = layout.get("newest")
    if newest is None:
        newest = jnp.full_like(starts, past)
    out = ShapeDtypeStruct((batch * length, heads, size), q.dtype)
    call = jax.ffi.ffi_call("griffin_attention", out, vmap_method="sequential")
    where = (newest, starts, layout["lengths"], jnp.minimum(max_age, past))
    arrays = [jnp.asarray(x, jnp.int32) for x in where]
    floats, rows = [q.reshape(out.shape), keys, values], []
    if remembered := layout.get("remembered"):
        floats += [remembered.keys, remembered.values]
        rows = [remembered.rows.astype(jnp.int32)]
    # The kernel reads uint16 arrays as 16-bit floats.
    floats = [x if x.dtype == jnp.uint16 else x.astype(q.dtype) for x in floats]
    return call(*arrays, *floats, *rows).reshape(batch, length, -1)
