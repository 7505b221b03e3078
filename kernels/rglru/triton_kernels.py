"""The Triton kernels of `triton_torch`. Importing this module needs triton.

A program computes one segment, one chunk of its time and BLOCK columns. It goes through time in
groups of STEPS rows: the loads of a group are issued together, so that many rows are in flight, and
then the recurrence is a plain loop, in float32 in registers. With one warp and BLOCK a multiple of
32, threads never communicate.

Time is one chunk if segments and columns alone make enough programs. Otherwise there are three
phases: every chunk is reduced to its effect on a state (a product and an end), `scan_chunks`
combines these, and every chunk is read again from its initial state.

Arrays are flat, [N, D] for all tokens, states [S * chunks, D]. Layouts, resets and padding are as
in `triton_torch`. Only Triton's own operations are used, none of its Python library, which an
interpreted kernel could not call if triton itself is compiled.
"""

from typing import Any, no_type_check

import triton
import triton.language as tl
from triton import knobs

# The derivative of sqrt is at most 1000 = 1 / sqrt(MIN_FOUR_Y), like in the models.
MIN_FOUR_Y = tl.constexpr(1e-6)

# (STEPS, BLOCK, warps, stages). Interpreted kernels use the first. With more than one stage Triton
# prefetches later groups to shared memory; more than four steps would then take minutes to compile.
FEW_STEPS = [
    triton.Config({"STEPS": steps, "BLOCK": block, "STAGES": stages}, num_warps=warps)
    for steps, block, warps, stages in [(8, 64, 1, 1), (4, 64, 1, 4), (8, 32, 1, 1)]
]
# With gates this takes 20 s to compile, and the backward pass has too few registers for it.
MANY_STEPS = [triton.Config({"STEPS": 32, "BLOCK": 32, "STAGES": 1}, num_warps=1)]
INTERPRETED = knobs.runtime.interpret
if INTERPRETED:
    FEW_STEPS, MANY_STEPS = FEW_STEPS[:1], []  # without a device there is nothing to tune
TUNED_FOR = ["width", "bucket"]
UNSPECIALIZED = ["tokens", "rows", "chunk", "bucket"]


def forward_configs(a: object) -> list[triton.Config]:
    """Return the configurations of the forward pass with a given decay, or with gates (None)."""
    return FEW_STEPS if a is None else FEW_STEPS + MANY_STEPS


def _forward_configs(
    configs: list[triton.Config], positional: dict[str, Any], **named: Any
) -> list[triton.Config]:
    """Adapt `forward_configs` to Triton's signature: positional and named launch arguments."""
    return forward_configs((positional | named)["a"])


@triton.jit
@no_type_check
def _place(rows, chunk, starts, lengths):
    """Return this program's segment, row of its states, first token, and range in the segment."""
    segment = tl.program_id(0)
    part = tl.program_id(2)
    if starts is None:
        start = segment.to(tl.int64) * rows
    else:
        start = tl.load(starts + segment).to(tl.int64)
    if lengths is None:
        length = rows
    else:
        length = tl.load(lengths + segment).to(tl.int32)
    first = tl.minimum(part * chunk, length)
    stop = tl.minimum(first + chunk, length)
    state = segment.to(tl.int64) * tl.num_programs(2) + part
    return segment, state, start, first, stop


@triton.jit
@no_type_check
def _load_rows(pointer, stride, left, other, STEPS: tl.constexpr):
    """Return STEPS rows as a tuple of float32 vectors, with ``other`` past the ``left`` last rows.

    ``left`` is a vector, 0 in columns past the width.
    """
    rows = ()
    for k in tl.static_range(STEPS):
        row = tl.load(pointer + k * stride, mask=k < left, other=other)
        rows += (row.to(tl.float32),)
    return rows


@triton.jit
@no_type_check
def _load_flags(resets, token, stride, left, STEPS: tl.constexpr):
    """Return whether each of STEPS tokens starts a document, as a tuple of scalars."""
    flags = ()
    for k in tl.static_range(STEPS):
        if resets is None:
            flags += (False,)
        else:
            flags += (tl.load(resets + token + k * stride, mask=k < left, other=0) != 0,)
    return flags


@triton.jit
@no_type_check
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
@no_type_check
def _one_minus_exp(y):
    """Return 1 - e^y for y <= 0 to float32's precision; a Taylor series avoids cancellation near 0.

    The first term left out is y^8 / 9!, relative to (1 - e^y) / |y| >= 0.78: below 2e-8 for
    |y| <= 1/2.
    """
    series = 1.0 / 40320
    series = series * y + 1.0 / 5040
    series = series * y + 1.0 / 720
    series = series * y + 1.0 / 120
    series = series * y + 1.0 / 24
    series = series * y + 1.0 / 6
    series = series * y + 1.0 / 2
    series = series * y + 1.0
    return tl.where(y > -0.5, -y * series, 1.0 - tl.exp(y))


@triton.jit
@no_type_check
def _gate_columns(d, tokens, GATE: tl.constexpr):
    """Return the offset of r_t's products of columns d in [G, N, 2 GATE]; i_t's are GATE later."""
    block = d // GATE
    return block.to(tl.int64) * tokens * (2 * GATE) + (d - block * GATE)


@triton.jit
@no_type_check
def _decay(pre, slope):
    """Return r_t, log a_t and a_t (equations 1 and 3) from the product before the sigmoid."""
    r_t = _sigmoid(pre)
    log_a = -slope * r_t
    return r_t, log_a, tl.exp(log_a)


@triton.autotune(
    FEW_STEPS + MANY_STEPS,
    key=TUNED_FOR,
    prune_configs_by={"early_config_prune": _forward_configs},
)
@triton.jit(do_not_specialize=UNSPECIALIZED)
@no_type_check
def forward(
    a,  # [N, D], or None to compute a and the input from:
    x,  # [N, D]
    gates,  # [G, N, 2 GATE], float32, without biases
    slope,  # [D], 8 softplus(Λ)
    recurrent_bias,  # [D]
    input_bias,  # [D]
    h0,  # [S * chunks, D] or None
    resets,  # [N] bytes or None
    starts,  # [S] or None: rows
    lengths,  # [S] or None: all
    h,  # [N, D] or None: only reduce the chunk
    last,  # [S * chunks, D] or None
    product,  # [S * chunks, D] or None, product of a
    tokens,  # N
    rows,  # tokens of a row
    width,  # D
    chunk,  # tokens of a chunk
    bucket,  # further key of the tuning
    GATE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute h_t = a_t h_{t-1} + x_t (equation 4), or the RG-LRU after its two products."""
    segment, at_state, start, first, stop = _place(rows, chunk, starts, lengths)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    state = tl.full((BLOCK,), 0.0, tl.float32)
    decayed = tl.full((BLOCK,), 1.0, tl.float32)
    if h0 is not None:
        state = tl.load(h0 + at_state * width + d, mask=inside, other=0.0)
    if a is None:
        gate_d = _gate_columns(d, tokens, GATE)
        slope_d = tl.load(slope + d, mask=inside, other=0.0)
        recurrent_bias_d = tl.load(recurrent_bias + d, mask=inside, other=0.0)
        input_bias_d = tl.load(input_bias + d, mask=inside, other=0.0)

    for t in tl.range(first, stop, STEPS, num_stages=STAGES):
        left = tl.where(inside, stop - t, 0)
        token = start + t
        at = token * width + d
        xs = _load_rows(x + at, width, left, 0.0, STEPS)
        forget = _load_flags(resets, token, 1, stop - t, STEPS)
        if a is None:
            at_gate = gates + gate_d + token * (2 * GATE)
            rs = _load_rows(at_gate, 2 * GATE, left, 0.0, STEPS)
            is_ = _load_rows(at_gate + GATE, 2 * GATE, left, 0.0, STEPS)
        else:
            as_ = _load_rows(a + at, width, left, 1.0, STEPS)
        for k in tl.static_range(STEPS):
            if a is None:
                r_t, log_a, a_t = _decay(rs[k] + recurrent_bias_d, slope_d)
                multiplier = tl.sqrt(_one_minus_exp(2.0 * log_a))
                if resets is not None:
                    multiplier = tl.where(forget[k], 1.0, multiplier)
                x_t = multiplier * _sigmoid(is_[k] + input_bias_d) * xs[k]
            else:
                a_t = as_[k]
                x_t = xs[k]
            if resets is not None:
                a_t = tl.where(forget[k], 0.0, a_t)
            here = k < left
            state = tl.where(here, a_t * state + x_t, state)
            if h is not None:
                tl.store(h + at + k * width, state, mask=here)
            if product is not None:
                decayed = tl.where(here, decayed * a_t, decayed)

    if last is not None:
        tl.store(last + at_state * width + d, state, mask=inside)
    if product is not None:
        tl.store(product + at_state * width + d, decayed, mask=inside)


@triton.autotune(FEW_STEPS, key=TUNED_FOR)
@triton.jit(do_not_specialize=UNSPECIALIZED)
@no_type_check
def backward(
    a,  # [N, D], or None to compute a from the next six
    x,  # [N, D], or None with a
    gates,  # [G, N, 2 GATE], float32, without biases
    slope,  # [D]
    recurrent_bias,  # [D]
    input_bias,  # [D]
    h,  # [N, D]
    h0,  # [S, D]
    dh,  # [N, D]
    after,  # [S * chunks, D], the gradient of the state that a chunk ends with
    resets,
    starts,
    lengths,
    da,  # [N, D], or None with a
    dx,  # [N, D], or None: only reduce the chunk
    dgates,  # [G, N, 2 GATE]
    dslope,  # [S * chunks, D], partial sum of each program
    drecurrent_bias,  # likewise
    dinput_bias,  # likewise
    before,  # [S * chunks, D], the gradient of the state that a chunk starts with
    product,  # [S * chunks, D] or None, product of a
    tokens,
    rows,
    width,
    chunk,
    bucket,
    GATE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Go from the last token to the first, with u the gradient of the state between two tokens:
    g_t = dh_t + u is the gradient of h_t, and a_t g_t the next u."""
    segment, at_state, start, first, stop = _place(rows, chunk, starts, lengths)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    u = tl.full((BLOCK,), 0.0, tl.float32)
    decayed = tl.full((BLOCK,), 1.0, tl.float32)
    if after is not None:
        u = tl.load(after + at_state * width + d, mask=inside, other=0.0)
    if h0 is not None:
        h0_d = tl.load(h0 + segment.to(tl.int64) * width + d, mask=inside, other=0.0)
    if a is None:
        gate_d = _gate_columns(d, tokens, GATE)
        slope_d = tl.load(slope + d, mask=inside, other=0.0)
        recurrent_bias_d = tl.load(recurrent_bias + d, mask=inside, other=0.0)
        input_bias_d = tl.load(input_bias + d, mask=inside, other=0.0)
        dslope_d = tl.full((BLOCK,), 0.0, tl.float32)
        drecurrent_bias_d = tl.full((BLOCK,), 0.0, tl.float32)
        dinput_bias_d = tl.full((BLOCK,), 0.0, tl.float32)

    for done in tl.range(0, stop - first, STEPS, num_stages=STAGES):
        t = stop - 1 - done  # token of the group's first row; the others precede it
        left = tl.where(inside, t - first + 1, 0)
        token = start + t
        at = token * width + d
        dhs = _load_rows(dh + at, -width, left, 0.0, STEPS)
        forget = _load_flags(resets, token, -1, t - first + 1, STEPS)
        if a is None:
            at_gate = gate_d + token * (2 * GATE)
            rs = _load_rows(gates + at_gate, -2 * GATE, left, 0.0, STEPS)
        else:
            as_ = _load_rows(a + at, -width, left, 1.0, STEPS)
        if dx is not None:
            # The state before the segment's first token is not in h.
            known = tl.minimum(left, t)
            hs = _load_rows(h + at - width, -width, known, 0.0, STEPS)
            if a is None:
                is_ = _load_rows(gates + at_gate + GATE, -2 * GATE, left, 0.0, STEPS)
                xs = _load_rows(x + at, -width, left, 0.0, STEPS)
        for k in tl.static_range(STEPS):
            here = k < left
            if a is None:
                r_t, log_a, a_t = _decay(rs[k] + recurrent_bias_d, slope_d)
            else:
                a_t = as_[k]
            if resets is not None:
                a_t = tl.where(forget[k], 0.0, a_t)
            g_t = tl.where(here, dhs[k] + u, 0.0)
            u = tl.where(here, a_t * g_t, u)
            if product is not None:
                decayed = tl.where(here, decayed * a_t, decayed)
            if dx is not None:
                h_before = hs[k]
                if h0 is not None:
                    h_before = tl.where(t == k, h0_d, h_before)
                if a is not None:
                    da_t = g_t * h_before
                    if resets is not None:
                        da_t = tl.where(forget[k], 0.0, da_t)
                    tl.store(da + at - k * width, da_t, mask=here)
                    tl.store(dx + at - k * width, g_t, mask=here)
                else:
                    x_t = xs[k]
                    i_t = _sigmoid(is_[k] + input_bias_d)
                    y = _one_minus_exp(2.0 * log_a)
                    multiplier = tl.sqrt(y)
                    if resets is not None:
                        multiplier = tl.where(forget[k], 1.0, multiplier)
                    dy = g_t * i_t * x_t / tl.sqrt(tl.maximum(4.0 * y, MIN_FOUR_Y))
                    dlog_a = a_t * (g_t * h_before - 2.0 * a_t * dy)  # a_t is 0 at resets
                    dr = -slope_d * dlog_a * r_t * (1.0 - r_t)
                    di = g_t * multiplier * x_t * i_t * (1.0 - i_t)
                    tl.store(dx + at - k * width, g_t * multiplier * i_t, mask=here)
                    tl.store(dgates + at_gate - k * 2 * GATE, dr, mask=here)
                    tl.store(dgates + at_gate + GATE - k * 2 * GATE, di, mask=here)
                    dslope_d -= dlog_a * r_t
                    drecurrent_bias_d += dr
                    dinput_bias_d += di

    at = at_state * width + d
    tl.store(before + at, u, mask=inside)
    if product is not None:
        tl.store(product + at, decayed, mask=inside)
    if dgates is not None:
        tl.store(dslope + at, dslope_d, mask=inside)
        tl.store(drecurrent_bias + at, drecurrent_bias_d, mask=inside)
        tl.store(dinput_bias + at, dinput_bias_d, mask=inside)


@triton.jit
@no_type_check
def scan_chunks(
    product,  # [S, chunks, D]
    end,  # [S, chunks, D], final state of a chunk that starts with zeros
    first,  # [S, D] or None, the state that the first chunk starts with
    states,  # [S, chunks, D], initial states of all chunks
    last,  # [S, D], the state that the last chunk ends with
    width,
    chunks,
    REVERSE: tl.constexpr,  # start with the last chunk
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Apply the recurrence over chunks."""
    segment = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < width
    state = tl.full((BLOCK,), 0.0, tl.float32)
    if first is not None:
        state = tl.load(first + segment * width + d, mask=inside, other=0.0)
    for c in tl.range(0, chunks, STEPS):
        left = tl.where(inside, chunks - c, 0)
        at = (segment * chunks + c) * width + d
        stride = width
        if REVERSE:
            at = (segment * chunks + chunks - 1 - c) * width + d
            stride = -width
        products = _load_rows(product + at, stride, left, 1.0, STEPS)
        ends = _load_rows(end + at, stride, left, 0.0, STEPS)
        for k in tl.static_range(STEPS):
            tl.store(states + at + k * stride, state, mask=k < left)
            state = products[k] * state + ends[k]
    tl.store(last + segment * width + d, state, mask=inside)
