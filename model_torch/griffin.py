"""The whole model: a pure step from tokens and a state to hidden vectors and the next state."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from griffin_eval.config import GriffinConfig
from griffin_eval.initializers import initial_value
from griffin_eval.kernels.devices import without_autocast
from griffin_eval.kernels.linear.cpu_torch import product
from griffin_eval.layout import ParamScope, ParamSpec, param_specs
from griffin_eval.model_torch.blocks import ResidualBlock
from griffin_eval.model_torch.layers import RMSNorm, accumulation_dtype, rotation
from griffin_eval.model_torch.layouts import (
    PackedLayout,
    PaddedLayout,
    RingLayout,
    StepContext,
    pack,
)
from griffin_eval.model_torch.state import (
    AttentionState,
    PoolRows,
    RecurrentState,
    State,
    ablate,
    fork,
    keep,
)
from griffin_eval.sharding.processes_torch import embedded


class Head(nn.Module):
    """The output projection: a vector for every token."""

    def __init__(self, params: ParamScope):
        super().__init__()
        self.weight = params("weight")

    def decode(self, hidden: Float[Tensor, "*N W"]) -> Float[Tensor, "*N V"]:
        """Multiply with every vector, accumulated and returned in float32 or wider."""
        return product(hidden, self.weight)


class Embedding(Head):
    """The embedding, also the output projection if they are tied."""

    def __init__(self, config: GriffinConfig, params: ParamScope):
        super().__init__(params)
        self.multiplier, self.vocab_size = config.embedding_multiplier, config.vocab_size

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T W"]:
        return embedded(tokens, self.weight, self.vocab_size) * self.multiplier


class Backbone(nn.Module):
    """Embedding, residual blocks and the final norm."""

    def __init__(self, config: GriffinConfig, params: ParamScope):
        super().__init__()
        self.embed_tokens = Embedding(config, params / "embed_tokens")
        self.layers = nn.ModuleList(
            ResidualBlock(config, block_type, params / "layers" / i)
            for i, block_type in enumerate(config.block_types)
        )
        self.final_norm = RMSNorm(config, params / "final_norm")


class Griffin(nn.Module):
    """Griffin, Hawk, RecurrentGemma or the MQA Transformer, depending on the config.

    ``make`` turns a `ParamSpec` into the framework's parameter; `initialize` and
    `griffin_eval.model_torch.loading.load` are the usual callers.
    """

    def __init__(self, config: GriffinConfig, make: Callable[[ParamSpec], Any]):
        super().__init__()
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

        def zeros(*shape: int, dtype: torch.dtype = weight.dtype) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=weight.device)

        layers = []
        for block_type, layer in zip(c.block_types, self.model.layers, strict=True):
            temporal: Any = layer.temporal_block
            if block_type == "recurrent":
                channels = len(temporal.linear_x.weight)  # channels of this process
                h = zeros(channels, dtype=h_dtype)
                layers.append(RecurrentState(h, zeros(c.conv_width - 1, channels)))
            else:
                keys = c.visible_keys if block_type == "local_attention" else capacity
                assert keys is not None
                past = keys - 1
                width = len(temporal.k_proj.weight)  # key heads of this process
                layers.append(AttentionState(zeros(past, width), zeros(past, width)))
        return State(zeros(dtype=torch.int32), zeros(dtype=torch.int32), tuple(layers))

    def step(
        self,
        tokens: Int[Tensor, "B T"],
        lengths: Int[Tensor, " B"],
        state: State,
        resets: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T W"], State]:
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
        t = torch.arange(length, dtype=torch.int32, device=tokens.device).expand(batch, length)
        positions = state.pos[:, None] + t
        start = state.attention_start[:, None].expand(batch, length)
        if resets is not None:
            last_reset = torch.where(resets, t, -1).cummax(1).values
            positions = torch.where(last_reset >= 0, t - last_reset, positions)
            start = torch.where(last_reset >= 0, 0, start)
        padding = t >= lengths[:, None]
        # Only on the CPU: reading padding would wait for an accelerator.
        full = padding.device.type == "cpu" and not padding.any()
        context = self._context(positions, positions - start, padding, PaddedLayout(lengths, full))
        hidden, layers = self._read(tokens, context, state)
        last = (lengths - 1).clamp(min=0)[:, None].to(torch.int64)
        pos = torch.where(lengths > 0, positions.gather(1, last)[:, 0] + 1, state.pos)
        last_start = start.gather(1, last)[:, 0]
        attention_start = torch.where(lengths > 0, last_start, state.attention_start)
        return hidden, State(pos, attention_start, layers)

    def step_packed(
        self,
        tokens: Int[Tensor, " N"],
        lengths: Int[Tensor, " S"],
        pool: State,
        rows: PoolRows,
        tile: int = 16,
        ablated: tuple[Bool[Tensor, " S"], Bool[Tensor, " S"]] | None = None,
    ) -> tuple[Float[Tensor, "1 N W"], State]:
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
        state = fork(pool, rows.sources)
        if ablated:
            state = ablate(state, *ablated)
        layout = pack(lengths, len(tokens), tile, rows)
        positions = (state.pos[layout.segment] + layout.position)[None]
        max_age = positions - state.attention_start[layout.segment]
        padding = (layout.position >= lengths[layout.segment])[None]
        context = self._context(positions, max_age, padding, layout)
        hidden, layers = self._read(tokens[None], context, state)
        pos = (state.pos + lengths).to(state.pos.dtype)
        return hidden, keep(pool, State(pos, state.attention_start, layers), rows)

    def step_rings(
        self, tokens: Int[Tensor, " B"], active: Int[Tensor, " B"], state: State
    ) -> tuple[Float[Tensor, "B W"], State]:
        """Read one token of every active row, in place; return the same as `step`.

        Args:
            active: 1 for rows that read their token, 0 for others.
            state: State with keys and values in rings, such as the rows of
                `griffin_eval.model_torch.decoding.DecodingState`; it is consumed.
        """
        positions = state.pos[:, None]
        max_age = positions - state.attention_start[:, None]
        context = self._context(positions, max_age, active[:, None] == 0, RingLayout(active))
        hidden, layers = self._read(tokens[:, None], context, state)
        pos = (state.pos + active).to(state.pos.dtype)
        return hidden[:, 0], State(pos, state.attention_start, layers)

    def _context(
        self,
        positions: Int[Tensor, "B T"],
        max_age: Int[Tensor, "B T"],
        padding: Bool[Tensor, "B T"],
        layout: PaddedLayout | RingLayout | PackedLayout,
    ) -> StepContext:
        c = self.config
        dtype = self.model.embed_tokens.weight.dtype
        cos, sin = rotation(positions, c.rotary_dim, c.rope_base, dtype)
        return StepContext(positions, max_age, padding, cos, sin, layout)

    def _read(
        self, tokens: Int[Tensor, "B T"], context: StepContext, state: State
    ) -> tuple[Float[Tensor, "B T W"], tuple[RecurrentState | AttentionState, ...]]:
        x = self.model.embed_tokens(tokens)
        layers = []
        for block_type, block, before in zip(
            self.config.block_types, self.model.layers, state.layers, strict=True
        ):
            if block_type == "global_attention":
                assert isinstance(before, AttentionState)
                past = context.layout.past(before.k)
                lost = (context.positions > past) & ~context.padding
                x = torch.where(lost[:, :, None], torch.nan, x)
            x, after = block(x, context, before)
            layers.append(after)
        return self.model.final_norm(x), tuple(layers)

    def logits(self, hidden: Float[Tensor, "*N W"]) -> Float[Tensor, "*N V"]:
        """Return logits of the next token in float32 or wider, with the config's soft cap."""
        with without_autocast(hidden):
            logits = (self.lm_head or self.model.embed_tokens).decode(hidden)
        cap = self.config.logits_soft_cap
        if cap and not logits.requires_grad:  # in place: a copy would cost more than the products
            return logits.div_(cap).tanh_().mul_(cap)
        return cap * torch.tanh(logits / cap) if cap else logits


def initialize(config: GriffinConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Griffin:
    """Return a model with random weights, equal to the JAX twin's for the same seed."""

    def make(spec: ParamSpec) -> nn.Parameter:
        value = torch.from_numpy(initial_value(spec, seed))
        return nn.Parameter(value.to(param_dtype(spec, dtype)))

    return Griffin(config, make)


def param_dtype(spec: ParamSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a parameter in a model that runs in ``dtype``."""
    return accumulation_dtype(dtype) if spec.keep_float32 else dtype
