"""Local attention in plain JAX, on any device and in any precision, a block of queries at a time,
so that scores of T x T are never in memory."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from griffin_eval.kernels.attention.reference import Remembered
from griffin_eval.kernels.rglru.plain_jax import accumulation_dtype

QUERY_BLOCK = 64  # queries of a row whose scores are in memory at a time
KEY_RANGES = 8  # at most that rows which start a document are compiled for


class QueryBlock(NamedTuple):
    """Neighbouring queries, all keys that any of them may see, and which of them each sees."""

    q: Float[Array, "M t H D"]
    k: Float[Array, "M s J"]
    v: Float[Array, "M s J"]
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
    """Attention of padded rows, whose Q keys are P remembered ones and T new ones.

    Where no row sees a remembered key, as in training, none is read, nor more of the new ones than
    a block's last query may see: about the causal pairs alone. Which it is, is known as it runs.
    """
    arrays, length = (q, keys, values, max_age), q.shape[1]
    if length == 1:
        return _attend_range(*arrays, past, 0, 1)
    alone = jnp.all(max_age <= jnp.arange(length, dtype=max_age.dtype)[None])
    everywhere = functools.partial(_attend_range, past=past, first=0, last=length)
    return lax.cond(alone, functools.partial(_attend_new, past=past), everywhere, *arrays)


def _attend_new(q: Array, keys: Array, values: Array, max_age: Array, past: int) -> Array:
    """The same where no query sees a remembered key."""
    arrays, length = (q, keys, values, max_age), q.shape[1]
    near = min(length, math.ceil(past / QUERY_BLOCK) * QUERY_BLOCK)  # that see a row's first key
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
    """What the queries from ``first`` to ``last`` get, block by block. A block reads P keys before
    its first query, or with ``only_new`` all new ones before ``last``."""
    batch, _, heads, size = q.shape
    if only_new:
        keys, values = keys[:, past : past + last], values[:, past : past + last]

    @functools.partial(jax.checkpoint, static_argnums=1)  # a gradient computes scores again
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
    elif whole:  # one after the other, and compiled once
        starts = first + QUERY_BLOCK * jnp.arange(whole, dtype=jnp.int32)
        blocks = lax.map(lambda start: block(start, QUERY_BLOCK), starts)
        mixed = [jnp.moveaxis(blocks, 0, 1).reshape(batch, -1, heads * size)]
    if rest := (last - first) % QUERY_BLOCK:
        mixed.append(block(last - rest, rest).reshape(batch, rest, heads * size))
    return jnp.concatenate(mixed, 1)


def joined_keys(
    keys: Float[Array, "N J"], values: Float[Array, "N J"], remembered: Remembered
) -> tuple[Float[Array, "Q J"], Float[Array, "Q J"]]:
    """Keys and values of packed segments: the remembered ones, segment by segment, then the new."""

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
    # A block may end behind its segment: there its last key is repeated, which is too young.
    position = jnp.minimum(blocks.start[:, None] + key, lengths[blocks.segment][:, None] - 1)
    index = slot_of(blocks.segment[:, None], position, starts, past)
    visible = _visible(jnp.minimum(max_age[0, blocks.queries], past), key[0])
    mixed = attend(QueryBlock(q[0, blocks.queries], keys[index], values[index], visible))
    return mixed.reshape(blocks.queries.size, -1)[blocks.place][None]


def attend(block: QueryBlock) -> Float[Array, "M t H D"]:
    """What the queries of a block get."""
    # jax.nn.dot_product_attention takes its softmax in float32 even where the model is float64.
    # Keys go first: on a CPU few queries are read half as fast the other way round.
    batch, length, heads, size = block.q.shape
    if (joined := block.k.shape[2]) > size:  # several heads of keys, each with its queries

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
    """The same bits as numbers of a dtype, if they are kept as uint16 or are to be; else x."""
    kept = jnp.uint16 in (x.dtype, dtype) and x.dtype != dtype
    return lax.bitcast_convert_type(x, dtype) if kept else x


def _visible(max_age: Int[Array, "M t"], key: Int[Array, " s"]) -> Bool[Array, "M t s"]:
    """Which keys of a block each of its queries sees; ``key`` is how many tokens after the first
    query each of them was read, and negative before it."""
    query = jnp.arange(max_age.shape[1], dtype=jnp.int32)
    age = (query[:, None] - key[None])[None]  # in tokens, negative if the key is read after
    return (age >= 0) & (age <= max_age[:, :, None])


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
