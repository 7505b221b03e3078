"""The state of a model between steps: tuples of tensors with the batch axis first everywhere.

Axis names in all shape annotations: B batch, T tokens of a chunk, S rows of a state (B, or the
packed segments of one row), N packed tokens, W model width, L RG-LRU width, H heads, D dimensions
of a head, J dimensions of all key (or value) heads together, R rotated pairs of a head, C
remembered keys, K taps of the convolution less one, V vocabulary, E expanded MLP width, G blocks of
a gate, Z complex channels of a CG-LRU.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class RecurrentState(NamedTuple):
    """State of a recurrent block.

    Attributes:
        h: State of the RG-LRU, at least float32.
        conv: Last K inputs of the convolution, oldest first.
    """

    h: Float[Tensor, "S L"]
    conv: Float[Tensor, "S K L"]


class AttentionState(NamedTuple):
    """Keys (rotated) and values of the last C tokens, oldest first.

    Entries from before the document, or from before `State.attention_start`, are meaningless and
    never attended to.
    """

    k: Float[Tensor, "S C J"]
    v: Float[Tensor, "S C J"]


class State(NamedTuple):
    """State of the whole model.

    Attributes:
        pos: Number of tokens read of the current document.
        attention_start: Position of the first token of the document that attention may see; 0
            unless `ablate` was called.
        layers: One state per residual block.
    """

    pos: Int[Tensor, " S"]
    attention_start: Int[Tensor, " S"]
    layers: tuple[RecurrentState | AttentionState, ...]


class PoolRows(NamedTuple):
    """The rows of a pool that the segments of a packed step read and write.

    A row must not be written for a segment if a later segment continues from it.

    Attributes:
        sources: Row of the pool that each segment continues; several segments may share one.
        kept: Segments whose state is kept after the step, in the order of the segments.
        targets: Row of the pool for the state of each of these, without repetitions.
    """

    sources: Int[Tensor, " S"]
    kept: Int[Tensor, " M"]
    targets: Int[Tensor, " M"]


def gather(state: State, rows: Int[Tensor, " N"]) -> State:
    """Return rows of a state, with repetitions: this forks, drops and reorders a batch."""
    return map_leaves(lambda leaf: leaf.index_select(0, rows), state)


def scatter(pool: State, rows: Int[Tensor, " N"], state: State) -> State:
    """Write the N rows of a state over rows of a pool of P rows, which is consumed.

    ``rows`` has no repetitions. Rows outside the pool raise an error in PyTorch and are skipped in
    JAX.
    """
    return map_leaves(lambda leaf, new: leaf.index_copy_(0, rows, new), pool, state)


def fork(pool: State, sources: Int[Tensor, " S"]) -> State:
    """Return the states of some rows of a pool, with repetitions, for a packed step. Keys and
    values of attention, most of a state, are not copied: the step reads them in the pool."""
    layers = [
        layer
        if isinstance(layer, AttentionState)
        else RecurrentState(*(leaf.index_select(0, sources) for leaf in layer))
        for layer in pool.layers
    ]
    return State(pool.pos[sources], pool.attention_start[sources], tuple(layers))


def keep(pool: State, after: State, rows: PoolRows) -> State:
    """Write the states after a packed step over rows of the pool, which is consumed.

    ``after`` holds S segments, except for the keys and values of attention, which are already
    written to the pool.
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
    """Return the state with the memory of some of its rows cleared; positions continue.

    Args:
        recurrent: Rows whose RG-LRU and convolutions restart from zero.
        attention: Rows in which later queries see no key of an earlier token.
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
    """Return the part of a state that `fork` copies."""
    layers = (layer for layer in state.layers if not isinstance(layer, AttentionState))
    return state._replace(layers=tuple(layers))


def nbytes(state: State) -> int:
    """Return the number of bytes of a state."""
    return sum(leaf.nbytes for leaf in _leaves(state))


def map_leaves(function: Callable[..., Tensor], state: State, *others: State) -> State:
    """Apply a function to the tensors at the same place in each state."""
    leaves = iter([function(*group) for group in zip(*map(_leaves, (state, *others)), strict=True)])
    pos, attention_start = next(leaves), next(leaves)
    layers = (type(layer)(*(next(leaves) for _ in layer)) for layer in state.layers)
    return State(pos, attention_start, tuple(layers))


def _leaves(state: State) -> Iterator[Tensor]:
    yield state.pos
    yield state.attention_start
    for layer in state.layers:
        yield from layer
