"""Layouts of the tokens of a step: rows padded to one length, one token of every row, or packed
segments."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Shaped

from griffin_eval.kernels.attention.plain_jax import (
    PackedBlocks,
    locate,
    query_blocks,
    slot_of,
    with_dtype,
)
from griffin_eval.kernels.attention.reference import Remembered
from griffin_eval.model_jax.state import AttentionState, PoolRows, write_rows
from griffin_eval.sharding.mesh_jax import before, first_number, local_attention


class PaddedLayout(NamedTuple):
    """B rows of T tokens, each with its own state; tokens past a row's length are padding.

    A state remembers P past values of each row. Attention and convolution read them *joined* with
    the new ones: the slots of a row are the second axis of the joined array.
    """

    lengths: Int[Array, " B"]
    starts = None  # each segment is a row

    def past(self, keys: Float[Array, "S P J"]) -> int:
        """Return the largest distance in tokens between a query and these keys of a state."""
        return keys.shape[1]

    def join(
        self, past: Float[Array, "S P X"], new: Float[Array, "B T X"]
    ) -> Float[Array, "S Q X"]:
        """Concatenate past and new values along time."""
        return jnp.concatenate([before(past, new), new], 1)

    def earlier(self, joined: Float[Array, "S Q X"], past: int, age: int) -> Float[Array, "B T X"]:
        """Return the joined value ``age`` tokens before each token, after ``past`` old values."""
        return joined[:, past - age : joined.shape[1] - age]

    def last(
        self, remembered: Float[Array, "S P X"], joined: Float[Array, "S Q X"]
    ) -> Float[Array, "S P X"]:
        """Return the values that the next state remembers: the last P of each row's tokens."""
        past = remembered.shape[1]
        if joined.shape[1] == past + 1:
            return jnp.where(self.lengths[:, None, None] > 0, joined[:, 1:], joined[:, :-1])
        return jax.vmap(lambda x, n: lax.dynamic_slice_in_dim(x, n, past))(joined, self.lengths)

    def attend(
        self,
        q: Float[Array, "B T H D"],
        k: Float[Array, "B T J"],
        v: Float[Array, "B T J"],
        context: "StepContext",
        state: AttentionState,
    ) -> tuple[Float[Array, "B T H*D"], AttentionState]:
        """Compute attention over remembered values and those of the step, and the next state."""
        state = AttentionState(*(with_dtype(x, k.dtype) for x in state))
        keys, values = self.join(state.k, k), self.join(state.v, v)
        past = state.k.shape[1]
        y = local_attention(q, keys, values, context.max_age, past=past, lengths=self.lengths)
        return y, AttentionState(self.last(state.k, keys), self.last(state.v, values))


class RingLayout(PaddedLayout):
    """One token of each of B rows, with the keys and values of attention in rings.

    A ring has Q slots, one for each token that a query sees, including its own; position p has slot
    p % Q. A step overwrites keys and values that no query sees any more, in place if the state is
    donated. The few inputs of the convolution are shifted instead.
    """

    def past(self, keys: Float[Array, "S Q J"]) -> int:
        return keys.shape[1] - 1

    def attend(
        self,
        q: Float[Array, "B 1 H D"],
        k: Float[Array, "B 1 J"],
        v: Float[Array, "B 1 J"],
        context: "StepContext",
        state: AttentionState,
    ) -> tuple[Float[Array, "B 1 H*D"], AttentionState]:
        newest = context.positions[:, 0] % state.k.shape[1]

        row = jnp.arange(len(k), dtype=jnp.int32)
        # A TPU takes three times as long without these promises, by its compiler's estimate.
        promised: Any = {"mode": "promise_in_bounds", "unique_indices": True}

        def write(ring: Array, new: Array) -> Array:
            value = with_dtype(new[:, 0], ring.dtype)
            return ring.at[row, newest].set(value, indices_are_sorted=True, **promised)

        state = AttentionState(write(state.k, k), write(state.v, v))
        layout = {"past": self.past(state.k), "lengths": self.lengths, "newest": newest}
        return local_attention(q, *state, context.max_age, **layout), state


class PackedLayout(NamedTuple):
    """S segments one after the other in one row of N tokens, each with its own state, padding last.

    The methods are those of `PaddedLayout`; joined arrays hold first the past values of all
    segments, then the row. The past keys and values of attention, which are longer, stay in the
    pool of states, where attention reads them and new ones are written.
    """

    lengths: Int[Array, " S"]
    starts: Int[Array, " S"]
    segment: Int[Array, " N"]  # segment of each token
    position: Int[Array, " N"]  # number of tokens of its segment before each token
    blocks: PackedBlocks  # blocks of queries for attention
    rows: PoolRows
    past = PaddedLayout.past

    def join(self, past: Float[Array, "S P X"], new: Float[Array, "1 N X"]) -> Float[Array, "Q X"]:
        return jnp.concatenate([past.reshape(-1, past.shape[2]), new[0]])

    def earlier(self, joined: Float[Array, "Q X"], past: int, age: int) -> Float[Array, "1 N X"]:
        slots = slot_of(self.segment, self.position - age, self.starts, past)
        return joined[slots][None]

    def last(
        self, remembered: Float[Array, "S P X"], joined: Float[Array, "Q X"]
    ) -> Float[Array, "S P X"]:
        past = remembered.shape[1]
        segment = jnp.arange(len(self.lengths), dtype=jnp.int32)[:, None]
        back = jnp.arange(-past, 0, dtype=jnp.int32)[None]
        slots = slot_of(segment, self.lengths[:, None] + back, self.starts, past)
        return joined[slots]

    def attend(
        self,
        q: Float[Array, "1 N H D"],
        k: Float[Array, "1 N J"],
        v: Float[Array, "1 N J"],
        context: "StepContext",
        state: AttentionState,
    ) -> tuple[Float[Array, "1 N H*D"], AttentionState]:
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
        after = first_number(y, q, k)
        k, v = self._write(state.k, k[0], after), self._write(state.v, v[0], after)
        return y, AttentionState(k, v)

    def _write(
        self, pool: Shaped[Array, "R P X"], new: Float[Array, "N X"], after: Array
    ) -> Shaped[Array, "R P X"]:
        """Write the last P values of every kept segment into the pool, which may hold bits."""
        past, (sources, kept, targets) = pool.shape[1], self.rows
        padded = jnp.pad(with_dtype(new, pool.dtype), ((past, 0), (0, 0)))
        behind = jnp.arange(past, dtype=jnp.int32)[:, None]

        def row(i: Array, pool: Array) -> Array:
            segment = kept[i]
            length, source = self.lengths[segment], pool[sources[segment]]
            end = self.starts[segment] + length
            last = lax.dynamic_slice_in_dim(padded, end, past)
            room = jnp.concatenate([source, source])  # P values can start anywhere in it
            moved = lax.dynamic_slice_in_dim(room, jnp.minimum(length, past), past)
            return jnp.where(behind >= past - length, last, moved)

        return write_rows(pool, targets, row, after)


def pack(lengths: Int[Array, " S"], tokens: int, query_block: int, rows: PoolRows) -> PackedLayout:
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

    positions: Int[Array, "B T"]  # position in the document, which a reset restarts
    max_age: Int[Array, "B T"]  # earlier tokens that attention may see, if the state holds them
    padding: Bool[Array, "B T"]
    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]
    layout: PaddedLayout | RingLayout | PackedLayout
