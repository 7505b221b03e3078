"""Local attention in plain JAX for any device and precision, by blocks of queries, so that scores
of T x T are never stored."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from griffin_eval.kernels.attention.reference import Remembered
from griffin_eval.kernels.rglru.plain_jax import accumulation_dtype

QUERY_BLOCK = 64  # queries of a row whose scores are stored at a time
KEY_RANGES = 8  # largest number of compiled key ranges for rows that start a document


class QueryBlock(NamedTuple):
    """Neighbouring queries, all keys that any of them may see, and the visibility of each pair."""

    q: Float[Array, "M t H D"]
    k: Float[Array, "M s J"]
    v: Float[Array, "M s J"]
    visible: Bool[Array, "M t s"]


class PackedBlocks(NamedTuple):
    """The division of packed segments into M blocks of t queries, some of which may be empty.

    Attributes:
        queries: [M, t] tokens of each block; arbitrary past the end of a segment.
        segment: [M] segment of each block.
        start: [M] number of tokens of the segment before the block.
        place: [N] position of each token among all M t queries.
    """

    queries: Int[Array, "M t"]
    segment: Int[Array, " M"]
    start: Int[Array, " M"]
    place: Int[Array, " N"]


def local_attention(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "B Q J"] | Float[Array, "N J"],
    values: Float[Array, "B Q J"] | Float[Array, "N J"],
    max_age: Int[Array, "B T"],
    *,
    past: int,
    lengths: Int[Array, " S"],
    starts: Int[Array, " S"] | None = None,
    remembered: Remembered | None = None,
    newest: Int[Array, " B"] | None = None,
    blocks: PackedBlocks | None = None,
) -> Float[Array, "B T H*D"]:
    """See `griffin_eval.kernels.attention.api.local_attention`."""
    keys, values = with_dtype(keys, q.dtype), with_dtype(values, q.dtype)
    if starts is not None:
        assert blocks is not None and remembered is not None
        joined = joined_keys(keys, values, remembered)
        return _attend_packed(q, *joined, max_age, past, lengths, starts, blocks)
    if newest is not None:
        slots = jnp.arange(keys.shape[1], dtype=jnp.int32)[None]
        age = (newest[:, None] - slots) % keys.shape[1]
        visible = age[:, None] <= jnp.minimum(max_age, past)[:, :, None]
        return attend(QueryBlock(q, keys, values, visible)).reshape(len(q), 1, -1)
    return attend_in_blocks(q, keys, values, max_age, past)


def attend_in_blocks(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "B Q J"],
    values: Float[Array, "B Q J"],
    max_age: Int[Array, "B T"],
    past: int,
) -> Float[Array, "B T H*D"]:
    """Compute attention for padded rows, whose Q keys are P remembered and T new ones.

    If no row sees a remembered key, as in training, only new keys up to a block's last query are
    read: about the causal pairs alone. The case is chosen at run time (`lax.cond`).
    """
    arrays, length = (q, keys, values, max_age), q.shape[1]
    if length == 1:
        return _attend_range(*arrays, past, 0, 1)
    alone = jnp.all(max_age <= jnp.arange(length, dtype=max_age.dtype)[None])
    everywhere = functools.partial(_attend_range, past=past, first=0, last=length)
    return lax.cond(alone, functools.partial(_attend_new, past=past), everywhere, *arrays)


def _attend_new(q: Array, keys: Array, values: Array, max_age: Array, past: int) -> Array:
    """Compute `attend_in_blocks` for queries that see no remembered key."""
    arrays, length = (q, keys, values, max_age), q.shape[1]
    # Only the first queries may see a row's first key.
    near = min(length, math.ceil(past / QUERY_BLOCK) * QUERY_BLOCK)
    step = math.ceil(near / (QUERY_BLOCK * KEY_RANGES)) * QUERY_BLOCK
    mixed = [
        _attend_range(*arrays, past, first, min(first + step, near), only_new=True)
        for first in range(0, near, step or 1)
    ]
    if near < length:
        mixed.append(_attend_range(*arrays, past, near, length))
    return jnp.concatenate(mixed, 1)


def _attend_range(
    q: Array,
    keys: Array,
    values: Array,
    max_age: Array,
    past: int,
    first: int,
    last: int,
    only_new: bool = False,
) -> Array:
    """Compute attention for the queries from ``first`` to ``last``, block by block. A block reads P
    keys before its first query, or with ``only_new`` all new ones before ``last``."""
    batch, _, heads, size = q.shape
    if only_new:
        keys, values = keys[:, past : past + last], values[:, past : past + last]

    @functools.partial(jax.checkpoint, static_argnums=1)  # recompute scores for the gradient
    def block(start: Array | int, queries: int) -> Array:
        def cut(x: Array, count: int) -> Array:
            return lax.dynamic_slice_in_dim(x, start, count, 1)

        if only_new:
            before, k, v = start, keys, values
        else:
            before, k, v = past, cut(keys, past + queries), cut(values, past + queries)
        seen = jnp.minimum(cut(max_age, queries), past)
        visible = _visible(seen, jnp.arange(k.shape[1], dtype=jnp.int32) - before)
        return attend(QueryBlock(cut(q, queries), k, v, visible))

    mixed, whole = [], (last - first) // QUERY_BLOCK
    if whole == 1:
        mixed = [block(first, QUERY_BLOCK).reshape(batch, QUERY_BLOCK, heads * size)]
    elif whole:  # sequential blocks share one compilation
        starts = first + QUERY_BLOCK * jnp.arange(whole, dtype=jnp.int32)
        blocks = lax.map(lambda start: block(start, QUERY_BLOCK), starts)
        mixed = [jnp.moveaxis(blocks, 0, 1).reshape(batch, -1, heads * size)]
    if rest := (last - first) % QUERY_BLOCK:
        mixed.append(block(last - rest, rest).reshape(batch, rest, heads * size))
    return jnp.concatenate(mixed, 1)


def joined_keys(
    keys: Float[Array, "N J"], values: Float[Array, "N J"], remembered: Remembered
) -> tuple[Float[Array, "Q J"], Float[Array, "Q J"]]:
    """Concatenate keys and values of packed segments: remembered ones by segment, then new ones."""

    def join(past: Array, new: Array) -> Array:
        kept = with_dtype(past[remembered.rows], new.dtype)
        return jnp.concatenate([kept.reshape(-1, past.shape[2]), new])

    return join(remembered.keys, keys), join(remembered.values, values)


def _attend_packed(
    q: Float[Array, "1 N H D"],
    keys: Float[Array, "Q J"],
    values: Float[Array, "Q J"],
    max_age: Int[Array, "1 N"],
    past: int,
    lengths: Int[Array, " S"],
    starts: Int[Array, " S"],
    blocks: PackedBlocks,
) -> Float[Array, "1 N H*D"]:
    key = jnp.arange(-past, blocks.queries.shape[1], dtype=jnp.int32)[None]
    # A block may end past its segment: there the last key is repeated, which is too young to see.
    position = jnp.minimum(blocks.start[:, None] + key, lengths[blocks.segment][:, None] - 1)
    index = slot_of(blocks.segment[:, None], position, starts, past)
    visible = _visible(jnp.minimum(max_age[0, blocks.queries], past), key[0])
    mixed = attend(QueryBlock(q[0, blocks.queries], keys[index], values[index], visible))
    return mixed.reshape(blocks.queries.size, -1)[blocks.place][None]


def attend(block: QueryBlock) -> Float[Array, "M t H D"]:
    """Compute attention for a block of queries."""
    # jax.nn.dot_product_attention computes its softmax in float32 even for a float64 model.
    # Keys come first: the other order is half as fast on a CPU for a few queries.
    batch, length, heads, size = block.q.shape
    if (joined := block.k.shape[2]) > size:  # several key heads, each with its query heads

        def of_head(q: Array, k: Array, v: Array) -> Array:
            return attend(QueryBlock(q, k, v, block.visible))

        q, k, v = (
            x.reshape(batch, x.shape[1], joined // size, *inner)
            for x, inner in ((block.q, (-1, size)), (block.k, (size,)), (block.v, (size,)))
        )
        return jax.vmap(of_head, 2, 2)(q, k, v).reshape(block.q.shape)
    q = block.q.reshape(batch, length * heads, size)
    wider = accumulation_dtype(q.dtype)
    scores = jnp.einsum("bsd,bqd->bsq", block.k, q, preferred_element_type=wider) * size**-0.5
    visible = jnp.repeat(block.visible.transpose(0, 2, 1), heads, axis=2)
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=1).astype(q.dtype)
    return jnp.einsum("bsq,bsd->bqd", weights, block.v).reshape(block.q.shape)


def with_dtype(x: Array, dtype: Any) -> Array:
    """Reinterpret bits between uint16 and a 16-bit dtype; return other arrays unchanged."""
    kept = jnp.uint16 in (x.dtype, dtype) and x.dtype != dtype
    return lax.bitcast_convert_type(x, dtype) if kept else x


def _visible(max_age: Int[Array, "M t"], key: Int[Array, " s"]) -> Bool[Array, "M t s"]:
    """Return the keys of a block that each query sees; ``key`` is the offset in tokens of each key
    from the first query, negative before it."""
    query = jnp.arange(max_age.shape[1], dtype=jnp.int32)
    age = (query[:, None] - key[None])[None]  # in tokens, negative for later keys
    return (age >= 0) & (age <= max_age[:, :, None])


def query_blocks(
    lengths: Int[Array, " S"],
    starts: Int[Array, " S"],
    segment: Int[Array, " N"],
    offset: Int[Array, " N"],
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
    first, of_block, number = locate(counts, blocks)
    start = number * size
    within = jnp.arange(size, dtype=jnp.int32)[None]
    queries = jnp.minimum((starts[of_block] + start)[:, None] + within, tokens - 1)
    place = jnp.minimum(first[segment] * size + offset, blocks * size - 1)
    return PackedBlocks(queries, of_block, start, place)


def locate(counts: Int[Array, " S"], places: int) -> tuple[Array, Array, Array]:
    """Assign places to ``counts[s]`` items of each s, one s after the other.

    Returns:
        [S], place of each first item; [places], the s of each place; [places], number of items of
        the same s before it.
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
    """Return the slot of a segment's token among packed keys; negative offsets are remembered."""
    remembered = segment * past + past + offset
    new = len(starts) * past + starts[segment] + offset
    return jnp.where(offset < 0, remembered, new)
