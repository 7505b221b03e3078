"""Local attention in JAX on a CPU, in float32, by the compiled kernel as a call from XLA."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from griffin_eval.kernels import cpu


def unsupported(q: Float[Array | jax.ShapeDtypeStruct, "B T H D"]) -> str | None:
    """Why the kernel cannot read these queries, if it cannot."""
    if q.dtype != jnp.float32:
        return f"the compiled kernel takes float32, not {q.dtype}"
    if q.shape[3] > cpu.MOST_HEAD_DIM:
        return (
            f"the compiled kernel takes heads of {cpu.MOST_HEAD_DIM} dimensions, not {q.shape[3]}"
        )
    return _missing()


@functools.cache
def _missing() -> str | None:
    return cpu.missing_in_jax(["attention"], _works)


def _works() -> bool:
    one = jnp.ones((1, 1, 1, 1), jnp.float32)
    zero = jnp.zeros(1, jnp.int32)
    y = local_attention(one, one[0], 2 * one[0], zero[None], zero, zero + 1, 0)
    return float(y[0, 0, 0]) == 2.0


def local_attention(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "S Q D"] | Float[Array, "Q D"],
    values: Float[Array, "S Q D"] | Float[Array, "Q D"],
    reach: Int[Array, "B T"],
    starts: Int[Array, " S"],
    lengths: Int[Array, " S"],
    newest: int | Int[Array, ""],
) -> Float[Array, "B T W"]:
    """See `griffin_eval.kernels.attention_cpu_torch.local_attention`; no derivative."""
    batch, length, heads, size = q.shape
    out = jax.ShapeDtypeStruct((batch * length, heads, size), jnp.float32)
    call = jax.ffi.ffi_call("griffin_attention", out, vmap_method="sequential")
    places = (jnp.asarray(x, jnp.int32) for x in (newest, starts, lengths, reach))
    floats = (x.astype(jnp.float32) for x in (q.reshape(out.shape), keys, values))
    return call(*places, *floats).reshape(batch, length, -1)
