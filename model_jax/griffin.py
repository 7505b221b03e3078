"""The whole model: a pure step from tokens and a state to hidden vectors and the next state."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array, ensure_compile_time_eval, lax
from jax.core import Tracer
from jaxtyping import Bool, Float, Int

from griffin_eval.config import GriffinConfig
from griffin_eval.initializers import initial_value
from griffin_eval.kernels.linear.products_jax import product
from griffin_eval.layout import ParamScope, ParamSpec, param_specs
from griffin_eval.model_jax.blocks import ResidualBlock
from griffin_eval.model_jax.layers import RMSNorm, accumulation_dtype, rotation
from griffin_eval.model_jax.layouts import (
    PackedLayout,
    PaddedLayout,
    RingLayout,
    StepContext,
    pack,
)
from griffin_eval.model_jax.state import (
    AttentionState,
    PoolRows,
    RecurrentState,
    State,
    ablate,
    fork,
    keep,
)
from griffin_eval.sharding.mesh_jax import summed


class Head(nnx.Module):
    """The output projection: a vector for every token."""

    def __init__(self, params: ParamScope):
        self.weight = params("weight")

    def decode(self, hidden: Float[Array, "*N W"]) -> Float[Array, "*N V"]:
        """Multiply with every vector, accumulated and returned in float32 or wider."""
        return product(hidden, self.weight[...])


class Embedding(Head):
    """The embedding, also the output projection if they are tied."""

    def __init__(self, config: GriffinConfig, params: ParamScope):
        super().__init__(params)
        self.multiplier, self.vocab_size = config.embedding_multiplier, config.vocab_size

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T W"]:
        # Indexing wraps or clamps ids outside the vocabulary. Inside jit, only constants are known.
        if not isinstance(tokens, Tracer) and tokens.size:
            with ensure_compile_time_eval():
                least, most = int(tokens.min()), int(tokens.max())
            vocabulary = self.vocab_size
            if least < 0 or most >= vocabulary:
                raise IndexError(
                    f"token ids must be from 0 to {vocabulary - 1}, found {least} to {most}"
                )
        return summed(self.weight[...][tokens]) * self.multiplier


class Backbone(nnx.Module):
    """Embedding, residual blocks and the final norm."""

    def __init__(self, config: GriffinConfig, params: ParamScope):
        self.embed_tokens = Embedding(config, params / "embed_tokens")
        self.layers = nnx.List(
            [
                ResidualBlock(config, block_type, params / "layers" / i)
                for i, block_type in enumerate(config.block_types)
            ]
        )
        self.final_norm = RMSNorm(config, params / "final_norm")


class Griffin(nnx.Module):
    """Griffin, Hawk, RecurrentGemma or the MQA Transformer, depending on the config.

    ``make`` turns a `ParamSpec` into the framework's parameter; `initialize` and
    `griffin_eval.model_jax.loading.load` are the usual callers.
    """

    def __init__(self, config: GriffinConfig, make: Callable[[ParamSpec], Any]):
        self.config = config
        params = ParamScope(param_specs(config), make)
        self.model = Backbone(config, params / "model")
        self.lm_head = None if config.tie_embeddings else Head(params / "lm_head")

    def init_state(self, batch: int, capacity: int | None = None) -> State:
        """Return the state before the first token.

        Args:
            batch: Number of rows, B.
            capacity: Largest number of tokens of a document; required for global attention, whose
                state grows with it, and ignored by other blocks.

        Raises:
            ValueError: The model has global attention, and capacity is None.
        """
        c = self.config
        if capacity is None and "global_attention" in c.block_types:
            raise ValueError(
                "this model has global attention, whose state holds every token: give init_state "
                "a capacity, the most tokens a document may have"
            )
        weight = self.model.embed_tokens.weight
        h_dtype = accumulation_dtype(weight.dtype)

        def zeros(*shape: int, dtype: Any = weight.dtype) -> Array:
            return jnp.zeros((batch, *shape), dtype)

        layers = []
        for block_type in c.block_types:
            if block_type == "recurrent":
                h = zeros(c.lru_width, dtype=h_dtype)
                layers.append(RecurrentState(h, zeros(c.conv_width - 1, c.lru_width)))
            else:
                keys = c.visible_keys if block_type == "local_attention" else capacity
                assert keys is not None
                past = keys - 1
                layers.append(AttentionState(zeros(past, c.kv_width), zeros(past, c.kv_width)))
        return State(zeros(dtype=jnp.int32), zeros(dtype=jnp.int32), tuple(layers))

    def step(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        state: State,
        resets: Bool[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T W"], State]:
        """Read a chunk of every row.

        A sequence divided into any chunks gives the same hidden vectors and the same state.

        Args:
            tokens: Token ids; T >= 1.
            lengths: Number of tokens that each row reads, 0 to T. The rest is padding, which does
                not change the row's state, and has meaningless hidden vectors.
            state: State from `init_state` or an earlier step; it is not changed.
            resets: Starts of documents: the token sees nothing before it and has position 0.

        Returns:
            Hidden vectors after the final norm, for `logits`, and the state after the chunk. If a
            document outgrows the capacity of global attention, its row is NaN from that chunk on.
        """
        batch, length = tokens.shape
        lengths = lengths.astype(jnp.int32)
        t = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        positions = state.pos[:, None] + t
        start = jnp.broadcast_to(state.attention_start[:, None], (batch, length))
        if resets is not None:
            last_reset = lax.cummax(jnp.where(resets, t, -1), axis=1)
            positions = jnp.where(last_reset >= 0, t - last_reset, positions)
            start = jnp.where(last_reset >= 0, 0, start)
        padding, layout = t >= lengths[:, None], PaddedLayout(lengths)
        context = self._context(positions, positions - start, padding, layout)
        hidden, layers = self._read(tokens, context, state)
        last = jnp.maximum(lengths - 1, 0)[:, None]
        last_position = jnp.take_along_axis(positions, last, axis=1)[:, 0]
        pos = jnp.where(lengths > 0, last_position + 1, state.pos)
        last_start = jnp.take_along_axis(start, last, axis=1)[:, 0]
        attention_start = jnp.where(lengths > 0, last_start, state.attention_start)
        return hidden, State(pos, attention_start, layers)

    def step_packed(
        self,
        tokens: Int[Array, " N"],
        lengths: Int[Array, " S"],
        pool: State,
        rows: PoolRows,
        tile: int = 16,
        ablated: tuple[Bool[Array, " S"], Bool[Array, " S"]] | None = None,
    ) -> tuple[Float[Array, "1 N W"], State]:
        """Read chunks of several documents, one after the other. Their states are rows of a pool.

        Args:
            tokens: Token ids of all chunks, then padding; N >= 1.
            lengths: Number of tokens of each chunk, at most N in all.
            pool: Pool from `init_state` or an earlier step; it is consumed.
            rows: Rows with the states before the step, and rows for the states after it.
            tile: Number of queries of a block for attention, which does not affect results.
            ablated: Documents that lose their recurrent memory, and documents that lose their
                attention memory, before their chunk; see `ablate`.

        Returns:
            Hidden vectors after the final norm, in the order of the tokens, and the pool.
        """
        lengths = lengths.astype(jnp.int32)
        state = fork(pool, rows.sources)
        if ablated:
            state = ablate(state, *ablated)
        layout = pack(lengths, len(tokens), tile, rows)
        positions = (state.pos[layout.segment] + layout.position)[None]
        max_age = positions - state.attention_start[layout.segment][None]
        padding = (layout.position >= lengths[layout.segment])[None]
        context = self._context(positions, max_age, padding, layout)
        hidden, layers = self._read(tokens[None], context, state)
        after = State(state.pos + lengths, state.attention_start, layers)
        return hidden, keep(pool, after, rows)

    def step_rings(
        self, tokens: Int[Array, " B"], active: Int[Array, " B"], state: State
    ) -> tuple[Float[Array, "B W"], State]:
        """Read one token of every active row, in place; return the same as `step`.

        Args:
            active: 1 for rows that read their token, 0 for others.
            state: State with keys and values in rings, such as the rows of
                `griffin_eval.model_jax.decoding.DecodingState`; it is consumed.
        """
        positions = state.pos[:, None]
        max_age = positions - state.attention_start[:, None]
        context = self._context(positions, max_age, active[:, None] == 0, RingLayout(active))
        hidden, layers = self._read(tokens[:, None], context, state)
        pos = state.pos + active.astype(jnp.int32)
        return hidden[:, 0], State(pos, state.attention_start, layers)

    def _context(
        self,
        positions: Int[Array, "B T"],
        max_age: Int[Array, "B T"],
        padding: Bool[Array, "B T"],
        layout: PaddedLayout | RingLayout | PackedLayout,
    ) -> StepContext:
        c = self.config
        dtype = self.model.embed_tokens.weight.dtype
        cos, sin = rotation(positions, c.rotary_dim, c.rope_base, dtype)
        return StepContext(positions, max_age, padding, cos, sin, layout)

    def _read(
        self, tokens: Int[Array, "B T"], context: StepContext, state: State
    ) -> tuple[Float[Array, "B T W"], tuple[RecurrentState | AttentionState, ...]]:
        x = self.model.embed_tokens(tokens)
        layers = []
        for block_type, block, before in zip(
            self.config.block_types, self.model.layers, state.layers, strict=True
        ):
            if block_type == "global_attention":
                assert isinstance(before, AttentionState)
                past = context.layout.past(before.k)
                lost = (context.positions > past) & ~context.padding
                x = jnp.where(lost[:, :, None], jnp.nan, x)
            x, after = block(x, context, before)
            layers.append(after)
        return self.model.final_norm(x), tuple(layers)

    def logits(self, hidden: Float[Array, "*N W"]) -> Float[Array, "*N V"]:
        """Return logits of the next token in float32 or wider, with the config's soft cap."""
        logits = (self.lm_head or self.model.embed_tokens).decode(hidden)
        cap = self.config.logits_soft_cap
        return cap * jnp.tanh(logits / cap) if cap else logits


def initialize(config: GriffinConfig, seed: int = 0, dtype: Any = jnp.float32) -> Griffin:
    """Return a model with random weights, equal to the PyTorch twin's for the same seed."""

    def make(spec: ParamSpec) -> nnx.Param:
        return nnx.Param(jnp.asarray(initial_value(spec, seed), param_dtype(spec, dtype)))

    return Griffin(config, make)


def param_dtype(spec: ParamSpec, dtype: Any) -> Any:
    """Return the dtype of a parameter in a model that runs in ``dtype``."""
    return accumulation_dtype(dtype) if spec.keep_float32 else dtype
