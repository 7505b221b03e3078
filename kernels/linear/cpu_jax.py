"""Matrix products of few rows in JAX on a CPU, by a compiled kernel that XLA calls."""

import math

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct
from jaxtyping import Float

from griffin_eval.kernels import devices
from griffin_eval.kernels.cpu import compiled
from griffin_eval.kernels.registry import check_widths

MAX_ROWS = {"float32": 16, "bfloat16": 16, "float16": 32}  # rows up to which it is the fastest


def unsupported(x: Array, weight: Array) -> str | None:
    """Return the reason why the kernel cannot multiply these, or None."""
    if devices.platform(x) != "cpu":
        return "the compiled kernel runs on a CPU"
    if weight.dtype.name not in MAX_ROWS or x.dtype != weight.dtype:
        return f"the compiled kernel has no products of {x.dtype} with {weight.dtype}"
    if not 0 < math.prod(x.shape[:-1]) <= MAX_ROWS[weight.dtype.name]:
        return "the compiled kernel is for a few rows"
    if jax.sharding.get_abstract_mesh().size > 1:
        return "XLA splits products over devices, but no kernels"
    return compiled.missing_in_jax(_error)


def _error() -> float:
    x = jnp.ones((1, 3), jnp.bfloat16)
    return abs(float(product(x, 2 * x)[0, 0]) - 6)


@jax.custom_jvp
def product(x: Float[Array, "*N I"], weight: Float[Array, "O I"]) -> Float[Array, "*N O"]:
    """Compute x W^T in float32, differentiable, for arrays without a reason in `unsupported`.

    Raises:
        ArgumentError: The numbers of inputs of x and weight differ.
    """
    check_widths(x, weight)
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    out = ShapeDtypeStruct((len(rows), len(weight)), jnp.float32)
    y = jax.ffi.ffi_call("griffin_linear", out, vmap_method="sequential")(rows, weight)
    return y.reshape(*x.shape[:-1], len(weight))


@product.defjvp
def _derivative(primals, tangents):
    (x, weight), (dx, dweight) = primals, tangents

    def plain(x, weight):
        return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)

    return product(x, weight), plain(dx, weight) + plain(x, dweight)
