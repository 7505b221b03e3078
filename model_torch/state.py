"""What a model remembers: tuples of tensors with the batch axis first everywhere.

The axis names used in every shape annotation: B batch, T tokens of a chunk, S rows of a state (B,
or the segments packed into one row), N packed tokens, W model width, L RG-LRU width, H heads, D
dimensions of a head, R rotated pairs of a head, C remembered keys, K taps of the convolution less
one, V vocabulary, E expanded MLP width, G blocks of a gate, Z complex channels of a CG-LRU.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class RecurrentState(NamedTuple):
    """Memory of a recurrent block: RG-LRU state (float32 at least), last convolution inputs."""

    h: Float[Tensor, "S L"]
    conv: Float[Tensor, "S K L"]


class AttentionState(NamedTuple):
    """(Rotated) keys and values of the last C tokens, oldest first. What is older than
    ``pos`` or than ``since`` allows is void."""

    k: Float[Tensor, "S C D"]
    v: Float[Tensor, "S C D"]


class State(NamedTuple):
    """Memory of the whole model. ``pos`` is how many tokens of the current document were read;
    attention sees no key of the first ``since`` of them, which is 0 unless `forget` was called."""

    pos: Int[Tensor, " S"]
    since: Int[Tensor, " S"]
    layers: tuple[RecurrentState | AttentionState, ...]


def empty(like: State, rows: int) -> State:
    """Room for as many rows, in which anything may stand."""
    return _map(lambda leaf: leaf.new_empty(rows, *leaf.shape[1:]), like)


def gather(state: State, rows: Int[Tensor, " N"]) -> State:
    """Rows of a state, in any order and any number of times: forks, drops and reorders a batch."""
    return _map(lambda leaf: leaf.index_select(0, rows), state)


def concat(states: Sequence[State]) -> State:
    """Stacks the rows of several states of one model."""
    leaves = [list(_leaves(s)) for s in states]
    joined = iter([torch.cat(group) for group in zip(*leaves, strict=True)])
    return _map(lambda _: next(joined), states[0])


def store(pool: State, rows: Int[Tensor, " N"], state: State) -> State:
    """Writes the rows of a state over these rows of another, which is not to be used again; rows
    must differ. Torch writes in place."""
    for leaf, new in zip(_leaves(pool), _leaves(state), strict=True):
        leaf.index_copy_(0, rows, new)
    return pool


def forget(state: State, recurrent: Bool[Tensor, " S"], attention: Bool[Tensor, " S"]) -> State:
    """The state without what some of its rows remember; positions go on.

    Args:
        state: of S documents; it is not changed.
        recurrent: rows whose RG-LRU and convolutions start again from zero.
        attention: rows in which no query sees a key of a token that was read before.
    """
    layers = []
    for layer in state.layers:
        if isinstance(layer, RecurrentState):
            h = torch.where(recurrent[:, None], 0.0, layer.h)
            conv = torch.where(recurrent[:, None, None], 0.0, layer.conv)
            layer = RecurrentState(h, conv)
        layers.append(layer)
    since = torch.where(attention, state.pos, state.since)
    return State(state.pos, since, tuple(layers))


def rewind(state: State, room: int) -> State:
    """The state after ``room`` steps of `griffin_eval.model_torch.griffin.Griffin.step_one`, as if
    it had never moved; it is not to be used again."""

    def move(x: Tensor) -> Tensor:
        x[:, : x.shape[1] - room] = x[:, room:].clone()
        return x

    return _windows(move, state)


def enter(state: State, rows: Int[Tensor, " N"], new: State, moved: int) -> State:
    """Writes the rows of a state over these rows of one that has room and was moved; Torch writes
    in place."""
    for leaf, rest in zip(_leaves(state), _leaves(new), strict=True):
        place = leaf if leaf.ndim < 3 else leaf[:, moved : moved + rest.shape[1]]
        place.index_copy_(0, rows, rest)
    return state


def nbytes(state: State) -> int:
    """Bytes of a state."""
    return sum(leaf.nbytes for leaf in _leaves(state))


def _map(function, state: State) -> State:
    return State(
        function(state.pos),
        function(state.since),
        tuple(type(s)(*(function(leaf) for leaf in s)) for s in state.layers),
    )


def _windows(function: Callable[[Tensor], Tensor], state: State) -> State:
    """Of the layers' arrays those with an axis of remembered tokens."""
    return _map(lambda leaf: function(leaf) if leaf.ndim == 3 else leaf, state)


def _leaves(state: State):
    yield state.pos
    yield state.since
    for layer in state.layers:
        yield from layer
