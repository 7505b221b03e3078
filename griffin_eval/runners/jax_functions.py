"""The functions of a model that `griffin_eval.runners.jax_runner` compiles.

`SplitModel` is bound to them before they are compiled; the parameters are an argument, so that an
executable does not hold them. Where the first argument is a state, it is donated.
"""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from griffin_eval.kernels.attention.plain_jax import with_dtype
from griffin_eval.model_jax.decoding import DecodingState
from griffin_eval.model_jax.griffin import Griffin
from griffin_eval.model_jax.state import (
    AttentionState,
    PoolRows,
    RecurrentState,
    State,
    gather,
    scatter,
)
from griffin_eval.runners.batching import query_block
from griffin_eval.sharding.split import MODEL, Split

RANKED = 16  # targets whose ranks are counted at a time


class SplitModel(NamedTuple):
    """A model without its parameters: its graph and how they lie in it."""

    graph: nnx.GraphDef[Griffin]
    tree: Any

    def merge(self, params: list[Array]) -> Griffin:
        """The model with these parameters."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, params))


def split(model: Griffin) -> tuple[SplitModel, list[Array]]:
    """A model apart from its parameters."""
    graph, values = nnx.split(model)
    params, tree = jax.tree.flatten(values)
    return SplitModel(graph, tree), params


def read(
    model: SplitModel,
    pool: State,
    params: list[Array],
    tokens: Array,
    lengths: Array,
    rows: PoolRows,
    ablations: Array | None,
) -> tuple[Array, State]:
    """`Runner.read`, of padded arrays."""
    ablated = None if ablations is None else (ablations & 1 > 0, ablations & 2 > 0)
    block = query_block(len(tokens), len(lengths))
    twin = model.merge(params)
    hidden, pool = twin.step_packed(tokens, lengths, pool, rows, block, ablated)
    return hidden[0], pool


def as_bits(state: State) -> State:
    """The state with keys and values of 16 bits as uint16. On a CPU XLA writes them in place, where
    it would convert the whole of a bfloat16 array to float32 and back to write a slice of it.

    Steps that write in place, `step_packed` and `step_rings`, take such a state and give one. The
    compiled attention reads its numbers as they lie.
    """
    layers = (
        AttentionState(*(with_dtype(x, jnp.uint16) if x.dtype.itemsize == 2 else x for x in layer))
        if isinstance(layer, AttentionState)
        else layer
        for layer in state.layers
    )
    return state._replace(layers=tuple(layers))


def grow(larger: State, pool: State) -> State:
    """Writes all rows of a pool but the last, the start, to the beginning of a larger one."""
    rows = jnp.arange(len(pool.pos) - 1)
    return scatter(larger, rows, gather(pool, rows))


def row_of(dtype: Any, layers: list[Any], row: Array) -> list[Any]:
    """The layers of one row of a pool of a model with weights of this dtype."""
    return jax.tree.map(lambda leaf: with_dtype(leaf[row], dtype), layers)


def decode_step(
    model: SplitModel, state: DecodingState, params: list[Array], tokens: Array, active: Array
) -> tuple[Array, DecodingState]:
    """`DecodingState.step`."""
    return state.step(model.merge(params), tokens, active)


def logits(model: SplitModel, params: list[Array], hidden: Array, positions: Array) -> Array:
    """Logits of the hidden vectors at these positions."""
    return model.merge(params).logits(hidden[positions])


def greedy(model: SplitModel, params: list[Array], hidden: Array, positions: Array) -> Array:
    """The most likely token at each of these positions, -1 where a logit is NaN."""
    return first_largest(logits(model, params, hidden, positions))


def normalise(dtype: str, logits: Array, row: Array, target: Array) -> tuple[Array, Array]:
    """Log-probabilities of targets, each by a row of the logits, and that row's greedy token."""
    logits = logits.astype(dtype)
    total = jax.nn.logsumexp(logits, axis=1)
    return logits[row, target] - total[row], first_largest(logits)[row]


def normalise_details(
    dtype: str, logits: Array, row: Array, target: Array
) -> tuple[Array, Array, Array, Array]:
    """`normalise`, the rank of each target, and the entropy of its row."""
    logprobs, best = normalise(dtype, logits, row, target)
    logits = logits.astype(dtype)
    chosen = logits[row, target]

    def rank(one: tuple[Array, Array]) -> Array:
        return 1 + jnp.sum(logits[one[0]] > one[1], dtype=jnp.int32)

    # A few targets at a time, each of which reads a row of logits.
    ranks = jax.lax.map(rank, (row, chosen), batch_size=RANKED)
    spread = logits - jnp.max(logits, axis=1, keepdims=True)
    weights = jnp.exp(spread)
    total = jnp.sum(weights, axis=1)
    entropy = jnp.log(total) - jnp.sum(weights * spread, axis=1) / total
    return logprobs, best, ranks, entropy[row]


def normalise_top(
    top: int, dtype: str, logits: Array, row: Array, target: Array
) -> tuple[Array, Array, Array]:
    """Log-probabilities of targets, and of each target's row the likeliest tokens and their
    log-probabilities."""
    logits = logits.astype(dtype)
    total = jax.nn.logsumexp(logits, axis=1)
    if top == 1:
        tokens = jnp.maximum(first_largest(logits), 0)[:, None]
        values = jnp.max(logits, axis=1, keepdims=True)
    else:
        values, tokens = jax.lax.top_k(logits, min(top, logits.shape[1]))
    return logits[row, target] - total[row], tokens[row], (values - total[:, None])[row]


def first_largest(logits: Array) -> Array:
    """Column of the first of the largest numbers of each row, or -1 where one is NaN. (On a CPU
    argmax takes several times as long.)"""
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    largest = logits == jnp.max(logits, axis=1, keepdims=True)
    first = jnp.min(jnp.where(largest, column, logits.shape[1]), axis=1)
    return jnp.where(first == logits.shape[1], -1, first)


def state_shardings(mesh: Mesh, split: Split, state: Any) -> Any:
    """How a state, a pool of states or a decoding state lies on a mesh: recurrent states are split
    as the RG-LRU is, keys and values of several heads by these; those of one lie whole on every
    device.

    Args:
        state: tree of arrays or of their shapes.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    channels = None if "lru" in split.whole else MODEL
    kept: Any = (
        NamedSharding(mesh, PartitionSpec(None, None, MODEL)) if split.splits_keys else whole
    )

    def sharding(part: Any) -> Any:
        if isinstance(part, AttentionState):
            return AttentionState(kept, kept)
        if not isinstance(part, RecurrentState):
            return whole
        h: Any = NamedSharding(mesh, PartitionSpec(None, channels))
        conv: Any = NamedSharding(mesh, PartitionSpec(None, None, channels))
        return RecurrentState(h, conv)

    layers = RecurrentState, AttentionState
    return jax.tree.map(sharding, state, is_leaf=lambda part: isinstance(part, layers))


def x64_if(wanted: bool) -> contextlib.AbstractContextManager:
    """A context with 64-bit types if they are wanted, else one that changes nothing."""
    return jax.enable_x64(True) if wanted else contextlib.nullcontext()
