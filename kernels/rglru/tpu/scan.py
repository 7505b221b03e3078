"""The linear recurrence as a Pallas kernel for TPUs, with its own backward pass.

Arrays keep the layout [B, T, D], without copies before or after the kernels: forward reads a and x
and writes h; backward reads a, h and dh and writes da and dx.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from griffin_eval.kernels.rglru.tpu.block import Blocks, Columns, Ref, Tile, check_dtypes, previous


def linear_scan(
    a: Float[Array, "B T D"],
    x: Float[Array, "B T D"],
    h0: Float[Array, "B D"],
    *,
    resets: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T D"], Float[Array, "B D"]]:
    """Compute h_t = a_t h_{t-1} + x_t (equation 4, with gated input) on a TPU.

    Arguments and results are those of `griffin_eval.kernels.rglru.api.linear_scan` for rows of
    float32 or bfloat16; with ``interpret`` (True or `pltpu.InterpretParams`) it runs on the CPU.

    Raises:
        NotImplementedError: A dtype is not supported.
    """
    check_dtypes(a=a, x=x)
    lengths = None if lengths is None else lengths.astype(jnp.int32)
    return _linear_scan(a, x, h0, resets, lengths, interpret)


def rows(interpret: Any) -> Callable[[Array, Array, Array], Array]:
    """Return the scan with the signature that `griffin_eval.kernels.rglru.plain_jax` expects."""
    return lambda a, x, h0: linear_scan(a, x, h0, interpret=interpret)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _linear_scan(a, x, h0, resets, lengths, interpret) -> Any:
    blocks = Blocks.of(x.shape, interpret=interpret)
    words = blocks.pack(resets)
    return blocks.call(
        functools.partial(_forward_kernel, blocks),
        in_specs=[
            blocks.lengths(lengths),
            blocks.words(words),
            blocks.sequence(),
            blocks.sequence(),
            blocks.states(),
        ],
        out_specs=[blocks.sequence(), blocks.states()],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(h0.shape, jnp.float32),
        ],
        scratch_shapes=[*[Columns.scratch(blocks.rows, blocks.lanes)] * 2, blocks.state()],
        name="linear_scan",
    )(lengths, words, a, x, h0)


def _forward_kernel(
    blocks: Blocks,
    lengths: Ref | None,
    words: Ref | None,
    a: Ref,
    x: Ref,
    h0: Ref,
    h: Ref,
    last: Ref,
    decay: Ref,
    value: Ref,
    state: Ref,
) -> None:
    decay, value = Columns(decay, blocks.lanes), Columns(value, blocks.lanes)

    def prepare(tile: Tile, _: None) -> None:
        decay.put(tile.k, tile.at_padding(1.0, tile.at_starts(0.0, tile.read(a))))
        value.put(tile.k, tile.at_padding(0.0, tile.read(x)))

    def finish(tile: Tile, _: None) -> None:
        h[tile.rows, :] = value.get(tile.k).astype(h.dtype)

    blocks.each_tile(prepare, blocks.count(lengths), words)
    with blocks.carry(state, h0, last):
        blocks.scan(decay, value, state)
    blocks.each_tile(finish)


def _forward(a, x, h0, resets, lengths, interpret):
    outputs: Any = _linear_scan(a, x, h0, resets, lengths, interpret)
    h, last = outputs
    return (h, last), (a, h, h0, resets, lengths)


def _backward(interpret, saved, cotangents):
    a, h, h0, resets, lengths = saved
    dh, dlast = cotangents
    blocks = Blocks.of(a.shape, interpret=interpret, reverse=True)
    words = blocks.pack(resets)
    da, dx, dh0 = blocks.call(
        functools.partial(_backward_kernel, blocks),
        in_specs=[
            blocks.lengths(lengths),
            blocks.words(words),
            blocks.sequence(),
            blocks.sequence(),
            blocks.before(),
            blocks.sequence(),
            blocks.states(),
            blocks.states(),
        ],
        out_specs=[blocks.sequence(), blocks.sequence(), blocks.states()],
        out_shape=[
            jax.ShapeDtypeStruct(a.shape, a.dtype),
            jax.ShapeDtypeStruct(h.shape, h.dtype),
            jax.ShapeDtypeStruct(h0.shape, jnp.float32),
        ],
        scratch_shapes=[*[Columns.scratch(blocks.rows, blocks.lanes)] * 2, blocks.state()],
        name="linear_scan_backward",
    )(lengths, words, a, h, h, dh, h0, dlast)
    return da, dx, dh0, None, None


_linear_scan.defvjp(_forward, _backward)


def _backward_kernel(
    blocks: Blocks,
    lengths: Ref | None,
    words: Ref | None,
    a: Ref,
    h: Ref,
    before: Ref,
    dh: Ref,
    h0: Ref,
    dlast: Ref,
    da: Ref,
    dx: Ref,
    dh0: Ref,
    decay: Ref,
    value: Ref,
    state: Ref,
) -> None:
    decay, value = Columns(decay, blocks.lanes), Columns(value, blocks.lanes)
    count = blocks.count(lengths)

    def prepare(tile: Tile, _: None) -> None:
        decay.put(tile.k, tile.at_padding(1.0, tile.at_starts(0.0, tile.read(a))))
        value.put(tile.k, tile.at_padding(0.0, tile.read(dh)))

    # The adjoint is the same recurrence backwards: g_t = dh_t + a_{t+1} g_{t+1}.
    def finish(tile: Tile, h_before: Array) -> Array:
        g = tile.at_padding(0.0, value.get(tile.k))
        h_t = tile.read(h)
        dx[tile.rows, :] = g.astype(dx.dtype)
        da[tile.rows, :] = tile.at_starts(0.0, g * previous(h_t, h_before)).astype(da.dtype)
        return h_t[-1:]

    blocks.each_tile(prepare, count, words)
    with blocks.carry(state, dlast, dh0):
        blocks.scan(decay, value, state)
    blocks.each_tile(finish, count, words, blocks.state_before(before, h0))
