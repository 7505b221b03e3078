"""The residual block: temporal mixing (recurrent or attention), then a gated MLP."""

from typing import Any

from flax import nnx
from jax import Array
from jaxtyping import Float

from griffin_eval.config import Activation, BlockType, GriffinConfig
from griffin_eval.kernels.linear.products_jax import gated
from griffin_eval.layout import ParamScope
from griffin_eval.model_jax.layers import RGLRU, Conv1D, Linear, RMSNorm, rotate
from griffin_eval.model_jax.layouts import StepContext
from griffin_eval.model_jax.state import AttentionState, RecurrentState


class RecurrentBlock(nnx.Module):
    """Convolution and RG-LRU on one branch, an activation on the other, merged by a product
    (figure 2c)."""

    def __init__(self, config: GriffinConfig, params: ParamScope):
        self.linear_y = Linear(params / "linear_y")
        self.linear_x = Linear(params / "linear_x")
        self.linear_out = Linear(params / "linear_out")
        self.conv_1d = Conv1D(config, params / "conv_1d")
        self.rg_lru = RGLRU(config, params / "rg_lru")
        self.activation: Activation = config.hidden_activation

    def __call__(
        self, x: Float[Array, "B T W"], context: StepContext, state: RecurrentState
    ) -> tuple[Float[Array, "B T W"], RecurrentState]:
        y_branch = self.linear_y(x, self.activation)
        x_branch, conv = self.conv_1d(self.linear_x(x), context, state.conv)
        x_branch, h = self.rg_lru(x_branch, context, state.h)
        return self.linear_out(x_branch * y_branch), RecurrentState(h, conv)


class AttentionBlock(nnx.Module):
    """Causal attention over remembered keys and those of the step (section 2.3), with one or
    several key heads.

    Local and global attention differ only in the number of keys in the state.
    """

    def __init__(self, config: GriffinConfig, params: ParamScope):
        self.head_size = config.head_size
        self.q_proj = Linear(params / "q_proj")
        self.k_proj = Linear(params / "k_proj")
        self.v_proj = Linear(params / "v_proj")
        self.o_proj = Linear(params / "o_proj")

    def __call__(
        self, x: Float[Array, "B T W"], context: StepContext, state: AttentionState
    ) -> tuple[Float[Array, "B T W"], AttentionState]:
        batch, length, _ = x.shape
        q = self.q_proj(x).reshape(batch, length, -1, self.head_size)
        q = rotate(q, context.cos, context.sin)
        k = self.k_proj(x).reshape(batch, length, -1, self.head_size)
        k = rotate(k, context.cos, context.sin).reshape(batch, length, -1)
        y, state = context.layout.attend(q, k, self.v_proj(x), context, state)
        return self.o_proj(y), state


class MLPBlock(nnx.Module):
    """down(GeLU(gate(x)) * up(x)) (section 2.2), or with another activation."""

    def __init__(self, config: GriffinConfig, params: ParamScope):
        self.gate_proj = Linear(params / "gate_proj")
        self.up_proj = Linear(params / "up_proj")
        self.down_proj = Linear(params / "down_proj")
        self.activation: Activation = config.hidden_activation

    def __call__(self, x: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        y = gated(x, self.gate_proj.map, self.up_proj.map, self.activation)
        return self.down_proj(y)


class ResidualBlock(nnx.Module):
    """Temporal mixing, then the MLP, each with pre-norm and residual (figure 2a)."""

    def __init__(self, config: GriffinConfig, block_type: BlockType, params: ParamScope):
        temporal: Any = RecurrentBlock if block_type == "recurrent" else AttentionBlock
        self.temporal_pre_norm = RMSNorm(config, params / "temporal_pre_norm")
        self.temporal_block = temporal(config, params / "temporal_block")
        self.channel_pre_norm = RMSNorm(config, params / "channel_pre_norm")
        self.mlp_block = MLPBlock(config, params / "mlp_block")

    def __call__(
        self, x: Float[Array, "B T W"], context: StepContext, state: RecurrentState | AttentionState
    ) -> tuple[Float[Array, "B T W"], RecurrentState | AttentionState]:
        y, state = self.temporal_block(self.temporal_pre_norm(x), context, state)
        x = x + y
        return x + self.mlp_block(self.channel_pre_norm(x)), state
