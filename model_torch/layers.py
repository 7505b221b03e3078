"""Layers of the model: linear map, norm, convolution, RG-LRU, rotary embedding."""

from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from griffin_eval import rope
from griffin_eval.config import Activation, GriffinConfig
from griffin_eval.kernels.linear.cpu_torch import Map, linear
from griffin_eval.kernels.rglru.api import rglru
from griffin_eval.kernels.rglru.plain_torch import accumulation_dtype
from griffin_eval.kernels.rglru.reference import Gates
from griffin_eval.layout import ParamScope
from griffin_eval.model_torch.layouts import StepContext
from griffin_eval.sharding.processes_torch import summed


def at_least_float32(x: Tensor) -> Tensor:
    """Cast to float32, unless x is wider."""
    return x.to(accumulation_dtype(x.dtype))


class Linear(nn.Module):
    """y = x W^T + b, with W of shape (out, in), or an activation of y.

    If each device or process holds a part of the inputs, y is the sum over them.
    """

    def __init__(self, params: ParamScope):
        super().__init__()
        self.weight = params("weight")
        self.bias = params.get("bias")
        # Whether each process holds a part of the inputs.
        self.partial = self.weight.shape[1] < params.spec("weight").shape[1]

    @property
    def map(self) -> Map:
        return Map(self.weight, self.bias)

    def forward(
        self, x: Float[Tensor, "B T I"], then: Activation | None = None
    ) -> Float[Tensor, "B T O"]:
        return summed(linear(x, *self.map, then or "none"), self.partial)


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), in float32 or wider."""

    def __init__(self, config: GriffinConfig, params: ParamScope):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = params("weight")

    def forward(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T W"]:
        y = at_least_float32(x)
        # vector_norm reads y once without a copy; squaring would write another array.
        mean_square = torch.linalg.vector_norm(y, dim=-1, keepdim=True).square() / y.shape[-1]
        y = y * torch.rsqrt(mean_square + self.eps)
        return torch.addcmul(y, y, at_least_float32(self.weight)).to(x.dtype)


class Conv1D(nn.Module):
    """Causal depthwise convolution within a document."""

    def __init__(self, config: GriffinConfig, params: ParamScope):
        super().__init__()
        self.width = config.conv_width
        self.weight = params("weight")
        self.bias = params.get("bias")

    def forward(
        self, x: Float[Tensor, "B T L"], context: StepContext, past: Float[Tensor, "S K L"]
    ) -> tuple[Float[Tensor, "B T L"], Float[Tensor, "S K L"]]:
        joined, taps = context.layout.join(past, x), self.width - 1
        weight = at_least_float32(self.weight)[:, 0].T.contiguous()
        y = at_least_float32(x)
        if self.bias is None:
            y = y * weight[-1]
        else:
            y = torch.addcmul(at_least_float32(self.bias), y, weight[-1])
        for age in range(1, self.width):
            earlier = at_least_float32(context.layout.earlier(joined, taps, age))
            same_document = (context.positions >= age)[:, :, None]
            # In place, since any other form writes y again for each tap.
            y.addcmul_(torch.where(same_document, earlier, 0.0), weight[-1 - age])
        return y.to(x.dtype), context.layout.last(past, joined)


class RGLRU(nn.Module):
    """Real-gated linear recurrent unit (section 2.4) or, with an imaginary parameter, complex-gated
    one (appendix B), computed in float32 or wider."""

    def __init__(self, config: GriffinConfig, params: ParamScope):
        super().__init__()
        self.constant = config.lru_constant
        self.recurrent_param = params("recurrent_param")
        self.input_gate_weight = params("input_gate_weight")
        self.input_gate_bias = params.get("input_gate_bias")
        self.recurrent_gate_weight = params("recurrent_gate_weight")
        self.recurrent_gate_bias = params.get("recurrent_gate_bias")
        self.imaginary_param = params.get("imaginary_param")

    def forward(
        self, x: Float[Tensor, "B T L"], context: StepContext, h0: Float[Tensor, "S L"]
    ) -> tuple[Float[Tensor, "B T L"], Float[Tensor, "S L"]]:
        gates = Gates(
            self.recurrent_param,
            self.input_gate_weight,
            _bias_or_zeros(self.input_gate_bias, self.input_gate_weight),
            self.recurrent_gate_weight,
            _bias_or_zeros(self.recurrent_gate_bias, self.recurrent_gate_weight),
            self.imaginary_param,
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


def _bias_or_zeros(bias: Tensor | None, weight: Float[Tensor, "G I O"]) -> Float[Tensor, "G O"]:
    return weight.new_zeros(len(weight), weight.shape[2]) if bias is None else bias


@cache
def _digit_tables(
    rotary_dim: int, rope_base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # training cannot use inference tensors
        cos, sin = rope.digit_tables(rotary_dim, rope_base)
        where = {"dtype": dtype, "device": device}
        return torch.tensor(cos, **where), torch.tensor(sin, **where)


def rotation(
    positions: Int[Tensor, "B T"], rotary_dim: int, rope_base: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "B T R"], Float[Tensor, "B T R"]]:
    """Return cosine and sine of RoPE's angles, exact to rounding at any position below 2**32."""
    cos_table, sin_table = _digit_tables(
        rotary_dim, rope_base, accumulation_dtype(dtype), positions.device
    )
    cos, sin = cos_table[0][positions % rope.BASE], sin_table[0][positions % rope.BASE]
    for place in range(1, rope.DIGITS):
        digit = positions // rope.BASE**place % rope.BASE
        c, s = cos_table[place][digit], sin_table[place][digit]
        cos, sin = cos * c - sin * s, sin * c + cos * s
    return cos, sin


def rotate(
    x: Float[Tensor, "B T H D"], cos: Float[Tensor, "B T R"], sin: Float[Tensor, "B T R"]
) -> Float[Tensor, "B T H D"]:
    """Rotate the leading 2R dimensions of every head, pairing dimension j with j + R."""
    pairs = cos.shape[-1]
    first, second, rest = (
        at_least_float32(x[..., :pairs]),
        at_least_float32(x[..., pairs : 2 * pairs]),
        x[..., 2 * pairs :],
    )
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)
