"""What a model remembers: tuples of arrays with the batch axis first everywhere.

The axis names used in every shape annotation: B batch, T tokens of a chunk, W model width, L RG-LRU
width, H heads, D dimensions of a head, R rotated pairs of a head, C remembered keys, K taps of the
convolution less one, V vocabulary, E expanded MLP width, G blocks of a gate.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


class RecurrentState(NamedTuple):
    """Memory of a recurrent block: RG-LRU state (float32 at least), last convolution inputs."""

    h: Float[Array, "B L"]
    conv: Float[Array, "B K L"]


class AttentionState(NamedTuple):
    """(Rotated) keys and values of the last C tokens, oldest first; older than ``pos`` is void."""

    k: Float[Array, "B C D"]
    v: Float[Array, "B C D"]


class State(NamedTuple):
    """Memory of the whole model. ``pos`` is how many tokens of the current document were read."""

    pos: Int[Array, " B"]
    layers: tuple[RecurrentState | AttentionState, ...]


class Chunk(NamedTuple):
    """What every block needs to know of the tokens being read."""

    positions: Int[Array, "B T"]  # within the document, which a reset starts anew
    lengths: Int[Array, " B"]  # tokens of each row; what follows is padding
    padding: Bool[Array, "B T"]
    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]


def gather(state: State, rows: Int[Array, " N"]) -> State:
    """Rows of a state, in any order and any number of times: forks, drops and reorders a batch."""
    return jax.tree.map(lambda leaf: leaf[rows], state)


def concat(states: Sequence[State]) -> State:
    """Stacks the rows of several states of one model."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *states)


def last_window(
    past: Float[Array, "B P X"], new: Float[Array, "B T X"], lengths: Int[Array, " B"]
) -> Float[Array, "B P X"]:
    """The last P entries of each row once ``lengths`` of its new ones follow its past."""
    width = past.shape[1]
    both = jnp.concatenate([past, new.astype(past.dtype)], 1)
    index = lengths[:, None] + jnp.arange(width, dtype=lengths.dtype)[None]
    return jnp.take_along_axis(both, index[:, :, None], axis=1)
