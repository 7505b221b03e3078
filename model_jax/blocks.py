"""The residual block: temporal mixing (recurrent or multi-query attention), then a gated MLP."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from griffin_eval.config import BlockType, GriffinConfig
from griffin_eval.layout import Scope
from griffin_eval.model_jax.chunks import Chunk, Tile, local_attention
from griffin_eval.model_jax.layers import RGLRU, Conv1D, Linear, RMSNorm, rotate, wide, wide_dtype
from griffin_eval.model_jax.state import AttentionState, RecurrentState


def gelu(x: Array) -> Array:
    return jax.nn.gelu(wide(x), approximate=True).astype(x.dtype)


class RecurrentBlock(nnx.Module):
    """Convolution and RG-LRU on one branch, GeLU on the other, merged by a product (figure 2c)."""

    def __init__(self, config: GriffinConfig, params: Scope):
        self.linear_y = Linear(params / "linear_y")
        self.linear_x = Linear(params / "linear_x")
        self.linear_out = Linear(params / "linear_out")
        self.conv_1d = Conv1D(config, params / "conv_1d")
        self.rg_lru = RGLRU(config, params / "rg_lru")

    def __call__(
        self, x: Float[Array, "B T W"], chunk: Chunk, state: RecurrentState
    ) -> tuple[Float[Array, "B T W"], RecurrentState]:
        y_branch = gelu(self.linear_y(x))
        x_branch, conv = self.conv_1d(self.linear_x(x), chunk, state.conv)
        x_branch, h = self.rg_lru(x_branch, chunk, state.h)
        return self.linear_out(x_branch * y_branch), RecurrentState(h, conv)


class AttentionBlock(nnx.Module):
    """Causal multi-query attention over the remembered keys and the chunk's own (section 2.3).

    Local and global attention differ only in how many keys the state remembers.
    """

    def __init__(self, config: GriffinConfig, params: Scope):
        self.heads = config.num_heads
        self.q_proj = Linear(params / "q_proj")
        self.k_proj = Linear(params / "k_proj")
        self.v_proj = Linear(params / "v_proj")
        self.o_proj = Linear(params / "o_proj")

    def __call__(
        self, x: Float[Array, "B T W"], chunk: Chunk, state: AttentionState
    ) -> tuple[Float[Array, "B T W"], AttentionState]:
        batch, length, _ = x.shape
        q = rotate(self.q_proj(x).reshape(batch, length, self.heads, -1), chunk.cos, chunk.sin)
        k = rotate(self.k_proj(x)[:, :, None], chunk.cos, chunk.sin)[:, :, 0]
        v = self.v_proj(x)
        keys, values = chunk.layout.join(state.k, k), chunk.layout.join(state.v, v)

        y = local_attention(chunk.layout, _attend, q, keys, values, chunk.reach)
        k, v = chunk.layout.last(state.k, keys), chunk.layout.last(state.v, values)
        return self.o_proj(y), AttentionState(k, v)


def _attend(tile: Tile) -> Float[Array, "M t H D"]:
    # jax.nn.dot_product_attention takes its softmax in float32 even where the model is float64.
    # Keys go first: on a CPU few queries are read half as fast the other way round.
    batch, length, heads, size = tile.q.shape
    q = tile.q.reshape(batch, length * heads, size)
    wider = wide_dtype(q.dtype)
    scores = jnp.einsum("bsd,bqd->bsq", tile.k, q, preferred_element_type=wider) * size**-0.5
    seen = jnp.repeat(tile.seen.transpose(0, 2, 1), heads, axis=2)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=1).astype(q.dtype)
    return jnp.einsum("bsq,bsd->bqd", weights, tile.v).reshape(tile.q.shape)


class MLPBlock(nnx.Module):
    """down(GeLU(gate(x)) * up(x)) (section 2.2)."""

    def __init__(self, config: GriffinConfig, params: Scope):
        self.gate_proj = Linear(params / "gate_proj")
        self.up_proj = Linear(params / "up_proj")
        self.down_proj = Linear(params / "down_proj")

    def __call__(self, x: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        return self.down_proj(gelu(self.gate_proj(x)) * self.up_proj(x))


class ResidualBlock(nnx.Module):
    """Pre-norm residual pattern: temporal mixing, then the MLP (figure 2a)."""

    def __init__(self, config: GriffinConfig, block_type: BlockType, params: Scope):
        temporal: Any = RecurrentBlock if block_type == "recurrent" else AttentionBlock
        self.temporal_pre_norm = RMSNorm(config, params / "temporal_pre_norm")
        self.temporal_block = temporal(config, params / "temporal_block")
        self.channel_pre_norm = RMSNorm(config, params / "channel_pre_norm")
        self.mlp_block = MLPBlock(config, params / "mlp_block")

    def __call__(
        self, x: Float[Array, "B T W"], chunk: Chunk, state: RecurrentState | AttentionState
    ) -> tuple[Float[Array, "B T W"], RecurrentState | AttentionState]:
        y, state = self.temporal_block(self.temporal_pre_norm(x), chunk, state)
        x = x + y
        return x + self.mlp_block(self.channel_pre_norm(x)), state
