"""The state of a model between steps: tuples of arrays with the batch axis first everywhere.

The axis names used in every shape annotation: B batch, T tokens of a chunk, S rows of a state (B,
or the segments packed into one row), N packed tokens, W model width, L RG-LRU width, H heads, D
dimensions of a head, J those of all heads of keys (or values) together, R rotated pairs of a head,
C remembered keys, K taps of the convolution less one, V vocabulary, E expanded MLP width, G blocks
of a gate, Z complex channels of a CG-LRU.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Shaped


class RecurrentState(NamedTuple):
    """State of a recurrent block.

    Attributes:
        h: of the RG-LRU, float32 at least.
        conv: the last K inputs of the convolution, oldest first.
    """

    h: Float[Array, "S L"]
    conv: Float[Array, "S K L"]


class AttentionState(NamedTuple):
    """Keys (rotated) and values of the last C tokens, oldest first.

    Entries from before the document, or from before `State.attention_start`, hold no meaning and
    are never attended to.
    """

    k: Float[Array, "S C J"]
    v: Float[Array, "S C J"]


class State(NamedTuple):
    """State of the whole model.

    Attributes:
        pos: number of tokens read of the current document.
        attention_start: position of the first token of the document whose key attention may see;
            0 unless `ablate` was called.
        layers: one state per residual block.
    """

    pos: Int[Array, " S"]
    attention_start: Int[Array, " S"]
    layers: tuple[RecurrentState | AttentionState, ...]


class PoolRows(NamedTuple):
    """Which states of a pool the segments of a packed step continue, and where those after it go.

    A row must not be written for a segment if a later segment continues from it.

    Attributes:
        sources: the row of the pool that each segment continues from; several may share one.
        kept: segments whose state after the step is kept, in the order of the segments.
        targets: the row of the pool that takes each of these, no row twice. Those that are not
            in the pool come last, and are left out.
    """

    sources: Int[Array, " S"]
    kept: Int[Array, " M"]
    targets: Int[Array, " M"]


def gather(state: State, rows: Int[Array, " N"]) -> State:
    """A state of the given rows of a state, which may repeat: forks, drops and reorders a batch."""
    return jax.tree.map(lambda leaf: leaf[rows], state)


def scatter(pool: State, rows: Int[Array, " N"], state: State) -> State:
    """Writes the rows of a state over these rows of a pool, which is consumed.

    Args:
        pool: of P rows; only the result may be used from here on.
        rows: which of its rows to write, no row twice, each from 0 to P - 1. Others are an error in
            PyTorch and left out in JAX.
        state: of N rows.
    """
    return jax.tree.map(lambda leaf, new: leaf.at[rows].set(new, mode="drop"), pool, state)


def fork(pool: State, sources: Int[Array, " S"]) -> State:
    """The states of some rows of a pool, which may repeat, for a packed step. Keys and values of
    attention, most of a state, are those of the whole pool: the step reads them in place."""
    layers = [
        layer
        if isinstance(layer, AttentionState)
        else RecurrentState(*(leaf[sources] for leaf in layer))
        for layer in pool.layers
    ]
    return State(pool.pos[sources], pool.attention_start[sources], tuple(layers))


def keep(pool: State, after: State, rows: PoolRows) -> State:
    """Writes the states after a packed step over rows of the pool, which is consumed.

    Args:
        pool: before the step.
        after: of S segments, except for the keys and values of attention, which are those of the
            whole pool and written already.
        rows: which states go where.
    """

    def write(old: Array, new: Array) -> Array:
        return write_rows(old, rows.targets, lambda i, _: new[rows.kept[i]])

    layers = [
        new if isinstance(new, AttentionState) else RecurrentState(*map(write, old, new))
        for old, new in zip(pool.layers, after.layers, strict=True)
    ]
    pos, start = write(pool.pos, after.pos), write(pool.attention_start, after.attention_start)
    return State(pos, start, tuple(layers))


def write_rows(
    pool: Shaped[Array, "R ..."],
    targets: Int[Array, " M"],
    row: Callable[[Array, Array], Array],
    after: Array | None = None,
) -> Shaped[Array, "R ..."]:
    """Writes rows of a pool one after the other, in place where it is donated. (One scatter takes
    many times as long on a CPU.)

    Args:
        pool: of R rows.
        targets: which rows to write. Those that are not in the pool come last, and are left out.
        row: what to write to ``targets[i]``, given i and the pool so far.
        after: a number that reading the pool gave. XLA copies what one operation reads and
            another writes, unless the second needs the result of the first.
    """
    count = jnp.sum(targets < len(pool))
    if after is not None:  # which changes nothing, but XLA does not know that
        count = jnp.minimum(count, jnp.where(jnp.isnan(after), 1 << 30, 1 << 29))

    def write_row(i: Array, pool: Array) -> Array:
        # Computed before it is written: else the whole pool would be copied.
        new = lax.optimization_barrier(row(i, pool))
        return lax.dynamic_update_index_in_dim(pool, new, targets[i], 0)

    return lax.fori_loop(0, count, write_row, pool)


def ablate(state: State, recurrent: Bool[Array, " S"], attention: Bool[Array, " S"]) -> State:
    """The state with the memory of some of its rows cleared; positions continue.

    Args:
        state: of S documents; it is not changed.
        recurrent: rows whose RG-LRU and convolutions start again from zero.
        attention: rows in which no later query sees a key of a token that was read before.
    """
    layers = []
    for layer in state.layers:
        if isinstance(layer, RecurrentState):
            h = jnp.where(recurrent[:, None], 0.0, layer.h)
            conv = jnp.where(recurrent[:, None, None], 0.0, layer.conv)
            layer = RecurrentState(h, conv)
        layers.append(layer)
    attention_start = jnp.where(attention, state.pos, state.attention_start)
    return State(state.pos, attention_start, tuple(layers))


def without_attention(state: State) -> State:
    """The part of a state that `fork` copies."""
    layers = (layer for layer in state.layers if not isinstance(layer, AttentionState))
    return state._replace(layers=tuple(layers))


def nbytes(state: State) -> int:
    """Bytes of a state."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
