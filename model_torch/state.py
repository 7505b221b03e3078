"""What a model remembers: tuples of tensors with the batch axis first everywhere.

The axis names used in every shape annotation: B batch, T tokens of a chunk, W model width, L RG-LRU
width, H heads, D dimensions of a head, R rotated pairs of a head, C remembered keys, K taps of the
convolution less one, V vocabulary, E expanded MLP width, G blocks of a gate.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class RecurrentState(NamedTuple):
    """Memory of a recurrent block: RG-LRU state (float32 at least), last convolution inputs."""

    h: Float[Tensor, "B L"]
    conv: Float[Tensor, "B K L"]


class AttentionState(NamedTuple):
    """(Rotated) keys and values of the last C tokens, oldest first; older than ``pos`` is void."""

    k: Float[Tensor, "B C D"]
    v: Float[Tensor, "B C D"]


class State(NamedTuple):
    """Memory of the whole model. ``pos`` is how many tokens of the current document were read."""

    pos: Int[Tensor, " B"]
    layers: tuple[RecurrentState | AttentionState, ...]


class Chunk(NamedTuple):
    """What every block needs to know of the tokens being read."""

    positions: Int[Tensor, "B T"]  # within the document, which a reset starts anew
    lengths: Int[Tensor, " B"]  # tokens of each row; what follows is padding
    padding: Bool[Tensor, "B T"]
    cos: Float[Tensor, "B T R"]
    sin: Float[Tensor, "B T R"]


def gather(state: State, rows: Int[Tensor, " N"]) -> State:
    """Rows of a state, in any order and any number of times: forks, drops and reorders a batch."""
    return _map(lambda leaf: leaf.index_select(0, rows), state)


def concat(states: Sequence[State]) -> State:
    """Stacks the rows of several states of one model."""
    leaves = [list(_leaves(s)) for s in states]
    joined = iter([torch.cat(group) for group in zip(*leaves, strict=True)])
    return _map(lambda _: next(joined), states[0])


def _map(function, state: State) -> State:
    return State(
        function(state.pos), tuple(type(s)(*(function(leaf) for leaf in s)) for s in state.layers)
    )


def _leaves(state: State):
    yield state.pos
    for layer in state.layers:
        yield from layer


def last_window(
    past: Float[Tensor, "B P X"], new: Float[Tensor, "B T X"], lengths: Int[Tensor, " B"]
) -> Float[Tensor, "B P X"]:
    """The last P entries of each row once ``lengths`` of its new ones follow its past."""
    width = past.shape[1]
    both = torch.cat([past, new.to(past.dtype)], 1)
    index = lengths[:, None] + torch.arange(width, device=lengths.device)
    return both.gather(1, index[:, :, None].expand(-1, -1, both.shape[2]))
