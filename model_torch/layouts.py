"""Layouts of the tokens of a step: rows padded to one length, one token of every row, or packed
segments."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from griffin_eval.kernels.attention.api import local_attention
from griffin_eval.kernels.attention.plain_torch import (
    PackedBlocks,
    locate,
    query_blocks,
    slot_of,
    take_rows,
)
from griffin_eval.kernels.attention.reference import Remembered
from griffin_eval.model_torch.state import AttentionState, PoolRows


class PaddedLayout(NamedTuple):
    """B rows of T tokens, each with its own state; tokens past a row's length are padding.

    A state remembers P past values of each row. Attention and convolution read them *joined* with
    the new ones: the slots of a row are the second axis of the joined array.
    """

    lengths: Int[Tensor, " B"]
    full: bool = False  # whether all rows are known to have no padding
    starts = None  # each segment is a row

    def past(self, keys: Float[Tensor, "S P J"]) -> int:
        """Return the largest distance in tokens between a query and these keys of a state."""
        return keys.shape[1]

    def join(
        self, past: Float[Tensor, "S P X"], new: Float[Tensor, "B T X"]
    ) -> Float[Tensor, "S Q X"]:
        """Concatenate past and new values along time."""
        return torch.cat([past, new], 1)

    def earlier(
        self, joined: Float[Tensor, "S Q X"], past: int, age: int
    ) -> Float[Tensor, "B T X"]:
        """Return the joined value ``age`` tokens before each token, after ``past`` old values."""
        return joined[:, past - age : joined.shape[1] - age]

    def last(
        self, remembered: Float[Tensor, "S P X"], joined: Float[Tensor, "S Q X"]
    ) -> Float[Tensor, "S P X"]:
        """Return the values that the next state remembers: the last P of each row's tokens."""
        rows, length, _ = joined.shape
        past = remembered.shape[1]
        if self.full:  # no gather needed, and no copy if nearly all of it is kept
            kept = joined[:, length - past :]
            return kept if length == past + 1 else kept.clone()
        first = self.lengths + length * torch.arange(rows, device=joined.device)
        index = first[:, None] + torch.arange(past, device=joined.device)
        return joined.flatten(0, 1)[index]

    def attend(
        self,
        q: Float[Tensor, "B T H D"],
        k: Float[Tensor, "B T J"],
        v: Float[Tensor, "B T J"],
        context: "StepContext",
        state: AttentionState,
    ) -> tuple[Float[Tensor, "B T H*D"], AttentionState]:
        """Compute attention over remembered values and those of the step, and the next state."""
        keys, values = self.join(state.k, k), self.join(state.v, v)
        past = state.k.shape[1]
        y = local_attention(q, keys, values, context.max_age, past=past, lengths=self.lengths)
        return y, AttentionState(self.last(state.k, keys), self.last(state.v, values))


class RingLayout(PaddedLayout):
    """One token of each of B rows, with the keys and values of attention in rings.

    A ring has Q slots, one for each token that a query sees, including its own; position p has slot
    p % Q. A step overwrites keys and values that no query sees any more, in place. The few inputs
    of the convolution are shifted instead.
    """

    def past(self, keys: Float[Tensor, "S Q J"]) -> int:
        return keys.shape[1] - 1

    def attend(
        self,
        q: Float[Tensor, "B 1 H D"],
        k: Float[Tensor, "B 1 J"],
        v: Float[Tensor, "B 1 J"],
        context: "StepContext",
        state: AttentionState,
    ) -> tuple[Float[Tensor, "B 1 H*D"], AttentionState]:
        row = torch.arange(len(k), device=k.device)
        newest = context.positions[:, 0] % state.k.shape[1]
        for ring, new in zip(state, (k, v), strict=True):
            ring[row, newest] = new[:, 0]
        layout = {"past": self.past(state.k), "lengths": self.lengths, "newest": newest}
        return local_attention(q, *state, context.max_age, **layout), state


class PackedLayout(NamedTuple):
    """S segments one after the other in one row of N tokens, each with its own state, padding last.

    The methods are those of `PaddedLayout`; joined arrays hold first the past values of all
    segments, then the row. The past keys and values of attention, which are longer, stay in the
    pool of states, where attention reads them and new ones are written.
    """

    lengths: Int[Tensor, " S"]
    starts: Int[Tensor, " S"]
    segment: Int[Tensor, " N"]  # segment of each token
    position: Int[Tensor, " N"]  # number of tokens of its segment before each token
    blocks: PackedBlocks  # blocks of queries for attention
    rows: PoolRows
    past = PaddedLayout.past

    def join(
        self, past: Float[Tensor, "S P X"], new: Float[Tensor, "1 N X"]
    ) -> Float[Tensor, "Q X"]:
        return torch.cat([past.flatten(0, 1), new[0]])

    def earlier(self, joined: Float[Tensor, "Q X"], past: int, age: int) -> Float[Tensor, "1 N X"]:
        slots = slot_of(self.segment, self.position - age, self.starts, past)
        return take_rows(joined, slots)[None]

    def last(
        self, remembered: Float[Tensor, "S P X"], joined: Float[Tensor, "Q X"]
    ) -> Float[Tensor, "S P X"]:
        past = remembered.shape[1]
        segment = torch.arange(len(self.lengths), device=joined.device)[:, None]
        back = torch.arange(-past, 0, device=joined.device)[None]
        slots = slot_of(segment, self.lengths[:, None] + back, self.starts, past)
        return take_rows(joined, slots)

    def attend(
        self,
        q: Float[Tensor, "1 N H D"],
        k: Float[Tensor, "1 N J"],
        v: Float[Tensor, "1 N J"],
        context: "StepContext",
        state: AttentionState,
    ) -> tuple[Float[Tensor, "1 N H*D"], AttentionState]:
        y = local_attention(
            q,
            k[0],
            v[0],
            context.max_age,
            past=state.k.shape[1],
            lengths=self.lengths,
            starts=self.starts,
            remembered=Remembered(state.k, state.v, self.rows.sources),
            blocks=self.blocks,
        )
        return y, AttentionState(self._write(state.k, k[0]), self._write(state.v, v[0]))

    def _write(
        self, pool: Float[Tensor, "R P X"], new: Float[Tensor, "N X"]
    ) -> Float[Tensor, "R P X"]:
        """Write the last P values of every kept segment into the pool."""
        past, (sources, kept, targets) = pool.shape[1], self.rows
        back = torch.arange(-past, 0, device=pool.device)
        offset = self.lengths[kept][:, None] + back  # offsets of the last P values, < 0 in the pool
        old = (sources[kept][:, None] * past + past + offset).clamp(max=len(pool) * past - 1)
        last = take_rows(pool.flatten(0, 1), old).flatten(0, 1)
        new_place = torch.nonzero(offset.flatten() >= 0)[:, 0]
        token = (self.starts[kept][:, None] + offset).flatten()[new_place]
        last.index_copy_(0, new_place, new.index_select(0, token))
        return pool.index_copy_(0, targets, last.view(len(kept), *pool.shape[1:]))


def pack(lengths: Int[Tensor, " S"], tokens: int, query_block: int, rows: PoolRows) -> PackedLayout:
    """Lay out segments one after the other.

    Args:
        lengths: Number of tokens of each segment, at most ``tokens`` in all.
        tokens: Number of tokens of the row including padding, N.
        query_block: Number of queries of a block for attention.
        rows: Rows of the pool of states.
    """
    starts, segment, position = locate(lengths, tokens)
    blocks = query_blocks(lengths, starts, segment, position, query_block)
    return PackedLayout(lengths, starts, segment, position, blocks, rows)


class StepContext(NamedTuple):
    """Properties of the tokens of a step, for all blocks."""

    positions: Int[Tensor, "B T"]  # position in the document, which a reset restarts
    max_age: Int[Tensor, "B T"]  # earlier tokens that attention may see, if the state holds them
    padding: Bool[Tensor, "B T"]
    cos: Float[Tensor, "B T R"]
    sin: Float[Tensor, "B T R"]
    layout: PaddedLayout | RingLayout | PackedLayout
