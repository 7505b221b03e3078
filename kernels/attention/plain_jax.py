"""Local attention in plain JAX, on any device and in any precision, a block of queries at a time,
so that scores of T x T are never in memory."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from griffin_eval.kernels.rglru.plain_jax import accumulation_dtype

QUERY_BLOCK = 128  # queries of a row whose scores are in memory at a time


class QueryBlock(NamedTuple):
    """Neighbouring queries, all keys that any of them may see, and which of them each sees."""

    q: Float[Array, "M t H D"]
    k: Float[Array, "M s D"]
    v: Float[Array, "M s D"]
    visible: Bool[Array, "M t s"]


class PackedBlocks(NamedTuple):
    """How packed segments are cut into M blocks of t queries, some of which may be empty.

    Attributes:
        queries: [M, t] tokens of each block; behind the end of a segment any.
        segment: [M] segment of each block.
        start: [M] tokens of the segment before the block.
        place: [N] place of each token among all M t queries.
    """

    queries: Int[Array, "M t"]
    segment: Int[Array, " M"]
    start: Int[Array, " M"]
    place: Int[Array, " N"]


def local_attention(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "B Q D"] | Float[Array, "Q D"],
    values: Float[Array, "B Q D"] | Float[Array, "Q D"],
    max_age: Int[Array, "B T"],
    *,
    past: int,
    lengths: Int[Array, " S"],
    starts: Int[Array, " S"] | None = None,
    offset: int | Int[Array, ""] = 0,
    blocks: PackedBlocks | None = None,
) -> Float[Array, "B T W"]:
    """See `griffin_eval.kernels.attention.api.local_attention`."""
    if starts is not None:
        assert blocks is not None
        return _attend_packed(q, keys, values, max_age, past, lengths, starts, blocks)
    if keys.shape[1] > past + q.shape[1]:
        return _attend_one(q, keys, values, max_age, past, offset)
    return attend_in_blocks(q, keys, values, max_age, past)


def attend_in_blocks(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "B Q D"],
    values: Float[Array, "B Q D"],
    max_age: Int[Array, "B T"],
    past: int,
) -> Float[Array, "B T W"]:
    """Attention of padded rows, whose Q keys are P remembered ones and T new ones."""
    batch, length, heads, size = q.shape

    @functools.partial(jax.checkpoint, static_argnums=1)  # a gradient computes scores again
    def block(start: Array | int, queries: int) -> Array:
        def cut(x: Array, count: int) -> Array:
            return lax.dynamic_slice_in_dim(x, start, count, 1)

        visible = _visible(cut(max_age, queries), past)
        window = queries + past
        return attend(QueryBlock(cut(q, queries), cut(keys, window), cut(values, window), visible))

    mixed = []
    if whole := length // QUERY_BLOCK:  # one after the other, and compiled once
        starts = QUERY_BLOCK * jnp.arange(whole, dtype=jnp.int32)
        blocks = lax.map(lambda start: block(start, QUERY_BLOCK), starts)
        mixed = [jnp.moveaxis(blocks, 0, 1).reshape(batch, -1, heads * size)]
    if rest := length % QUERY_BLOCK:
        mixed.append(block(length - rest, rest).reshape(batch, rest, heads * size))
    return jnp.concatenate(mixed, 1)


def _attend_packed(
    q: Float[Array, "1 N H D"],
    keys: Float[Array, "Q D"],
    values: Float[Array, "Q D"],
    max_age: Int[Array, "1 N"],
    past: int,
    lengths: Int[Array, " S"],
    starts: Int[Array, " S"],
    blocks: PackedBlocks,
) -> Float[Array, "1 N W"]:
    key = jnp.arange(-past, blocks.queries.shape[1], dtype=jnp.int32)[None]
    # A block may end behind its segment: there its last key is repeated, which is too young.
    position = jnp.minimum(blocks.start[:, None] + key, lengths[blocks.segment][:, None] - 1)
    index = slot_of(blocks.segment[:, None], position, starts, past)
    visible = _visible(max_age[0, blocks.queries], past)
    mixed = attend(QueryBlock(q[0, blocks.queries], keys[index], values[index], visible))
    return mixed.reshape(blocks.queries.size, -1)[blocks.place][None]


def _attend_one(
    q: Float[Array, "B 1 H D"],
    keys: Float[Array, "B Q D"],
    values: Float[Array, "B Q D"],
    max_age: Int[Array, "B 1"],
    past: int,
    offset: int | Int[Array, ""],
) -> Float[Array, "B 1 W"]:
    """One query a row, over all slots: to cut out those that hold keys would be a copy."""
    age = (past + offset - jnp.arange(keys.shape[1], dtype=jnp.int32))[None, None]
    visible = (age >= 0) & (age <= jnp.minimum(max_age, past)[:, :, None])
    return attend(QueryBlock(q, keys, values, visible)).reshape(len(q), 1, -1)


def attend(block: QueryBlock) -> Float[Array, "M t H D"]:
    """What the queries of a block get."""
    # jax.nn.dot_product_attention takes its softmax in float32 even where the model is float64.
    # Keys go first: on a CPU few queries are read half as fast the other way round.
    batch, length, heads, size = block.q.shape
    q = block.q.reshape(batch, length * heads, size)
    wider = accumulation_dtype(q.dtype)
    scores = jnp.einsum("bsd,bqd->bsq", block.k, q, preferred_element_type=wider) * size**-0.5
    visible = jnp.repeat(block.visible.transpose(0, 2, 1), heads, axis=2)
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=1).astype(q.dtype)
    return jnp.einsum("bsq,bsd->bqd", weights, block.v).reshape(block.q.shape)


def _visible(max_age: Int[Array, "M t"], past: int) -> Bool[Array, "M t s"]:
    """Which keys of a block each of its queries sees; its first key is ``past`` tokens before its
    first query, its last key the last query's own."""
    query = jnp.arange(max_age.shape[1], dtype=jnp.int32)
    key = jnp.arange(-past, max_age.shape[1], dtype=jnp.int32)
    age = (query[:, None] - key[None])[None]  # in tokens, negative if the key is read after
    return (age >= 0) & (age <= jnp.minimum(max_age, past)[:, :, None])


def query_blocks(
    lengths: Int[Array, " S"],
    starts: Int[Array, " S"],
    segment: Int[Array, " N"],
    offset: Int[Array, " N"],
    size: int,
) -> PackedBlocks:
    """Cuts packed segments into blocks.

    Args:
        lengths, starts: of the segments.
        segment: of each token.
        offset: tokens of its segment before each token.
        size: queries of a block, t.
    """
    tokens = len(segment)
    counts = (lengths + size - 1) // size
    blocks = len(lengths) + max(tokens - len(lengths), 0) // size  # at most
    first, of_block, number = locate(counts, blocks)
    start = number * size
    within = jnp.arange(size, dtype=jnp.int32)[None]
    queries = jnp.minimum((starts[of_block] + start)[:, None] + within, tokens - 1)
    place = jnp.minimum(first[segment] * size + offset, blocks * size - 1)
    return PackedBlocks(queries, of_block, start, place)


def locate(counts: Int[Array, " S"], places: int) -> tuple[Array, Array, Array]:
    """Lays ``counts[s]`` things of each s behind each other into as many places or more.

    Returns:
        [S], the place of each first thing; [places], whose thing is there; [places], how many
        things of the same are before it.
    """
    ends = jnp.cumsum(counts)
    place = jnp.arange(places, dtype=counts.dtype)
    owner = jnp.searchsorted(ends, place, side="right").astype(counts.dtype)
    owner = jnp.minimum(owner, len(counts) - 1)
    return ends - counts, owner, place - (ends - counts)[owner]


def slot_of(
    segment: Int[Array, "*#A"],
    offset: Int[Array, "*#A"],
    starts: Int[Array, " S"],
    past: int,
) -> Int[Array, "*A"]:
    """Where packed keys hold a token of a segment; negative offsets are remembered tokens."""
    remembered = segment * past + past + offset
    new = len(starts) * past + starts[segment] + offset
    return jnp.where(offset < 0, remembered, new)
