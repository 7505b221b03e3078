"""How the tokens of a step lie: rows padded to one length, segments packed without padding, or one
token of every row."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from griffin_eval.kernels import attention_cpu_torch

QUERY_BLOCK = 128  # queries of a row whose scores are in memory at a time


class Tile(NamedTuple):
    """Neighbouring queries, all keys that any of them may see, and which of them each sees."""

    q: Float[Tensor, "M t H D"]
    k: Float[Tensor, "M s D"]
    v: Float[Tensor, "M s D"]
    seen: Bool[Tensor, "M t s"]


class Rows(NamedTuple):
    """B rows of T tokens, each with its own state; what is past a row's length is padding."""

    lengths: Int[Tensor, " B"]
    full: bool = False  # whether it is known that no row has padding
    starts = None  # no row lies behind another
    room = 0  # places of what was remembered that hold nothing

    def join(
        self, past: Float[Tensor, "S P X"], new: Float[Tensor, "B T X"]
    ) -> Float[Tensor, "S Q X"]:
        """What was remembered, and the new values behind it."""
        return torch.cat([past, new], 1)

    def earlier(
        self, joined: Float[Tensor, "S Q X"], past: int, age: int
    ) -> Float[Tensor, "B T X"]:
        """Of every token, the joined value ``age`` tokens before it."""
        return joined[:, past - age : joined.shape[1] - age]

    def last(
        self, remembered: Float[Tensor, "S P X"], joined: Float[Tensor, "S Q X"]
    ) -> Float[Tensor, "S P X"]:
        """What to remember: as many of the last joined values of each row, padding left out."""
        rows, length, _ = joined.shape
        past = remembered.shape[1]
        if self.full:  # then there is nothing to gather, nor to copy if most of it is kept
            kept = joined[:, length - past :]
            return kept if length == past + 1 else kept.clone()
        first = self.lengths + length * torch.arange(rows, device=joined.device)
        index = first[:, None] + torch.arange(past, device=joined.device)
        return joined.flatten(0, 1)[index]

    def by_tiles(
        self,
        attend: Callable[[Tile], Tensor],
        q: Float[Tensor, "B T H D"],
        keys: Float[Tensor, "S Q D"],
        values: Float[Tensor, "S Q D"],
        reach: Int[Tensor, "B T"],
    ) -> Float[Tensor, "B T W"]:
        """Attention a tile at a time, so that scores of T x T are never in memory; heads joined.

        Args:
            attend: from a tile to what its queries get, [M, t, H, D].
            q: queries.
            keys, values: joined.
            reach: how many tokens before a query a key may have been read, if it is remembered.
        """
        length = q.shape[1]
        past = keys.shape[1] - length
        mixed = []
        for start in range(0, length, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, length)
            window = slice(start, end + past)
            seen = _seen(reach[:, start:end], past)
            mixed.append(attend(Tile(q[:, start:end], keys[:, window], values[:, window], seen)))
        return torch.cat(mixed, 1).flatten(2)


class Packed(NamedTuple):
    """S segments behind each other in one row of N tokens, each with its own state, padding last.

    The methods mean the same as those of `Rows`. Attention works on tiles of ``tile`` queries of
    one segment: M of them, some of which may be empty.
    """

    lengths: Int[Tensor, " S"]
    starts: Int[Tensor, " S"]
    segment: Int[Tensor, " N"]  # of each token
    offset: Int[Tensor, " N"]  # tokens of its segment before it
    tile: int
    first_tile: Int[Tensor, " S"]
    tile_segment: Int[Tensor, " M"]
    tile_offset: Int[Tensor, " M"]
    room = 0

    def join(
        self, past: Float[Tensor, "S P X"], new: Float[Tensor, "1 N X"]
    ) -> Float[Tensor, "Q X"]:
        return torch.cat([past.flatten(0, 1), new[0]])

    def earlier(self, joined: Float[Tensor, "Q X"], past: int, age: int) -> Float[Tensor, "1 N X"]:
        return _rows(joined, self._index(self.segment, self.offset - age, past))[None]

    def last(
        self, remembered: Float[Tensor, "S P X"], joined: Float[Tensor, "Q X"]
    ) -> Float[Tensor, "S P X"]:
        past = remembered.shape[1]
        segment = torch.arange(len(self.lengths), device=joined.device)[:, None]
        back = torch.arange(-past, 0, device=joined.device)
        return _rows(joined, self._index(segment, self.lengths[:, None] + back, past))

    def by_tiles(
        self,
        attend: Callable[[Tile], Tensor],
        q: Float[Tensor, "1 N H D"],
        keys: Float[Tensor, "Q D"],
        values: Float[Tensor, "Q D"],
        reach: Int[Tensor, "1 N"],
    ) -> Float[Tensor, "1 N W"]:
        count = len(self.offset)
        past = (len(keys) - count) // len(self.lengths)
        within = torch.arange(self.tile, device=q.device)
        query = (self.starts[self.tile_segment] + self.tile_offset)[:, None] + within
        query = query.clamp(max=count - 1)
        key = torch.arange(-past, self.tile, device=q.device)
        # A tile may end behind its segment: there its last key is repeated, which is too young.
        position = (self.tile_offset[:, None] + key).minimum(
            self.lengths[self.tile_segment][:, None] - 1
        )
        index = self._index(self.tile_segment[:, None], position, past)
        seen = _seen(reach[0, query], past)
        tiles = attend(Tile(_rows(q[0], query), _rows(keys, index), _rows(values, index), seen))
        where = (self.first_tile[self.segment] * self.tile + self.offset).clamp(
            max=tiles.shape[0] * self.tile - 1
        )
        return _rows(tiles.flatten(0, 1), where).flatten(1)[None]

    def _index(
        self, segment: Int[Tensor, "*#A"], offset: Int[Tensor, "*#A"], past: int
    ) -> Int[Tensor, "*A"]:
        """Where the joined values hold a token of a segment; negative offsets are remembered."""
        remembered = (segment * past + past + offset).clamp(min=0)  # where no token is
        new = len(self.lengths) * past + self.starts[segment] + offset
        return torch.where(offset < 0, remembered, new)


class Single(NamedTuple):
    """One token of each of B rows, whose memory has room behind it (``init_state``). What is
    remembered is a window that moves by one place at a step, so that nothing is copied: the new
    value is written behind it, over what the state holds.

    The methods mean the same as those of `Rows`.
    """

    lengths: Int[Tensor, " B"]
    room: int
    moved: int  # places that the window has moved, less than ``room``
    starts = None

    def join(
        self, past: Float[Tensor, "B P X"], new: Float[Tensor, "B 1 X"]
    ) -> Float[Tensor, "B Q X"]:
        end = past.shape[1] - self.room + self.moved + 1
        past[:, end - 1] = new[:, 0]
        return past[:, self.moved : end]

    def last(
        self, remembered: Float[Tensor, "B P X"], joined: Float[Tensor, "B Q X"]
    ) -> Float[Tensor, "B P X"]:
        return remembered

    earlier, by_tiles = Rows.earlier, Rows.by_tiles


def local_attention(
    layout: Rows | Packed | Single,
    attend: Callable[[Tile], Tensor],
    q: Float[Tensor, "B T H D"],
    keys: Float[Tensor, "*S Q D"],
    values: Float[Tensor, "*S Q D"],
    reach: Int[Tensor, "B T"],
) -> Float[Tensor, "B T W"]:
    """What `Rows.by_tiles` says, by the compiled kernel where it can."""
    if attention_cpu_torch.unsupported(q, keys, values):
        return layout.by_tiles(attend, q, keys, values, reach)
    batch, length, _, _ = q.shape
    if layout.starts is None:
        starts = length * torch.arange(batch)
        newest = past = keys.shape[1] - length
    else:
        starts = layout.starts
        newest = past = (len(keys) - length) // len(starts)
    return attention_cpu_torch.local_attention(
        q, keys, values, reach.clamp(max=past), starts, layout.lengths, newest
    )


def pack(lengths: Int[Tensor, " S"], tokens: int, tile: int) -> Packed:
    """Lays segments of these lengths behind each other.

    Args:
        lengths: tokens of each segment; together at most ``tokens``.
        tokens: what the row holds, padding included, N.
        tile: queries that attention works on together.
    """

    def locate(counts: Int[Tensor, " S"], places: int) -> tuple[Tensor, Tensor, Tensor]:
        ends = counts.cumsum(0)
        place = torch.arange(places, device=counts.device)
        owner = torch.searchsorted(ends, place, right=True).clamp(max=len(counts) - 1)
        return ends - counts, owner, place - (ends - counts)[owner]

    starts, segment, offset = locate(lengths, tokens)
    tiles = (lengths + tile - 1) // tile
    most = len(lengths) + max(tokens - len(lengths), 0) // tile  # counting would wait for a device
    places = max(int(tiles.sum()), 1) if lengths.device.type == "cpu" else most
    first_tile, tile_segment, tile_number = locate(tiles, places)
    return Packed(
        lengths, starts, segment, offset, tile, first_tile, tile_segment, tile_number * tile
    )


def _rows(x: Float[Tensor, "Q ..."], index: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """``x[index]``, which on a CPU takes three times as long."""
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])


def _seen(reach: Int[Tensor, "M t"], past: int) -> Bool[Tensor, "M t s"]:
    """Which keys of a tile each of its queries sees; its first key is ``past`` tokens before its
    first query, its last key the last query's own."""
    query = torch.arange(reach.shape[1], dtype=torch.int32, device=reach.device)
    key = torch.arange(-past, reach.shape[1], dtype=torch.int32, device=reach.device)
    age = query[:, None] - key  # in tokens, negative if the key is read after the query
    return (age >= 0) & (age <= reach.clamp(max=past)[:, :, None])


class Chunk(NamedTuple):
    """What every block needs to know of the tokens being read."""

    positions: Int[Tensor, "B T"]  # within the document, which a reset starts anew
    reach: Int[Tensor, "B T"]  # how many tokens before it attention may see, if it remembers them
    padding: Bool[Tensor, "B T"]
    cos: Float[Tensor, "B T R"]
    sin: Float[Tensor, "B T R"]
    layout: Rows | Packed | Single
