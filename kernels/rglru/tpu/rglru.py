"""The RG-LRU as one Pallas kernel for TPUs: gates, their products and the scan, both directions.

Forward reads x and writes h; backward reads x, h and dh, recomputes the gates and writes dx. The
gradients of the parameters are summed in float32 in VMEM over batch and time. If the weights of a
group of gates are too large for VMEM, XLA computes the gates around the kernel of the scan.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Bool, Float, Int

from griffin_eval.kernels.rglru import plain_jax
from griffin_eval.kernels.rglru.reference import MAX_SQRT_GRADIENT, C, Gates
from griffin_eval.kernels.rglru.tpu import scan as scan_tpu
from griffin_eval.kernels.rglru.tpu.block import (
    LANES,
    SUBLANES,
    Blocks,
    Columns,
    Ref,
    Tile,
    check_dtypes,
    previous,
    round_up,
)

# (1 - e^-z) / z on [0, 0.5], to 2e-9 (at Chebyshev nodes), where 1 - a * a would lose digits.
_SERIES = (0.9999999988, -0.4999998207, 0.1666624492, -0.0416302434, 0.0081900028, -0.0011237151)
_BLOCK = 512 * 512  # elements of a block that fit in VMEM
_WIDEST = 1024  # largest number of channels of a group of gates


def rglru(
    x: Float[Array, "B T L"],
    gates: Gates,
    h0: Float[Array, "B L"],
    *,
    resets: Bool[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T L"], Float[Array, "B L"]]:
    """Compute the RG-LRU of section 2.4 (equations 1-4) on a TPU.

    Products of two bfloat16 arrays are exact and summed in float32; everything else is computed in
    float32. Arguments and results are those of `griffin_eval.kernels.rglru.api.rglru` for rows of
    float32 or bfloat16; with ``interpret`` (True or `pltpu.InterpretParams`) it runs on the CPU.

    Raises:
        NotImplementedError: The gates are complex, or a dtype is not supported.
    """
    check(x, gates)
    lengths = None if lengths is None else lengths.astype(jnp.int32)
    if _together(gates) > _WIDEST:
        return _around_scan(x, gates, h0, resets, lengths, interpret)
    return _rglru(x, gates, h0, resets, lengths, interpret)


def check(x: Array, gates: Gates) -> None:
    """Raise NotImplementedError if `rglru` would."""
    if gates.imaginary_param is not None:
        raise NotImplementedError("the TPU kernel has no complex gates (imaginary_param)")
    check_dtypes(x=x, **{name: p for name, p in gates._asdict().items() if p is not None})


def _around_scan(
    x: Array,
    gates: Gates,
    h0: Array,
    resets: Array | None,
    lengths: Array | None,
    interpret: Any,
) -> tuple[Array, Array]:
    read = jnp.ones((1, 1, 1), bool)
    if lengths is not None:  # padding may be NaN, which would spread
        time = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        read = (time < lengths[:, None])[:, :, None]
    scan = scan_tpu.rows(interpret)
    x = jnp.where(read, x, 0)
    h, last = plain_jax.rglru(x, gates, h0, resets=resets, lengths=lengths, scan=scan)
    return jnp.where(read, h, 0), last


def _together(gates: Gates) -> int:
    """Return the channels of the whole gates of one program: full registers, and up to 512."""
    number, size, _ = gates.input_weight.shape
    together = [
        k
        for k in range(1, number + 1)
        if number % k == 0 and (k * size % LANES == 0 or k == number)
    ]
    lanes = [k * size for k in together]
    return max((n for n in lanes if n <= 512), default=lanes[0])


def _blocks(x: Array, gates: Gates, interpret: Any, reverse: bool) -> Blocks:
    size = gates.input_weight.shape[1]
    widest = _together(gates)
    rows = _BLOCK // widest // LANES * LANES
    most = (256 if widest <= 512 else 128) if reverse else 512
    if size > 256 and x.dtype.itemsize > 2:  # leave room for large weights
        most //= 2
    rows = min(rows, most)
    return Blocks.of(
        x.shape, interpret=interpret, lanes=round_up(widest, LANES), max_rows=rows, reverse=reverse
    )


class _Specs:
    """Block specs of a program's parameters."""

    def __init__(self, blocks: Blocks, gates: Gates):
        number, size, _ = gates.input_weight.shape
        self.together = min(blocks.lanes // size, number)
        self.size = size
        weight = pl.BlockSpec((self.together, size, size), lambda i, b, t: (i, 0, 0))
        bias = pl.BlockSpec((number, size), lambda i, b, t: (0, 0))
        self.vector = pl.BlockSpec((1, blocks.lanes), lambda i, b, t: (0, i))
        self.gates = [self.vector, weight, bias, weight, bias]
        # The biases' gradients of one program share no block with those of another.
        rows = pl.BlockSpec((None, self.together, size), lambda i, b, t: (i, 0, 0))
        self.gradients = [self.vector, weight, rows, weight, rows]
        self.rows = (number // self.together, self.together, size)


def _parameters(gates: Gates) -> tuple[Array, ...]:
    return (gates.recurrent_param.reshape(1, -1), *gates[1:5])


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _rglru(x, gates, h0, resets, lengths, interpret) -> Any:
    blocks = _blocks(x, gates, interpret, reverse=False)
    words = blocks.pack(resets)
    specs = _Specs(blocks, gates)
    block = pltpu.VMEM((blocks.rows, blocks.lanes), jnp.float32)
    return blocks.call(
        functools.partial(_forward_kernel, blocks),
        in_specs=[
            blocks.lengths(lengths),
            blocks.words(words),
            blocks.sequence(),
            *specs.gates,
            blocks.states(),
        ],
        out_specs=[blocks.sequence(), blocks.states()],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct(h0.shape, jnp.float32),
        ],
        scratch_shapes=[
            *[Columns.scratch(blocks.rows, blocks.lanes)] * 2,
            blocks.state(),
            block,
            block,
        ],
        name="rglru",
    )(lengths, words, x, *_parameters(gates), h0)


def _forward_kernel(
    blocks: Blocks,
    lengths: Ref | None,
    words: Ref | None,
    x: Ref,
    param: Ref,
    input_weight: Ref,
    input_bias: Ref,
    recurrent_weight: Ref,
    recurrent_bias: Ref,
    h0: Ref,
    h: Ref,
    last: Ref,
    decay: Ref,
    value: Ref,
    state: Ref,
    input_gate: Ref,
    recurrent_gate: Ref,
) -> None:
    decay, value = Columns(decay, blocks.lanes), Columns(value, blocks.lanes)
    slope = _slope(param)
    _gate(x, input_weight, input_bias, input_gate)
    _gate(x, recurrent_weight, recurrent_bias, recurrent_gate)

    def prepare(tile: Tile, _: None) -> None:
        step = _step(tile, input_gate, recurrent_gate, slope)
        gated = step.multiplier * step.i * tile.read(x)
        decay.put(tile.k, tile.at_padding(1.0, tile.at_starts(0.0, step.a)))
        value.put(tile.k, tile.at_padding(0.0, gated))

    def finish(tile: Tile, _: None) -> None:
        h[tile.rows, :] = value.get(tile.k).astype(h.dtype)

    blocks.each_tile(prepare, blocks.count(lengths), words)
    with blocks.carry(state, h0, last):
        blocks.scan(decay, value, state)
    blocks.each_tile(finish)


def _slope(param: Ref) -> Array:
    """Return -8 softplus(Λ), [1, L], the factor from r_t to log a_t."""
    value = param[...].astype(jnp.float32)
    return -C * (jnp.maximum(value, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(value))))


def _gate(x: Ref, weight: Ref, bias: Ref, out: Ref) -> None:
    """Compute out = x W + b, block by block."""
    together, size, _ = weight.shape
    for k in range(together):
        at = pl.ds(k * size, size)
        biases = bias[...].astype(jnp.float32)
        # A single row cannot be loaded if two rows share registers.
        row = lax.broadcasted_iota(jnp.int32, biases.shape, 0)
        mine = row == pl.program_id(0) * together + k
        out[:, at] = _dot(x[:, at], weight[k], 1, 0) + jnp.where(mine, biases, 0.0).sum(
            0, keepdims=True
        )


def _dot(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Contract an axis of each array, in float32; two bfloat16 arrays take one pass."""
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    exact = lax.Precision.DEFAULT if a.dtype == jnp.bfloat16 else lax.Precision.HIGHEST
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, axes, precision=exact, preferred_element_type=jnp.float32)


class _Step(NamedTuple):
    """Gates, a_t, 1 - a_t² and its root (1 at starts of documents) of a tile, each [16, L]."""

    i: Array
    r: Array
    a: Array
    square: Array
    multiplier: Array


def _step(tile: Tile, input_gate: Ref, recurrent_gate: Ref, slope: Array) -> _Step:
    i_t = jax.nn.sigmoid(input_gate[tile.rows, :])
    r_t = jax.nn.sigmoid(recurrent_gate[tile.rows, :])
    log_a = slope * r_t
    a_t = jnp.exp(log_a)
    square = _one_minus_square(log_a, a_t)
    return _Step(i_t, r_t, a_t, square, tile.at_starts(1.0, jnp.sqrt(square)))


def _one_minus_square(log_a: Array, a: Array) -> Array:
    """Return 1 - a², exact to rounding even for a close to 1: Mosaic has no expm1."""
    z = -2.0 * log_a
    series = jnp.full_like(z, _SERIES[-1])
    for coefficient in _SERIES[-2::-1]:
        series = series * z + coefficient
    return jnp.where(z < 0.5, series * z, 1.0 - a * a)


def _forward(x, gates, h0, resets, lengths, interpret):
    outputs: Any = _rglru(x, gates, h0, resets, lengths, interpret)
    h, last = outputs
    return (h, last), (x, gates, h, h0, resets, lengths)


def _backward(interpret, saved, cotangents):
    x, gates, h, h0, resets, lengths = saved
    dh, dlast = cotangents
    blocks = _blocks(x, gates, interpret, reverse=True)
    words = blocks.pack(resets)
    specs = _Specs(blocks, gates)
    block = pltpu.VMEM((blocks.rows, blocks.lanes), jnp.float32)
    narrow = pltpu.VMEM((blocks.rows, blocks.lanes), _product_dtype(x, gates))
    weight = pltpu.VMEM((specs.together, specs.size, specs.size), jnp.float32)
    vector = pltpu.VMEM((SUBLANES, blocks.lanes), jnp.float32)
    shapes = [x.shape, (1, blocks.width)]
    shapes += [gates.input_weight.shape, specs.rows, gates.input_weight.shape, specs.rows]
    dtypes = [x.dtype, *(p.dtype for p in gates[:5])]
    call: Any = blocks.call(
        functools.partial(_backward_kernel, blocks),
        in_specs=[
            blocks.lengths(lengths),
            blocks.words(words),
            blocks.sequence(),
            *specs.gates,
            blocks.sequence(),
            blocks.before(),
            blocks.sequence(),
            blocks.states(),
            blocks.states(),
        ],
        out_specs=[blocks.sequence(), *specs.gradients, blocks.states()],
        out_shape=[
            *(jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)),
            jax.ShapeDtypeStruct(h0.shape, jnp.float32),
        ],
        scratch_shapes=[
            *[Columns.scratch(blocks.rows, blocks.lanes)] * 2,
            blocks.state(),
            *[block] * 2,
            *[narrow] * 3,
            *[vector, weight, vector, weight, vector],
        ],
        name="rglru_backward",
    )
    dx, dparam, *dgates, dh0 = call(lengths, words, x, *_parameters(gates), h, h, dh, h0, dlast)
    shapes = [p.shape for p in gates[:5]]
    gradients = [g.reshape(s) for g, s in zip([dparam, *dgates], shapes, strict=True)]
    return dx, Gates(*gradients), dh0, None, None


_rglru.defvjp(_forward, _backward)


def _product_dtype(x: Array, gates: Gates) -> Any:
    """Return the product dtype of the backward pass: bfloat16 if x and both weights are, otherwise
    float32."""
    dtypes = {x.dtype, gates.input_weight.dtype, gates.recurrent_weight.dtype}
    return jnp.bfloat16 if dtypes == {jnp.dtype(jnp.bfloat16)} else jnp.float32


def _backward_kernel(
    blocks: Blocks,
    lengths: Ref | None,
    words: Ref | None,
    x: Ref,
    param: Ref,
    input_weight: Ref,
    input_bias: Ref,
    recurrent_weight: Ref,
    recurrent_bias: Ref,
    h: Ref,
    before: Ref,
    dh: Ref,
    h0: Ref,
    dlast: Ref,
    dx: Ref,
    dparam: Ref,
    dinput_weight: Ref,
    dinput_bias: Ref,
    drecurrent_weight: Ref,
    drecurrent_bias: Ref,
    dh0: Ref,
    decay: Ref,
    value: Ref,
    state: Ref,
    input_gate: Ref,
    recurrent_gate: Ref,
    x_read: Ref,
    dinput: Ref,
    drecurrent: Ref,
    *sums: Ref,
) -> None:
    decay, value = Columns(decay, blocks.lanes), Columns(value, blocks.lanes)
    count = blocks.count(lengths)
    slope = _slope(param)
    if count is not None:  # padding may be NaN, which would spread

        def read(tile: Tile, _: None) -> None:
            x_read[tile.rows, :] = tile.at_padding(0.0, tile.read(x)).astype(x_read.dtype)

        blocks.each_tile(read, count)
        x = x_read
    _gate(x, input_weight, input_bias, input_gate)
    _gate(x, recurrent_weight, recurrent_bias, recurrent_gate)

    def prepare(tile: Tile, _: None) -> None:
        a_t = jnp.exp(slope * jax.nn.sigmoid(recurrent_gate[tile.rows, :]))
        decay.put(tile.k, tile.at_padding(1.0, tile.at_starts(0.0, a_t)))
        value.put(tile.k, tile.at_padding(0.0, tile.read(dh)))

    def finish(tile: Tile, h_before: Array) -> Array:
        step = _step(tile, input_gate, recurrent_gate, slope)
        x_t, h_t = tile.read(x), tile.at_padding(0.0, tile.read(h))
        g = tile.at_padding(0.0, value.get(tile.k))
        # h_t = a_t h_{t-1} + m_t i_t x_t, m_t = sqrt(1 - a_t²), whose derivative is bounded
        da = tile.at_starts(0.0, g * previous(h_t, h_before))
        dm = tile.at_starts(0.0, g * step.i * x_t)
        bounded = lax.rsqrt(jnp.maximum(4.0 * step.square, MAX_SQRT_GRADIENT**-2))
        dlog_a = step.a * (da - 2.0 * step.a * dm * bounded)
        direct = g * step.multiplier
        di = direct * x_t * (step.i * (1.0 - step.i))
        dr = dlog_a * slope * (step.r * (1.0 - step.r))
        for total, part in zip(sums[::2], (dlog_a * step.r, di, dr), strict=True):
            total[...] += part[:SUBLANES] + part[SUBLANES:]
        value.put(tile.k, direct * step.i)
        dinput[tile.rows, :] = di.astype(dinput.dtype)
        drecurrent[tile.rows, :] = dr.astype(drecurrent.dtype)
        return h_t[-1:]

    def write(tile: Tile, _: None) -> None:
        through = input_gate[tile.rows, :] + recurrent_gate[tile.rows, :]
        dx[tile.rows, :] = (value.get(tile.k) + through).astype(dx.dtype)

    b, t = pl.program_id(1), pl.program_id(2)

    @pl.when((b == 0) & (t == 0))
    def _() -> None:
        for total in sums:
            total[...] = jnp.zeros_like(total)

    blocks.each_tile(prepare, count, words)
    with blocks.carry(state, dlast, dh0):
        blocks.scan(decay, value, state)
    blocks.each_tile(finish, count, words, blocks.state_before(before, h0))
    slope_sum, dw_input, db_input, dw_recurrent, db_recurrent = sums
    _gate_gradient(x, dinput, input_weight, dw_input, input_gate)
    _gate_gradient(x, drecurrent, recurrent_weight, dw_recurrent, recurrent_gate)
    blocks.each_tile(write)

    @pl.when((b == blocks.batch - 1) & (t == blocks.steps - 1))
    def _() -> None:
        dslope = slope_sum[...].sum(0, keepdims=True)
        derivative = -C * jax.nn.sigmoid(param[...].astype(jnp.float32))
        dparam[...] = (dslope * derivative).astype(dparam.dtype)
        dinput_weight[...] = dw_input[...].astype(dinput_weight.dtype)
        drecurrent_weight[...] = dw_recurrent[...].astype(drecurrent_weight.dtype)
        for total, out in ((db_input, dinput_bias), (db_recurrent, drecurrent_bias)):
            row = total[...].sum(0, keepdims=True)
            together, size = out.shape
            for k in range(together):
                out[k : k + 1, :] = row[:, k * size : (k + 1) * size].astype(out.dtype)


def _gate_gradient(x: Ref, dgate: Ref, weight: Ref, dweight: Ref, out: Ref) -> None:
    """Add to the gradient of a weight, and compute out = dgate W^T, block by block."""
    together, size, _ = weight.shape
    for k in range(together):
        at = pl.ds(k * size, size)
        dweight[k] += _dot(x[:, at], dgate[:, at], 0, 0)
        out[:, at] = _dot(dgate[:, at], weight[k], 1, 1)
