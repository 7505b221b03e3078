"""The state of a model between steps: tuples of tensors with the batch axis first everywhere.

The axis names used in every shape annotation: B batch, T tokens of a chunk, S rows of a state (B,
or the segments packed into one row), N packed tokens, W model width, L RG-LRU width, H heads, D
dimensions of a head, J those of all heads of keys (or values) together, R rotated pairs of a head,
C remembered keys, K taps of the convolution less one, V vocabulary, E expanded MLP width, G blocks
of a gate, Z complex channels of a CG-LRU.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class RecurrentState(NamedTuple):
    """State of a recurrent block.

    Attributes:
        h: of the RG-LRU, float32 at least.
        conv: the last K inputs of the convolution, oldest first.
    """

    h: Float[Tensor, "S L"]
    conv: Float[Tensor, "S K L"]


class AttentionState(NamedTuple):
    """Keys (rotated) and values of the last C tokens, oldest first.

    Entries from before the document, or from before `State.attention_start`, hold no meaning and
    are never attended to.
    """

    k: Float[Tensor, "S C J"]
    v: Float[Tensor, "S C J"]


class State(NamedTuple):
    """State of the whole model.

    Attributes:
        pos: number of tokens read of the current document.
        attention_start: position of the first token of the document whose key attention may see;
            0 unless `ablate` was called.
        layers: one state per residual block.
    """

    pos: Int[Tensor, " S"]
    attention_start: Int[Tensor, " S"]
    layers: tuple[RecurrentState | AttentionState, ...]


class PoolRows(NamedTuple):
    """Which states of a pool the segments of a packed step continue, and where those after it go.

    A row must not be written for a segment if a later segment continues from it.

    Attributes:
        sources: the row of the pool that each segment continues from; several may share one.
        kept: segments whose state after the step is kept, in the order of the segments.
        targets: the row of the pool that takes each of these, no row twice.
    """

    sources: Int[Tensor, " S"]
    kept: Int[Tensor, " M"]
    targets: Int[Tensor, " M"]


def gather(state: State, rows: Int[Tensor, " N"]) -> State:
    """A state of the given rows of a state, which may repeat: forks, drops and reorders a batch."""
    return map_leaves(lambda leaf: leaf.index_select(0, rows), state)


def scatter(pool: State, rows: Int[Tensor, " N"], state: State) -> State:
    """Writes the rows of a state over these rows of a pool, which is consumed.

    Args:
        pool: of P rows; only the result may be used from here on.
        rows: which of its rows to write, no row twice, each from 0 to P - 1. Others are an error in
            PyTorch and left out in JAX.
        state: of N rows.
    """
    return map_leaves(lambda leaf, new: leaf.index_copy_(0, rows, new), pool, state)


def fork(pool: State, sources: Int[Tensor, " S"]) -> State:
    """The states of some rows of a pool, which may repeat, for a packed step. Keys and values of
    attention, most of a state, are those of the whole pool: the step reads them in place."""
    layers = [
        layer
        if isinstance(layer, AttentionState)
        else RecurrentState(*(leaf.index_select(0, sources) for leaf in layer))
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

    def write(old: Tensor, new: Tensor) -> Tensor:
        return old.index_copy_(0, rows.targets, new[rows.kept])

    layers = [
        new if isinstance(new, AttentionState) else RecurrentState(*map(write, old, new))
        for old, new in zip(pool.layers, after.layers, strict=True)
    ]
    pos, start = write(pool.pos, after.pos), write(pool.attention_start, after.attention_start)
    return State(pos, start, tuple(layers))


def ablate(state: State, recurrent: Bool[Tensor, " S"], attention: Bool[Tensor, " S"]) -> State:
    """The state with the memory of some of its rows cleared; positions continue.

    Args:
        state: of S documents; it is not changed.
        recurrent: rows whose RG-LRU and convolutions start again from zero.
        attention: rows in which no later query sees a key of a token that was read before.
    """
    layers = []
    for layer in state.layers:
        if isinstance(layer, RecurrentState):
            h = torch.where(recurrent[:, None], 0.0, layer.h)
            conv = torch.where(recurrent[:, None, None], 0.0, layer.conv)
            layer = RecurrentState(h, conv)
        layers.append(layer)
    attention_start = torch.where(attention, state.pos, state.attention_start)
    return State(state.pos, attention_start, tuple(layers))


def without_attention(state: State) -> State:
    """The part of a state that `fork` copies."""
    layers = (layer for layer in state.layers if not isinstance(layer, AttentionState))
    return state._replace(layers=tuple(layers))


def nbytes(state: State) -> int:
    """Bytes of a state."""
    return sum(leaf.nbytes for leaf in _leaves(state))


def map_leaves(function: Callable[..., Tensor], state: State, *others: State) -> State:
    """The state whose tensors are ``function`` of those at the same place in each given state."""
    leaves = iter([function(*group) for group in zip(*map(_leaves, (state, *others)), strict=True)])
    pos, attention_start = next(leaves), next(leaves)
    layers = (type(layer)(*(next(leaves) for _ in layer)) for layer in state.layers)
    return State(pos, attention_start, tuple(layers))


def _leaves(state: State) -> Iterator[Tensor]:
    yield state.pos
    yield state.attention_start
    for layer in state.layers:
        yield from layer
