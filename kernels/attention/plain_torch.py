"""Local attention in plain PyTorch for any device and precision, by blocks of queries, so that
scores of T x T are never stored."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from griffin_eval.kernels.attention.reference import Remembered

QUERY_BLOCK = 128  # queries of a row whose scores are stored at a time


class QueryBlock(NamedTuple):
    """Neighbouring queries, all keys that any of them may see, and the visibility of each pair."""

    q: Float[Tensor, "M t H D"]
    k: Float[Tensor, "M s J"]
    v: Float[Tensor, "M s J"]
    visible: Bool[Tensor, "M t s"]


class PackedBlocks(NamedTuple):
    """The division of packed segments into M blocks of t queries, some of which may be empty.

    Attributes:
        queries: [M, t] tokens of each block; arbitrary past the end of a segment.
        segment: [M] segment of each block.
        start: [M] number of tokens of the segment before the block.
        place: [N] position of each token among all M t queries.
    """

    queries: Int[Tensor, "M t"]
    segment: Int[Tensor, " M"]
    start: Int[Tensor, " M"]
    place: Int[Tensor, " N"]


def local_attention(
    q: Float[Tensor, "B T H D"],
    keys: Float[Tensor, "B Q J"] | Float[Tensor, "N J"],
    values: Float[Tensor, "B Q J"] | Float[Tensor, "N J"],
    max_age: Int[Tensor, "B T"],
    *,
    past: int,
    lengths: Int[Tensor, " S"],
    starts: Int[Tensor, " S"] | None = None,
    remembered: Remembered | None = None,
    newest: Int[Tensor, " B"] | None = None,
    blocks: PackedBlocks | None = None,
) -> Float[Tensor, "B T H*D"]:
    """See `griffin_eval.kernels.attention.api.local_attention`."""
    if starts is not None:
        assert blocks is not None and remembered is not None
        joined = joined_keys(keys, values, remembered)
        return _attend_packed(q, *joined, max_age, past, lengths, starts, blocks)
    if newest is not None:
        age = (newest[:, None] - torch.arange(keys.shape[1], device=q.device)) % keys.shape[1]
        visible = age[:, None] <= max_age.clamp(max=past)[:, :, None]
        return attend(QueryBlock(q, keys, values, visible)).flatten(2)
    return attend_in_blocks(q, keys, values, max_age, past)


def attend_in_blocks(
    q: Float[Tensor, "B T H D"],
    keys: Float[Tensor, "B Q J"],
    values: Float[Tensor, "B Q J"],
    max_age: Int[Tensor, "B T"],
    past: int,
) -> Float[Tensor, "B T H*D"]:
    """Compute attention for padded rows, whose Q keys are P remembered and T new ones."""
    length = q.shape[1]
    mixed = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        window = slice(start, end + past)
        visible = _visible(max_age[:, start:end], past)
        block = QueryBlock(q[:, start:end], keys[:, window], values[:, window], visible)
        mixed.append(attend(block))
    return torch.cat(mixed, 1).flatten(2)


def joined_keys(
    keys: Float[Tensor, "N J"], values: Float[Tensor, "N J"], remembered: Remembered
) -> tuple[Float[Tensor, "Q J"], Float[Tensor, "Q J"]]:
    """Concatenate keys and values of packed segments: remembered ones by segment, then new ones."""

    def join(past: Tensor, new: Tensor) -> Tensor:
        return torch.cat([past[remembered.rows].flatten(0, 1), new])

    return join(remembered.keys, keys), join(remembered.values, values)


def _attend_packed(
    q: Float[Tensor, "1 N H D"],
    keys: Float[Tensor, "Q J"],
    values: Float[Tensor, "Q J"],
    max_age: Int[Tensor, "1 N"],
    past: int,
    lengths: Int[Tensor, " S"],
    starts: Int[Tensor, " S"],
    blocks: PackedBlocks,
) -> Float[Tensor, "1 N H*D"]:
    key = torch.arange(-past, blocks.queries.shape[1], device=q.device)
    # A block may end past its segment: there the last key is repeated, which is too young to see.
    position = (blocks.start[:, None] + key).minimum(lengths[blocks.segment][:, None] - 1)
    index = slot_of(blocks.segment[:, None], position, starts, past)
    visible = _visible(max_age[0, blocks.queries], past)
    mixed = attend(
        QueryBlock(
            take_rows(q[0], blocks.queries),
            take_rows(keys, index),
            take_rows(values, index),
            visible,
        )
    )
    return take_rows(mixed.flatten(0, 1), blocks.place).flatten(1)[None]


def attend(block: QueryBlock) -> Float[Tensor, "M t H D"]:
    """Compute attention for a block of queries."""
    heads, size = block.q.shape[2:]
    if block.k.shape[2] > size:  # several key heads
        k, v = (x.unflatten(2, (-1, size)).transpose(1, 2) for x in (block.k, block.v))
        visible = block.visible[:, None]
        y = F.scaled_dot_product_attention(
            block.q.transpose(1, 2), k, v, attn_mask=visible, enable_gqa=True
        )
        return y.transpose(1, 2)
    return F.scaled_dot_product_attention(
        block.q.transpose(1, 2),
        block.k[:, None].expand(-1, heads, -1, -1),
        block.v[:, None].expand(-1, heads, -1, -1),
        attn_mask=block.visible[:, None],
    ).transpose(1, 2)


def _visible(max_age: Int[Tensor, "M t"], past: int) -> Bool[Tensor, "M t s"]:
    """Return the keys of a block that each query sees; the first key is ``past`` tokens before the
    first query, the last key is the last query's own."""
    query = torch.arange(max_age.shape[1], dtype=torch.int32, device=max_age.device)
    key = torch.arange(-past, max_age.shape[1], dtype=torch.int32, device=max_age.device)
    age = query[:, None] - key  # in tokens, negative for later keys
    return (age >= 0) & (age <= max_age.clamp(max=past)[:, :, None])


def query_blocks(
    lengths: Int[Tensor, " S"],
    starts: Int[Tensor, " S"],
    segment: Int[Tensor, " N"],
    offset: Int[Tensor, " N"],
    size: int,
) -> PackedBlocks:
    """Divide packed segments into blocks.

    Args:
        segment: Segment of each token.
        offset: Number of tokens of its segment before each token.
        size: Number of queries of a block, t.
    """
    tokens = len(segment)
    counts = (lengths + size - 1) // size
    blocks = len(lengths) + max(tokens - len(lengths), 0) // size  # upper bound
    if lengths.device.type == "cpu":  # elsewhere an exact count would wait for the device
        blocks = max(int(counts.sum()), 1)
    first, of_block, number = locate(counts, blocks)
    start = number * size
    within = torch.arange(size, device=lengths.device)
    queries = ((starts[of_block] + start)[:, None] + within).clamp(max=tokens - 1)
    place = (first[segment] * size + offset).clamp(max=blocks * size - 1)
    return PackedBlocks(queries, of_block, start, place)


def locate(counts: Int[Tensor, " S"], places: int) -> tuple[Tensor, Tensor, Tensor]:
    """Assign places to ``counts[s]`` items of each s, one s after the other.

    Returns:
        [S], place of each first item; [places], the s of each place; [places], number of items of
        the same s before it.
    """
    ends = counts.cumsum(0)
    place = torch.arange(places, device=counts.device)
    owner = torch.searchsorted(ends, place, right=True).clamp(max=len(counts) - 1)
    return ends - counts, owner, place - (ends - counts)[owner]


def slot_of(
    segment: Int[Tensor, "*#A"],
    offset: Int[Tensor, "*#A"],
    starts: Int[Tensor, " S"],
    past: int,
) -> Int[Tensor, "*A"]:
    """Return the slot of a segment's token among packed keys; negative offsets are remembered."""
    remembered = (segment * past + past + offset).clamp(min=0)  # places without a token are < 0
    new = len(starts) * past + starts[segment] + offset
    return torch.where(offset < 0, remembered, new)


def take_rows(x: Float[Tensor, "Q ..."], index: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return ``x[index]``, in a third of its time on a CPU."""
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])
