"""The residual block: temporal mixing (recurrent or multi-query attention), then a gated MLP."""

from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from griffin_eval.config import BlockType, GriffinConfig
from griffin_eval.kernels.linear_torch import linear
from griffin_eval.layout import Scope
from griffin_eval.model_torch.chunks import Chunk, Tile, local_attention
from griffin_eval.model_torch.layers import RGLRU, Conv1D, Linear, RMSNorm, rotate
from griffin_eval.model_torch.state import AttentionState, RecurrentState


class RecurrentBlock(nn.Module):
    """Convolution and RG-LRU on one branch, GeLU on the other, merged by a product (figure 2c)."""

    def __init__(self, config: GriffinConfig, params: Scope):
        super().__init__()
        self.linear_y = Linear(params / "linear_y")
        self.linear_x = Linear(params / "linear_x")
        self.linear_out = Linear(params / "linear_out")
        self.conv_1d = Conv1D(config, params / "conv_1d")
        self.rg_lru = RGLRU(config, params / "rg_lru")

    def forward(
        self, x: Float[Tensor, "B T W"], chunk: Chunk, state: RecurrentState
    ) -> tuple[Float[Tensor, "B T W"], RecurrentState]:
        y_branch = linear(x, self.linear_y.weight, self.linear_y.bias, "gelu")
        x_branch, conv = self.conv_1d(self.linear_x(x), chunk, state.conv)
        x_branch, h = self.rg_lru(x_branch, chunk, state.h)
        return self.linear_out(x_branch * y_branch), RecurrentState(h, conv)


class AttentionBlock(nn.Module):
    """Causal multi-query attention over the remembered keys and the chunk's own (section 2.3).

    Local and global attention differ only in how many keys the state remembers.
    """

    def __init__(self, config: GriffinConfig, params: Scope):
        super().__init__()
        self.heads = config.num_heads
        self.q_proj = Linear(params / "q_proj")
        self.k_proj = Linear(params / "k_proj")
        self.v_proj = Linear(params / "v_proj")
        self.o_proj = Linear(params / "o_proj")

    def forward(
        self, x: Float[Tensor, "B T W"], chunk: Chunk, state: AttentionState
    ) -> tuple[Float[Tensor, "B T W"], AttentionState]:
        batch, length, _ = x.shape
        q = rotate(self.q_proj(x).reshape(batch, length, self.heads, -1), chunk.cos, chunk.sin)
        k = rotate(self.k_proj(x)[:, :, None], chunk.cos, chunk.sin)[:, :, 0]
        v = self.v_proj(x)
        keys, values = chunk.layout.join(state.k, k), chunk.layout.join(state.v, v)

        y = local_attention(chunk.layout, _attend, q, keys, values, chunk.reach)
        k, v = chunk.layout.last(state.k, keys), chunk.layout.last(state.v, values)
        return self.o_proj(y), AttentionState(k, v)


def _attend(tile: Tile) -> Float[Tensor, "M t H D"]:
    heads = tile.q.shape[2]
    return F.scaled_dot_product_attention(
        tile.q.transpose(1, 2),
        tile.k[:, None].expand(-1, heads, -1, -1),
        tile.v[:, None].expand(-1, heads, -1, -1),
        attn_mask=tile.seen[:, None],
    ).transpose(1, 2)


class MLPBlock(nn.Module):
    """down(GeLU(gate(x)) * up(x)) (section 2.2)."""

    def __init__(self, config: GriffinConfig, params: Scope):
        super().__init__()
        self.gate_proj = Linear(params / "gate_proj")
        self.up_proj = Linear(params / "up_proj")
        self.down_proj = Linear(params / "down_proj")

    def forward(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T W"]:
        y = linear(x, self.gate_proj.weight, self.gate_proj.bias, "gelu")
        return self.down_proj(linear(x, self.up_proj.weight, self.up_proj.bias, "mul", y))


class ResidualBlock(nn.Module):
    """Pre-norm residual pattern: temporal mixing, then the MLP (figure 2a)."""

    def __init__(self, config: GriffinConfig, block_type: BlockType, params: Scope):
        super().__init__()
        temporal: Any = RecurrentBlock if block_type == "recurrent" else AttentionBlock
        self.temporal_pre_norm = RMSNorm(config, params / "temporal_pre_norm")
        self.temporal_block = temporal(config, params / "temporal_block")
        self.channel_pre_norm = RMSNorm(config, params / "channel_pre_norm")
        self.mlp_block = MLPBlock(config, params / "mlp_block")

    def forward(
        self, x: Float[Tensor, "B T W"], chunk: Chunk, state: RecurrentState | AttentionState
    ) -> tuple[Float[Tensor, "B T W"], RecurrentState | AttentionState]:
        y, state = self.temporal_block(self.temporal_pre_norm(x), chunk, state)
        x = x + y
        return x + self.mlp_block(self.channel_pre_norm(x)), state
