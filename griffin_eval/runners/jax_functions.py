"""The functions of a model that `griffin_eval.runners.jax_runner` compiles.

`SplitModel` is bound to them before compilation; the parameters are an argument, so that they are
not constants of the executable. If the first argument is a state, it is donated.
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

RANKED = 16  # number of targets ranked at a time


class SplitModel(NamedTuple):
    """A model without its parameters: its graph and the tree structure of the parameters."""

    graph: nnx.GraphDef[Griffin]
    tree: Any

    def merge(self, params: list[Array]) -> Griffin:
        """Return the model with these parameters."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, params))


def split(model: Griffin) -> tuple[SplitModel, list[Array]]:
    """Separate a model from its parameters."""
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
    """Run `Runner.read` on padded arrays."""
    ablated = None if ablations is None else (ablations & 1 > 0, ablations & 2 > 0)
    block = query_block(len(tokens), len(lengths))
    twin = model.merge(params)
    hidden, pool = twin.step_packed(tokens, lengths, pool, rows, block, ablated)
    return hidden[0], pool


def as_bits(state: State) -> State:
    """Return the state with 16-bit keys and values viewed as uint16.

    On a CPU, XLA updates uint16 arrays in place, but converts a whole bfloat16 array to float32 and
    back to write a slice. `step_packed` and `step_rings`, which update in place, take and return
    such states; the compiled attention reinterprets the bits.
    """
    layers = (
        AttentionState(*(with_dtype(x, jnp.uint16) if x.dtype.itemsize == 2 else x for x in layer))
        if isinstance(layer, AttentionState)
        else layer
        for layer in state.layers
    )
    return state._replace(layers=tuple(layers))


def grow(larger: State, pool: State) -> State:
    """Copy all rows of a pool but the last, the start, into a larger pool."""
    rows = jnp.arange(len(pool.pos) - 1)
    return scatter(larger, rows, gather(pool, rows))


def row_of(dtype: Any, layers: list[Any], row: Array) -> list[Any]:
    """Return the layers of one row of a pool, with keys and values in this dtype."""
    return jax.tree.map(lambda leaf: with_dtype(leaf[row], dtype), layers)


def decode_step(
    model: SplitModel, state: DecodingState, params: list[Array], tokens: Array, active: Array
) -> tuple[Array, DecodingState]:
    """Run `DecodingState.step`."""
    return state.step(model.merge(params), tokens, active)


def logits(model: SplitModel, params: list[Array], hidden: Array, positions: Array) -> Array:
    """Return the logits of the hidden vectors at these positions."""
    return model.merge(params).logits(hidden[positions])


def greedy(model: SplitModel, params: list[Array], hidden: Array, positions: Array) -> Array:
    """Return the most likely token at each position, or -1 where a logit is NaN."""
    return first_largest(logits(model, params, hidden, positions))


def normalise(dtype: str, logits: Array, row: Array, target: Array) -> tuple[Array, Array]:
    """Return the log-probability of each target in its row of the logits, and the greedy tokens."""
    logits = logits.astype(dtype)
    total = jax.nn.logsumexp(logits, axis=1)
    return logits[row, target] - total[row], first_largest(logits)[row]


def normalise_details(
    dtype: str, logits: Array, row: Array, target: Array
) -> tuple[Array, Array, Array, Array]:
    """Return `normalise`, the rank of each target, and the entropy of its row."""
    logprobs, best = normalise(dtype, logits, row, target)
    logits = logits.astype(dtype)
    chosen = logits[row, target]

    def rank(one: tuple[Array, Array]) -> Array:
        return 1 + jnp.sum(logits[one[0]] > one[1], dtype=jnp.int32)

    # Each target reads a whole row of logits, so rank a few at a time.
    ranks = jax.lax.map(rank, (row, chosen), batch_size=RANKED)
    spread = logits - jnp.max(logits, axis=1, keepdims=True)
    weights = jnp.exp(spread)
    total = jnp.sum(weights, axis=1)
    entropy = jnp.log(total) - jnp.sum(weights * spread, axis=1) / total
    return logprobs, best, ranks, entropy[row]


def normalise_top(
    top: int, dtype: str, logits: Array, row: Array, target: Array
) -> tuple[Array, Array, Array]:
    """Return the log-probabilities of targets, and the most likely tokens in the place of each
    with their log-probabilities."""
    logits = logits.astype(dtype)
    total = jax.nn.logsumexp(logits, axis=1)
    if top == 1:
        tokens = jnp.maximum(first_largest(logits), 0)[:, None]
        values = jnp.max(logits, axis=1, keepdims=True)
    else:
        values, tokens = jax.lax.top_k(logits, min(top, logits.shape[1]))
    return logits[row, target] - total[row], tokens[row], (values - total[:, None])[row]


def first_largest(logits: Array) -> Array:
    """Return the column of the first maximum of each row, or -1 if the row has a NaN. (On a CPU
    argmax is several times slower.)"""
    column = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    largest = logits == jnp.max(logits, axis=1, keepdims=True)
    first = jnp.min(jnp.where(largest, column, logits.shape[1]), axis=1)
    return jnp.where(first == logits.shape[1], -1, first)


def state_shardings(mesh: Mesh, split: Split, state: Any) -> Any:
    """Return the shardings of a state, a pool of states or a decoding state on a mesh.

    Recurrent states are split as the RG-LRU is, keys and values by heads; those of one head are
    replicated. ``state`` is a tree of arrays or shapes.
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


def x64_if(enabled: bool) -> contextlib.AbstractContextManager:
    """Return a context that enables 64-bit types if they are wanted."""
    return jax.enable_x64(True) if enabled else contextlib.nullcontext()
