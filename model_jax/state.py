"""The state of a model between steps: tuples of arrays with the batch axis first everywhere.

Axis names in all shape annotations: B batch, T tokens of a chunk, S rows of a state (B, or the
packed segments of one row), N packed tokens, W model width, L RG-LRU width, H heads, D dimensions
of a head, J dimensions of all key (or value) heads together, R rotated pairs of a head, C
remembered keys, K taps of the convolution less one, V vocabulary, E expanded MLP width, G blocks of
a gate, Z complex channels of a CG-LRU.
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
        h: State of the RG-LRU, at least float32.
        conv: Last K inputs of the convolution, oldest first.
    """

    h: Float[Array, "S L"]
    conv: Float[Array, "S K L"]


class AttentionState(NamedTuple):
    """Keys (rotated) and values of the last C tokens, oldest first.

    Entries from before the document, or from before `State.attention_start`, are meaningless and
    never attended to.
    """

    k: Float[Array, "S C J"]
    v: Float[Array, "S C J"]


class State(NamedTuple):
    """State of the whole model.

    Attributes:
        pos: Number of tokens read of the current document.
        attention_start: Position of the first token of the document that attention may see; 0
            unless `ablate` was called.
        layers: One state per residual block.
    """

    pos: Int[Array, " S"]
    attention_start: Int[Array, " S"]
    layers: tuple[RecurrentState | AttentionState, ...]


class PoolRows(NamedTuple):
    """The rows of a pool that the segments of a packed step read and write.

    A row must not be written for a segment if a later segment continues from it.

    Attributes:
        sources: Row of the pool that each segment continues; several segments may share one.
        kept: Segments whose state is kept after the step, in the order of the segments.
        targets: Row of the pool for the state of each of these, without repetitions. Rows outside
            the pool must come last, and are skipped.
    """

    sources: Int[Array, " S"]
    kept: Int[Array, " M"]
    targets: Int[Array, " M"]


def gather(state: State, rows: Int[Array, " N"]) -> State:
    """Return rows of a state, with repetitions: this forks, drops and reorders a batch."""
    return jax.tree.map(lambda leaf: leaf[rows], state)


def scatter(pool: State, rows: Int[Array, " N"], state: State) -> State:
    """Write the N rows of a state over rows of a pool of P rows, which is consumed.

    ``rows`` has no repetitions. Rows outside the pool raise an error in PyTorch and are skipped in
    JAX.
    """
    return jax.tree.map(lambda leaf, new: leaf.at[rows].set(new, mode="drop"), pool, state)


def fork(pool: State, sources: Int[Array, " S"]) -> State:
    """Return the states of some rows of a pool, with repetitions, for a packed step. Keys and
    values of attention, most of a state, are not copied: the step reads them in the pool."""
    layers = [
        layer
        if isinstance(layer, AttentionState)
        else RecurrentState(*(leaf[sources] for leaf in layer))
        for layer in pool.layers
    ]
    return State(pool.pos[sources], pool.attention_start[sources], tuple(layers))


def keep(pool: State, after: State, rows: PoolRows) -> State:
    """Write the states after a packed step over rows of the pool, which is consumed.

    ``after`` holds S segments, except for the keys and values of attention, which are already
    written to the pool.
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
    """Write rows of a pool one after the other, in place if it is donated. (One scatter takes many
    times as long on a CPU.)

    Args:
        targets: Rows to write. Rows outside the pool must come last, and are skipped.
        row: Function of i and the pool so far that returns the values for ``targets[i]``.
        after: Number from a read of the pool. XLA copies an array that one operation reads and
            another writes, unless the second needs the result of the first.
    """
    if not len(targets):
        return pool
    count = jnp.sum(targets < len(pool))
    if after is not None:  # has no effect, but XLA cannot know that
        count = jnp.minimum(count, jnp.where(jnp.isnan(after), 1 << 30, 1 << 29))

    def write_row(i: Array, pool: Array) -> Array:
        # Computed before the write; otherwise the whole pool would be copied.
        new = lax.optimization_barrier(row(i, pool))
        return lax.dynamic_update_index_in_dim(pool, new, targets[i], 0)

    return lax.fori_loop(0, count, write_row, pool)


def ablate(state: State, recurrent: Bool[Array, " S"], attention: Bool[Array, " S"]) -> State:
    """Return the state with the memory of some of its rows cleared; positions continue.

    Args:
        recurrent: Rows whose RG-LRU and convolutions restart from zero.
        attention: Rows in which later queries see no key of an earlier token.
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
    """Return the part of a state that `fork` copies."""
    layers = (layer for layer in state.layers if not isinstance(layer, AttentionState))
    return state._replace(layers=tuple(layers))


def nbytes(state: State) -> int:
    """Return the number of bytes of a state."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
