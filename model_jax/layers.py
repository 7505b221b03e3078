"""Layers of the model: linear map, norm, convolution, RG-LRU, rotary embedding."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from griffin_eval import rope
from griffin_eval.config import Activation, GriffinConfig
from griffin_eval.kernels.linear.products_jax import Map, linear
from griffin_eval.kernels.rglru.plain_jax import accumulation_dtype
from griffin_eval.kernels.rglru.reference import Gates
from griffin_eval.layout import ParamScope
from griffin_eval.model_jax.layouts import StepContext
from griffin_eval.sharding.mesh_jax import rglru, summed
from griffin_eval.sharding.split import RULES


def at_least_float32(x: Array) -> Array:
    """Cast to float32, unless x is wider."""
    return x.astype(accumulation_dtype(x.dtype))


class Linear(nnx.Module):
    """y = x W^T + b, with W of shape (out, in), or an activation of y.

    If each device or process holds a part of the inputs, y is the sum over them.
    """

    def __init__(self, params: ParamScope):
        self.weight = params("weight")
        self.bias = params.get("bias")
        # Whether each device of a mesh may hold a part of the inputs.
        self.partial = params.spec("weight").axes[1] in RULES

    @property
    def map(self) -> Map:
        return Map(self.weight[...], None if self.bias is None else self.bias[...])

    def __call__(
        self, x: Float[Array, "B T I"], then: Activation | None = None
    ) -> Float[Array, "B T O"]:
        y = linear(x, self.map, then)
        return summed(y) if self.partial else y


def _like(vector: Array, x: Array) -> Array:
    """Add leading axes of size one, so that a vector broadcasts against ``x`` by rank."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


class RMSNorm(nnx.Module):
    """x / rms(x) * (1 + weight), in float32 or wider."""

    def __init__(self, config: GriffinConfig, params: ParamScope):
        self.eps = config.norm_eps
        self.weight = params("weight")

    def __call__(self, x: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        y = at_least_float32(x)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        return (y * _like(1 + at_least_float32(self.weight[...]), y)).astype(x.dtype)


class Conv1D(nnx.Module):
    """Causal depthwise convolution within a document."""

    def __init__(self, config: GriffinConfig, params: ParamScope):
        self.width = config.conv_width
        self.weight = params("weight")
        self.bias = params.get("bias")

    def __call__(
        self, x: Float[Array, "B T L"], context: StepContext, past: Float[Array, "S K L"]
    ) -> tuple[Float[Array, "B T L"], Float[Array, "S K L"]]:
        joined, taps = context.layout.join(past, x), self.width - 1
        weight = at_least_float32(self.weight[...])
        y = at_least_float32(x) * _like(weight[:, 0, -1], x)
        if self.bias is not None:
            y = y + _like(at_least_float32(self.bias[...]), x)
        for age in range(1, self.width):
            earlier = at_least_float32(context.layout.earlier(joined, taps, age))
            same_document = (context.positions >= age)[:, :, None]
            y = y + jnp.where(same_document, earlier * _like(weight[:, 0, -1 - age], x), 0.0)
        return y.astype(x.dtype), context.layout.last(past, joined)


class RGLRU(nnx.Module):
    """Real-gated linear recurrent unit (section 2.4) or, with an imaginary parameter, complex-gated
    one (appendix B), computed in float32 or wider."""

    def __init__(self, config: GriffinConfig, params: ParamScope):
        self.constant = config.lru_constant
        self.recurrent_param = params("recurrent_param")
        self.input_gate_weight = params("input_gate_weight")
        self.input_gate_bias = params.get("input_gate_bias")
        self.recurrent_gate_weight = params("recurrent_gate_weight")
        self.recurrent_gate_bias = params.get("recurrent_gate_bias")
        self.imaginary_param = params.get("imaginary_param")

    def __call__(
        self, x: Float[Array, "B T L"], context: StepContext, h0: Float[Array, "S L"]
    ) -> tuple[Float[Array, "B T L"], Float[Array, "S L"]]:
        gates = Gates(
            self.recurrent_param[...],
            self.input_gate_weight[...],
            _bias_or_zeros(self.input_gate_bias, self.input_gate_weight),
            self.recurrent_gate_weight[...],
            _bias_or_zeros(self.recurrent_gate_bias, self.recurrent_gate_weight),
            None if self.imaginary_param is None else self.imaginary_param[...],
        )
        layout = context.layout
        return rglru(
            x,
            gates,
            h0,
            resets=context.positions == 0,
            lengths=layout.lengths,
            starts=layout.starts,
            c=self.constant,
        )


def _bias_or_zeros(bias: nnx.Param | None, weight: nnx.Param) -> Float[Array, "G O"]:
    return jnp.zeros((len(weight), weight.shape[2]), weight.dtype) if bias is None else bias[...]


def rotation(
    positions: Int[Array, "B T"], rotary_dim: int, rope_base: float, dtype: jnp.dtype
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Return cosine and sine of RoPE's angles, exact to rounding at any position below 2**32."""
    tables = rope.digit_tables(rotary_dim, rope_base)
    cos_table, sin_table = (jnp.asarray(t, dtype=accumulation_dtype(dtype)) for t in tables)
    cos, sin = cos_table[0][positions % rope.BASE], sin_table[0][positions % rope.BASE]
    for place in range(1, rope.DIGITS):
        digit = positions // rope.BASE**place % rope.BASE
        c, s = cos_table[place][digit], sin_table[place][digit]
        cos, sin = cos * c - sin * s, sin * c + cos * s
    return cos, sin


def rotate(
    x: Float[Array, "B T H D"], cos: Float[Array, "B T R"], sin: Float[Array, "B T R"]
) -> Float[Array, "B T H D"]:
    """Rotate the leading 2R dimensions of every head, pairing dimension j with j + R."""
    pairs = cos.shape[-1]
    first, second, rest = (
        at_least_float32(x[..., :pairs]),
        at_least_float32(x[..., pairs : 2 * pairs]),
        x[..., 2 * pairs :],
    )
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    return jnp.concatenate([turned.astype(x.dtype), rest], -1)
