"""Local attention in JAX on a TPU: JAX's splash attention, which keeps no scores in HBM and skips
blocks of keys that no query sees."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Float, Int

from griffin_eval.kernels import devices
from griffin_eval.kernels.attention import reference
from griffin_eval.kernels.attention.plain_jax import joined_keys
from griffin_eval.kernels.attention.reference import Remembered
from griffin_eval.kernels.registry import Trial

LANES = 128
# Block sizes for queries and keys, by bytes of a number.
BLOCKS = {2: (512, 256, LANES), 4: (256, LANES)}
VOID = jnp.iinfo(jnp.int32).max  # document id of padding, and of keys that no query sees


def unsupported(
    q: Float[Array | jax.ShapeDtypeStruct, "B T H D"], keys: Any = None, values: Any = None
) -> str | None:
    """Return the reason why this kernel cannot read these queries, or None."""
    _, length, _, size = q.shape
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"splash attention takes float32 and bfloat16, not {q.dtype}"
    if size % LANES:
        return f"splash attention takes heads of whole {LANES} dimensions, not {size}"
    if length < LANES:
        return f"splash attention takes {LANES} queries of a row or more, not {length}"
    return None


def trial(q: Float[Array | jax.ShapeDtypeStruct, "B T H D"], keys: Any) -> Trial:
    """Return a small problem of this dtype, with two key heads if there are several here."""
    of = q.dtype, keys.shape[-1] > q.shape[3]
    return Trial(of, lambda: _error(*of))


def _error(dtype: Any, grouped: bool) -> float:
    """Return the largest difference from the reference in a small problem."""
    rng = np.random.default_rng(0)
    length, past = 2 * LANES, 90
    joined = 1, past + length, 2 * LANES if grouped else LANES
    q, keys, values = (
        rng.standard_normal(shape, np.float32) for shape in ((1, length, 2, LANES), joined, joined)
    )
    max_age = np.concatenate([np.arange(60, 200), np.arange(length - 140)])[None].astype(np.int32)
    right = reference.local_attention(q, keys, values, max_age, past=past, lengths=[length])
    arrays = [v.astype(dtype) for v in (q, keys, values)]
    y = devices.untraced(lambda: jax.jit(attend_rows)(*arrays, max_age))
    return float(abs(np.asarray(y, np.float32).reshape(right.shape) - right).max())


def local_attention(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "B Q J"] | Float[Array, "N J"],
    values: Float[Array, "B Q J"] | Float[Array, "N J"],
    max_age: Int[Array, "B T"],
    *,
    remembered: Remembered | None = None,
    **layout: Any,
) -> Float[Array, "B T H*D"]:
    """See `griffin_eval.kernels.attention.api.local_attention`; a packed segment is one row."""
    if remembered is not None:
        keys, values = (x[None] for x in joined_keys(keys, values, remembered))
    return attend_rows(q, keys, values, max_age).reshape(*q.shape[:2], -1)


def attend_rows(
    q: Float[Array, "B T H D"],
    keys: Float[Array, "B Q J"],
    values: Float[Array, "B Q J"],
    max_age: Int[Array, "B T"],
    *,
    interpret: bool = False,
) -> Float[Array, "B T H D"]:
    """Compute causal attention over remembered keys and those of the queries' own tokens.

    Differentiable in q, keys and values. The softmax is in float32, the result in the dtype of q.

    Args:
        keys, values: P entries of earlier tokens, then those of the T tokens, Q = P + T.
        max_age: Number of earlier tokens that each query sees, at most P. It grows by one from each
            token to the next, except at the start of a document.
        interpret: Whether to run the slow interpreter, on any device.
    """
    batch, length, heads, size = q.shape
    past = keys.shape[1] - length
    sizes = BLOCKS[q.dtype.itemsize]
    block_q, queries = _blocks(length, sizes)
    block_kv, joined = _blocks(past + queries, sizes)

    # Tokens of a document share the position of its first token as the id of the document.
    place = jnp.arange(length, dtype=jnp.int32)[None]
    document = place - max_age
    remembered = jnp.arange(-past, 0, dtype=jnp.int32)[None] >= document[:, :1]
    before = jnp.where(remembered, document[:, :1], VOID)
    segments = splash.SegmentIds(
        _pad(document, queries, VOID),
        _pad(jnp.concatenate([before, document], 1), joined, VOID),
    )
    grouped = keys.shape[2] > size  # several key heads
    kernel = _kernel(queries, joined, past, heads, grouped, block_q, block_kv, interpret)

    def by_head(x: Array) -> Array:
        return x.reshape(*x.shape[:2], -1, size).transpose(0, 2, 1, 3) if grouped else x

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        mixed = jax.vmap(kernel)(
            _pad(q * jnp.asarray(size**-0.5, q.dtype), queries).transpose(0, 2, 1, 3),
            by_head(_pad(keys, joined)),
            by_head(_pad(values, joined)),
            segments,
        )
    return mixed.transpose(0, 2, 1, 3)[:, :length]


@functools.cache
def _kernel(
    queries: int,
    keys: int,
    past: int,
    heads: int,
    grouped: bool,
    block_q: int,
    block_kv: int,
    interpret: bool,
) -> Any:
    mask = splash.LocalMask((queries, keys), window_size=(past, 0), offset=past)
    sizes = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    every = splash.MultiHeadMask([mask] * heads)
    make = splash.make_splash_mqa_single_device
    if grouped:
        make = splash.make_splash_mha_single_device
    return devices.untraced(lambda: make(every, block_sizes=sizes, interpret=interpret))


def _blocks(length: int, sizes: tuple[int, ...]) -> tuple[int, int]:
    """Return the largest block that needs no more padding than the smallest, and the padded
    length."""
    padded = math.ceil(length / LANES) * LANES
    return next(block for block in sizes if padded % block == 0), padded


def _pad(x: Array, length: int, value: int = 0) -> Array:
    """Pad the second axis to a length."""
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, length - x.shape[1])
    return jnp.pad(x, widths, constant_values=value)
