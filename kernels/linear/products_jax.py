"""Linear maps in JAX: few rows on a CPU by the compiled kernel, otherwise by XLA."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from griffin_eval.config import Activation
from griffin_eval.kernels.linear import cpu_jax
from griffin_eval.kernels.linear.quantised_jax import QuantisedMatrix
from griffin_eval.kernels.rglru.plain_jax import accumulation_dtype

_ACTIVATIONS = {
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}


class Map(NamedTuple):
    """A linear map: a matrix with outputs first, and an optional bias."""

    weight: Float[Array, "O I"] | QuantisedMatrix
    bias: Float[Array, " O"] | None


def product(
    x: Float[Array, "*N I"], weight: Float[Array, "O I"] | QuantisedMatrix
) -> Float[Array, "*N O"]:
    """Compute x W^T, accumulated and returned in float32 or wider.

    Few rows on a CPU use the compiled kernel. On a CPU, XLA reads a weight of 16 bits directly in
    only two forms: one row times W^T, and several rows contracted with the second axis of W (not in
    float16). In any other form it converts the whole weight to float32 at every step, which takes
    14 times as long. A weight of 32 bits is transposed at every step of one row unless it is
    contracted along its second axis.
    """
    if isinstance(weight, QuantisedMatrix):
        return weight.products(x, product)
    if cpu_jax.unsupported(x, weight) is None:
        return cpu_jax.product(x, weight)
    wider = accumulation_dtype(x.dtype)
    if x.size == x.shape[-1] and weight.dtype.itemsize < 4:
        return jnp.matmul(x, weight.T, preferred_element_type=wider)
    return jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=wider)


def linear(
    x: Float[Array, "B T I"], by: Map, then: Activation | None = None
) -> Float[Array, "B T O"]:
    """Compute x W^T + b in the dtype of x, or an activation of it, computed in float32 or wider."""
    y = product(x, by.weight).astype(x.dtype)
    if by.bias is not None:
        y = y + by.bias.reshape((1,) * (y.ndim - 1) + by.bias.shape)
    if then is None:
        return y
    return _ACTIVATIONS[then](y.astype(accumulation_dtype(y.dtype))).astype(x.dtype)


def gated(x: Float[Array, "B T I"], gate: Map, up: Map, by: Activation) -> Float[Array, "B T O"]:
    """Compute an activation of one map of x, times another map of x."""
    return linear(x, gate, by) * linear(x, up)
