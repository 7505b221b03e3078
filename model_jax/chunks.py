"""How the tokens of a step lie: rows padded to one length, segments packed without padding, or one
token of every row."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from griffin_eval.kernels import attention_cpu_jax, devices

QUERY_BLOCK = 128  # queries of a row whose scores are in memory at a time


class Tile(NamedTuple):
    """Neighbouring queries, all keys that any of them may see, and which of them each sees."""

    q: Float[Array, "M t H D"]
    k: Float[Array, "M s D"]
    v: Float[Array, "M s D"]
    seen: Bool[Array, "M t s"]


class Rows(NamedTuple):
    """B rows of T tokens, each with its own state; what is past a row's length is padding."""

    lengths: Int[Array, " B"]
    starts = None  # no row lies behind another
    room = 0  # places of what was remembered that hold nothing

    def join(
        self, past: Float[Array, "S P X"], new: Float[Array, "B T X"]
    ) -> Float[Array, "S Q X"]:
        """What was remembered, and the new values behind it."""
        return jnp.concatenate([past, new], 1)

    def earlier(self, joined: Float[Array, "S Q X"], past: int, age: int) -> Float[Array, "B T X"]:
        """Of every token, the joined value ``age`` tokens before it."""
        return joined[:, past - age : joined.shape[1] - age]

    def last(
        self, remembered: Float[Array, "S P X"], joined: Float[Array, "S Q X"]
    ) -> Float[Array, "S P X"]:
        """What to remember: as many of the last joined values of each row, padding left out."""
        past = remembered.shape[1]
        if joined.shape[1] == past + 1:
            return jnp.where(self.lengths[:, None, None] > 0, joined[:, 1:], joined[:, :-1])
        return jax.vmap(lambda x, n: lax.dynamic_slice_in_dim(x, n, past))(joined, self.lengths)

    def by_tiles(
        self,
        attend: Callable[[Tile], Array],
        q: Float[Array, "B T H D"],
        keys: Float[Array, "S Q D"],
        values: Float[Array, "S Q D"],
        reach: Int[Array, "B T"],
    ) -> Float[Array, "B T W"]:
        """Attention a tile at a time, so that scores of T x T are never in memory; heads joined.

        On a TPU its own kernel takes the place of ``attend`` where it can.

        Args:
            attend: from a tile to what its queries get, [M, t, H, D].
            q: queries.
            keys, values: joined.
            reach: how many tokens before a query a key may have been read, if it is remembered.
        """
        batch, length, heads, size = q.shape
        past = keys.shape[1] - length
        if has_kernel(q):
            return _by_kernel(q, keys, values, reach)

        @functools.partial(jax.checkpoint, static_argnums=1)  # a gradient computes scores again
        def tile(start: Array | int, queries: int) -> Array:
            def cut(x: Array, count: int) -> Array:
                return lax.dynamic_slice_in_dim(x, start, count, 1)

            seen = _seen(cut(reach, queries), past)
            window = queries + past
            return attend(Tile(cut(q, queries), cut(keys, window), cut(values, window), seen))

        mixed = []
        if whole := length // QUERY_BLOCK:  # one after the other, and compiled once
            starts = QUERY_BLOCK * jnp.arange(whole, dtype=jnp.int32)
            tiles = lax.map(lambda start: tile(start, QUERY_BLOCK), starts)
            mixed = [jnp.moveaxis(tiles, 0, 1).reshape(batch, -1, heads * size)]
        if rest := length % QUERY_BLOCK:
            mixed.append(tile(length - rest, rest).reshape(batch, rest, heads * size))
        return jnp.concatenate(mixed, 1)


class Packed(NamedTuple):
    """S segments behind each other in one row of N tokens, each with its own state, padding last.

    The methods mean the same as those of `Rows`. Attention works on tiles of ``tile`` queries of
    one segment: M of them, some of which may be empty.
    """

    lengths: Int[Array, " S"]
    starts: Int[Array, " S"]
    segment: Int[Array, " N"]  # of each token
    offset: Int[Array, " N"]  # tokens of its segment before it
    tile: int
    first_tile: Int[Array, " S"]
    tile_segment: Int[Array, " M"]
    tile_offset: Int[Array, " M"]
    room = 0

    def join(self, past: Float[Array, "S P X"], new: Float[Array, "1 N X"]) -> Float[Array, "Q X"]:
        return jnp.concatenate([past.reshape(-1, past.shape[2]), new[0]])

    def earlier(self, joined: Float[Array, "Q X"], past: int, age: int) -> Float[Array, "1 N X"]:
        return joined[self._index(self.segment, self.offset - age, past)][None]

    def last(
        self, remembered: Float[Array, "S P X"], joined: Float[Array, "Q X"]
    ) -> Float[Array, "S P X"]:
        past = remembered.shape[1]
        segment = jnp.arange(len(self.lengths), dtype=jnp.int32)[:, None]
        back = jnp.arange(-past, 0, dtype=jnp.int32)[None]
        return joined[self._index(segment, self.lengths[:, None] + back, past)]

    def by_tiles(
        self,
        attend: Callable[[Tile], Array],
        q: Float[Array, "1 N H D"],
        keys: Float[Array, "Q D"],
        values: Float[Array, "Q D"],
        reach: Int[Array, "1 N"],
    ) -> Float[Array, "1 N W"]:
        if len(self.lengths) == 1 and has_kernel(q):
            return _by_kernel(q, keys[None], values[None], reach)
        count = len(self.offset)
        past = (len(keys) - count) // len(self.lengths)
        within = jnp.arange(self.tile, dtype=jnp.int32)[None]
        query = (self.starts[self.tile_segment] + self.tile_offset)[:, None] + within
        query = jnp.minimum(query, count - 1)
        key = jnp.arange(-past, self.tile, dtype=jnp.int32)[None]
        # A tile may end behind its segment: there its last key is repeated, which is too young.
        position = jnp.minimum(
            self.tile_offset[:, None] + key, self.lengths[self.tile_segment][:, None] - 1
        )
        index = self._index(self.tile_segment[:, None], position, past)
        seen = _seen(reach[0, query], past)
        tiles = attend(Tile(q[0, query], keys[index], values[index], seen))
        where = jnp.minimum(
            self.first_tile[self.segment] * self.tile + self.offset,
            tiles.shape[0] * self.tile - 1,
        )
        return tiles.reshape(tiles.shape[0] * self.tile, -1)[where][None]

    def _index(
        self, segment: Int[Array, "*#A"], offset: Int[Array, "*#A"], past: int
    ) -> Int[Array, "*A"]:
        """Where the joined values hold a token of a segment; negative offsets are remembered."""
        remembered = segment * past + past + offset
        new = len(self.lengths) * past + self.starts[segment] + offset
        return jnp.where(offset < 0, remembered, new)


class Single(NamedTuple):
    """One token of each of B rows, whose memory has room behind it (``init_state``). What is
    remembered is a window that moves by one place at a step, so that nothing is copied where the
    state is given up: the new value is written behind it. What is joined are all places.

    The methods mean the same as those of `Rows`.
    """

    lengths: Int[Array, " B"]
    room: int
    moved: int | Int[Array, ""]  # places that the window has moved, less than ``room``
    starts = None

    def join(
        self, past: Float[Array, "B P X"], new: Float[Array, "B 1 X"]
    ) -> Float[Array, "B Q X"]:
        newest = past.shape[1] - self.room + self.moved
        return lax.dynamic_update_slice_in_dim(past, new, newest, 1)

    def earlier(self, joined: Float[Array, "B Q X"], past: int, age: int) -> Float[Array, "B 1 X"]:
        return lax.dynamic_slice_in_dim(joined, past + self.moved - age, 1, 1)

    def last(
        self, remembered: Float[Array, "B P X"], joined: Float[Array, "B Q X"]
    ) -> Float[Array, "B P X"]:
        return joined

    def by_tiles(
        self,
        attend: Callable[[Tile], Array],
        q: Float[Array, "B 1 H D"],
        keys: Float[Array, "B Q D"],
        values: Float[Array, "B Q D"],
        reach: Int[Array, "B 1"],
    ) -> Float[Array, "B 1 W"]:
        places = keys.shape[1]
        past = places - self.room
        age = (past + self.moved - jnp.arange(places, dtype=jnp.int32))[None, None]
        seen = (age >= 0) & (age <= jnp.minimum(reach, past)[:, :, None])
        return attend(Tile(q, keys, values, seen)).reshape(len(q), 1, -1)


def local_attention(
    layout: Rows | Packed | Single,
    attend: Callable[[Tile], Array],
    q: Float[Array, "B T H D"],
    keys: Float[Array, "*S Q D"],
    values: Float[Array, "*S Q D"],
    reach: Int[Array, "B T"],
) -> Float[Array, "B T W"]:
    """What `Rows.by_tiles` says, by the compiled kernel where it can."""
    if devices.platform(q) != "cpu" or attention_cpu_jax.unsupported(q):
        return layout.by_tiles(attend, q, keys, values, reach)
    fields = layout._asdict()
    shape = type(layout), *((name, fields.pop(name)) for name in ("tile", "room") if name in fields)
    return _compiled(attend, shape, fields, q, keys, values, reach)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _compiled(
    attend: Callable[[Tile], Array],
    shape: tuple[Any, ...],  # the layout's type and the fields that are no arrays
    fields: dict[str, Array],
    q: Array,
    keys: Array,
    values: Array,
    reach: Array,
) -> Array:
    layout = _layout(shape, fields)
    batch, length, _, _ = q.shape
    if layout.starts is None:
        starts = length * jnp.arange(batch, dtype=jnp.int32)
        newest = past = keys.shape[1] - length
        if isinstance(layout, Single):
            past = keys.shape[1] - layout.room
            newest = past + layout.moved
    else:
        starts = layout.starts
        newest = past = (len(keys) - length) // len(starts)
    return attention_cpu_jax.local_attention(
        q, keys, values, jnp.minimum(reach, past), starts, layout.lengths, newest
    )


def _layout(shape: tuple[Any, ...], fields: dict[str, Array]) -> Rows | Packed | Single:
    return shape[0](**dict(shape[1:]), **fields)


def _compiled_and_saved(attend, shape, *arrays):
    return _compiled(attend, shape, *arrays), arrays


def _compiled_pulled_back(attend, shape, saved, grad):  # by tiles, whose scores are computed again
    fields, *floats, reach = saved

    def by_tiles(q, keys, values):
        return _layout(shape, fields).by_tiles(attend, q, keys, values, reach)

    return None, *jax.vjp(by_tiles, *floats)[1](grad), None


_compiled.defvjp(_compiled_and_saved, _compiled_pulled_back)


def pack(lengths: Int[Array, " S"], tokens: int, tile: int) -> Packed:
    """Lays segments of these lengths behind each other.

    Args:
        lengths: tokens of each segment; together at most ``tokens``.
        tokens: what the row holds, padding included, N.
        tile: queries that attention works on together.
    """

    def locate(counts: Int[Array, " S"], places: int) -> tuple[Array, Array, Array]:
        ends = jnp.cumsum(counts)
        place = jnp.arange(places, dtype=counts.dtype)
        owner = jnp.searchsorted(ends, place, side="right").astype(counts.dtype)
        owner = jnp.minimum(owner, len(counts) - 1)
        return ends - counts, owner, place - (ends - counts)[owner]

    starts, segment, offset = locate(lengths, tokens)
    most = len(lengths) + max(tokens - len(lengths), 0) // tile
    first_tile, tile_segment, tile_number = locate((lengths + tile - 1) // tile, most)
    return Packed(
        lengths, starts, segment, offset, tile, first_tile, tile_segment, tile_number * tile
    )


def _seen(reach: Int[Array, "M t"], past: int) -> Bool[Array, "M t s"]:
    """Which keys of a tile each of its queries sees; its first key is ``past`` tokens before its
    first query, its last key the last query's own."""
    query = jnp.arange(reach.shape[1], dtype=jnp.int32)
    key = jnp.arange(-past, reach.shape[1], dtype=jnp.int32)
    age = (query[:, None] - key[None])[None]  # in tokens, negative if the key is read after
    return (age >= 0) & (age <= jnp.minimum(reach, past)[:, :, None])


def has_kernel(q: Float[Array | jax.ShapeDtypeStruct, "B T H D"]) -> bool:
    """Whether there is a kernel for attention over rows of such queries."""
    if devices.platform(q) != "tpu":
        return False
    from griffin_eval.kernels import attention_tpu

    return attention_tpu.unsupported(q) is None


def _by_kernel(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "B Q D"],
    values: Float[Array, "B Q D"],
    reach: Int[Array, "B T"],
) -> Float[Array, "B T W"]:
    """Attention of rows by the kernel for this device, heads joined."""
    from griffin_eval.kernels import attention_tpu

    return attention_tpu.local_attention(q, keys, values, reach).reshape(*q.shape[:2], -1)


class Chunk(NamedTuple):
    """What every block needs to know of the tokens being read."""

    positions: Int[Array, "B T"]  # within the document, which a reset starts anew
    reach: Int[Array, "B T"]  # how many tokens before it attention may see, if it remembers them
    padding: Bool[Array, "B T"]
    cos: Float[Array, "B T R"]
    sin: Float[Array, "B T R"]
    layout: Rows | Packed | Single
