"""What a model remembers: tuples of arrays with the batch axis first everywhere.

The axis names used in every shape annotation: B batch, T tokens of a chunk, S rows of a state (B,
or the segments packed into one row), N packed tokens, W model width, L RG-LRU width, H heads, D
dimensions of a head, R rotated pairs of a head, C remembered keys, K taps of the convolution less
one, V vocabulary, E expanded MLP width, G blocks of a gate, Z complex channels of a CG-LRU.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int


class RecurrentState(NamedTuple):
    """Memory of a recurrent block: RG-LRU state (float32 at least), last convolution inputs."""

    h: Float[Array, "S L"]
    conv: Float[Array, "S K L"]


class AttentionState(NamedTuple):
    """(Rotated) keys and values of the last C tokens, oldest first. What is older than
    ``pos`` or than ``since`` allows is void."""

    k: Float[Array, "S C D"]
    v: Float[Array, "S C D"]


class State(NamedTuple):
    """Memory of the whole model. ``pos`` is how many tokens of the current document were read;
    attention sees no key of the first ``since`` of them, which is 0 unless `forget` was called."""

    pos: Int[Array, " S"]
    since: Int[Array, " S"]
    layers: tuple[RecurrentState | AttentionState, ...]


def gather(state: State, rows: Int[Array, " N"]) -> State:
    """Rows of a state, in any order and any number of times: forks, drops and reorders a batch."""
    return jax.tree.map(lambda leaf: leaf[rows], state)


def concat(states: Sequence[State]) -> State:
    """Stacks the rows of several states of one model."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *states)


def store(pool: State, rows: Int[Array, " N"], state: State) -> State:
    """Writes the rows of a state over these rows of another, which is not to be used again; rows
    must differ. Rows that the other does not have are left out."""
    return jax.tree.map(lambda leaf, new: leaf.at[rows].set(new, mode="drop"), pool, state)


def forget(state: State, recurrent: Bool[Array, " S"], attention: Bool[Array, " S"]) -> State:
    """The state without what some of its rows remember; positions go on.

    Args:
        state: of S documents; it is not changed.
        recurrent: rows whose RG-LRU and convolutions start again from zero.
        attention: rows in which no query sees a key of a token that was read before.
    """
    layers = []
    for layer in state.layers:
        if isinstance(layer, RecurrentState):
            h = jnp.where(recurrent[:, None], 0.0, layer.h)
            conv = jnp.where(recurrent[:, None, None], 0.0, layer.conv)
            layer = RecurrentState(h, conv)
        layers.append(layer)
    since = jnp.where(attention, state.pos, state.since)
    return State(state.pos, since, tuple(layers))


def rewind(state: State, room: int) -> State:
    """The state after ``room`` steps of `griffin_eval.model_jax.griffin.Griffin.step_one`, as if
    it had never moved."""
    return _windows(lambda x: jnp.roll(x, -room, axis=1), state)


def enter(state: State, rows: Int[Array, " N"], new: State, moved: int | Int[Array, ""]) -> State:
    """Writes the rows of a state over these rows of one that has room and was moved; as `store`."""

    def write(leaf: Array, rest: Array) -> Array:
        def one(i: Array, leaf: Array) -> Array:  # a scatter of them all is many times as slow
            before = lax.dynamic_index_in_dim(leaf, rows[i], keepdims=False)
            row = rest[i]
            if leaf.ndim == 3:  # zeros around it, since all places are read: NaN times zero is NaN
                row = lax.dynamic_update_slice_in_dim(jnp.zeros_like(before), row, moved, 0)
            row = jnp.where(rows[i] < len(leaf), row, before)
            return lax.dynamic_update_index_in_dim(leaf, row, rows[i], 0)

        return lax.fori_loop(0, len(rows), one, leaf)

    return jax.tree.map(write, state, new)


def nbytes(state: State) -> int:
    """Bytes of a state."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _windows(function: Callable[[Array], Array], state: State) -> State:
    """Changes those of the layers' arrays that have an axis of remembered tokens."""
    return jax.tree.map(lambda leaf: function(leaf) if leaf.ndim == 3 else leaf, state)
