"""Matrices that stay in 4 or 8 bits, in Triton. Importing this needs triton.

A program of `multiply` has BLOCK outputs and walks through a part of the inputs, GROUPS of 64 at a
time, of which each has a scale. Elements go from memory to registers as they were stored, are
dequantised there, rounded as the dequantised matrix would be, and multiplied by the matrix units.
In 4 bits a byte has two neighbours of a row, so that the even columns are one product and the odd
ones another. Where the inputs are in several parts, for outputs alone would be too few programs,
`finish` adds them up.

Only Triton's own operations are used, none of its library in Python, which an interpreted kernel
could not call where triton itself is compiled.
"""

from typing import no_type_check

import triton
import triton.language as tl
from triton import knobs

ROWS = tl.constexpr(16)  # of x in a product, at most: as many as the matrix units take at least
# (BLOCK, GROUPS, warps, stages). The first is also what interpreted kernels use.
CONFIGS = [
    triton.Config({"BLOCK": block, "GROUPS": groups}, num_warps=warps, num_stages=stages)
    for block, groups, warps, stages in [(16, 2, 2, 3), (16, 4, 2, 3), (32, 2, 4, 3), (32, 4, 4, 3)]
]
INTERPRETED = tl.constexpr(knobs.runtime.interpret)
if INTERPRETED:
    CONFIGS = CONFIGS[:1]  # no device to time others on


@triton.jit
@no_type_check
def _table(code):
    """What numbers of 4 bits stand for, as a tuple of scalars; an empty one without a code."""
    table = ()
    if code is not None:
        for number in tl.static_range(16):
            table += (tl.load(code + number),)
    return table


@triton.jit
@no_type_check
def _found(numbers, table):
    """The entries of a table of 16, chosen bit by bit. Loads of entries Triton would turn into
    copies to shared memory, one for each number, which take many times as long."""
    for bit in tl.static_range(4):
        is_set = (numbers & (1 << bit)) != 0
        chosen = ()
        for pair in tl.static_range(8 >> bit):
            chosen += (tl.where(is_set, table[2 * pair + 1], table[2 * pair]),)
        table = chosen
    return table[0]


@triton.jit
@no_type_check
def _values(numbers, scales, shifts, table, KIND: tl.constexpr, ROUNDED: tl.constexpr):
    """What numbers stand for, with a scale and a shift for each; see `packed_torch.Blocks`."""
    if KIND == "code":
        values = _found(numbers, table) * scales
    elif KIND == "int8":  # as bitsandbytes computes: 1 / 127
        values = numbers.to(tl.int8, bitcast=True).to(tl.float32) * scales * 7.874015718698502e-3
    else:
        values = (numbers.to(tl.float32) * scales).to(ROUNDED).to(tl.float32) + shifts
    return values.to(ROUNDED)


@triton.jit
@no_type_check
def _group_values(
    elements,
    scales,
    shifts,
    table,  # of the code
    o,  # rows of the matrix, [BLOCK]
    groups,  # of a row
    group,  # which, [GROUPS]
    stop,  # group that is not among them any more
    outputs,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """Values of some groups, [BLOCK, GROUPS, 64], or in 4 bits those of even and odd columns."""
    BYTES: tl.constexpr = 8 * BITS  # of a group
    o, group = o[:, None, None], group[None, :, None]
    known = (o < outputs) & (group < stop)
    at = o.to(tl.int64) * groups + group
    places = at * BYTES + tl.arange(0, BYTES)[None, None, :]
    stored = tl.load(elements + places, mask=known, other=0)
    if KIND == "int8":
        scale = tl.load(scales + o, mask=o < outputs, other=0.0).to(tl.float32)
    else:
        scale = tl.load(scales + at, mask=known, other=0.0).to(tl.float32)
    shift = 0.0
    if KIND == "affine":
        shift = tl.load(shifts + at, mask=known, other=0.0).to(tl.float32)
    if BITS == 8:
        values = _values(stored, scale, shift, table, KIND, ROUNDED)
        return values, values
    lower, upper = stored & 15, stored >> 4
    if KIND == "affine":
        even, odd = lower, upper
    else:
        even, odd = upper, lower
    even = _values(even, scale, shift, table, KIND, ROUNDED)
    return even, _values(odd, scale, shift, table, KIND, ROUNDED)


@triton.jit
@no_type_check
def _plus_product(
    product, values, x, rows, inputs, first, step, m, BLOCK: tl.constexpr, COUNT: tl.constexpr
):
    """``product`` plus that of values, [BLOCK, COUNT] in all, and as many columns of x: every
    ``step``-th from ``first`` on. Values of columns that there are none of are finite."""
    j = first + step * tl.arange(0, COUNT)
    inside = (j < inputs)[:, None] & (m < rows)[None, :]
    columns = tl.load(x + m[None, :] * inputs + j[:, None], mask=inside, other=0.0)
    values = values.reshape(BLOCK, COUNT).to(columns.dtype)
    if INTERPRETED:  # the interpreter multiplies bfloat16 as if its bits were integers
        values, columns = values.to(tl.float32), columns.to(tl.float32)
    return tl.dot(values, columns, product, input_precision="ieee")


@triton.jit
@no_type_check
def _followed(product, bias, other, o, at, inside, THEN: tl.constexpr):
    """A product plus the bias, and what follows."""
    if bias is not None:
        product += tl.load(bias + o, mask=inside, other=0.0).to(tl.float32)
    if THEN == "gelu_pytorch_tanh":
        inner = 0.7978845608028654 * (product + 0.044715 * product * product * product)
        decayed = tl.exp(-2.0 * tl.abs(inner))
        product = product * tl.where(inner < 0.0, decayed, 1.0) / (1.0 + decayed)  # (1 + tanh) / 2
    if THEN == "mul":
        product *= tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    return product


@triton.autotune(CONFIGS, key=["outputs", "inputs", "KIND", "BITS"])
@triton.jit(do_not_specialize=["rows"])
@no_type_check
def multiply(
    x,  # [M, I]
    elements,  # [O, I BITS / 8] bytes
    scales,  # [O, I / 64], of int8 [O]
    shifts,  # [O, I / 64] of affine, else None
    code,  # [16] of nf4 and fp4, else None
    bias,  # [O] or None
    other,  # [M, O] or None
    y,  # [M, O], or of several parts of the inputs [parts, M, O], with nothing after the products
    rows,  # M, at most ROWS
    outputs,
    inputs,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    ROUNDED: tl.constexpr,
    THEN: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """y = x W^T + bias, and what follows, added up in float32."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.program_id(1)
    m = tl.arange(0, ROWS)
    groups = inputs // 64
    together = GROUPS * tl.num_programs(1)
    most = (groups + together - 1) // together * GROUPS
    stop = tl.minimum((part + 1) * most, groups)
    product = tl.full((BLOCK, ROWS), 0.0, tl.float32)
    table = _table(code)
    for g in tl.range(part * most, stop, GROUPS):
        even, odd = _group_values(
            elements, scales, shifts, table, o, groups, g + tl.arange(0, GROUPS), stop, outputs,
            KIND, BITS, ROUNDED,
        )  # fmt: skip
        first = g * 64
        if BITS == 8:
            product = _plus_product(product, even, x, rows, inputs, first, 1, m, BLOCK, GROUPS * 64)
        else:
            product = _plus_product(product, even, x, rows, inputs, first, 2, m, BLOCK, GROUPS * 32)
            product = _plus_product(
                product, odd, x, rows, inputs, first + 1, 2, m, BLOCK, GROUPS * 32
            )

    inside = (o < outputs)[:, None] & (m < rows)[None, :]
    at = m.to(tl.int64)[None, :] * outputs + o[:, None]
    product = _followed(product, bias, other, o[:, None], at, inside, THEN)
    tl.store(y + part.to(tl.int64) * rows * outputs + at, product, mask=inside)


@triton.jit(do_not_specialize=["parts"])
@no_type_check
def finish(
    products,  # [parts, M, O], float32
    bias,
    other,
    y,  # [M, O]
    parts,
    outputs,
    THEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of the parts, and what follows."""
    m = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = o < outputs
    at = m * outputs + o
    product = tl.full((BLOCK,), 0.0, tl.float32)
    stride = tl.num_programs(1).to(tl.int64) * outputs
    for part in tl.range(parts):
        product += tl.load(products + part * stride + at, mask=inside, other=0.0)
    tl.store(y + at, _followed(product, bias, other, o, at, inside, THEN), mask=inside)


@triton.jit
@no_type_check
def unpack(
    elements,
    scales,
    shifts,
    code,
    y,  # [O, I]
    outputs,
    inputs,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The matrix, dequantised."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    groups = inputs // 64
    even, odd = _group_values(
        elements,
        scales,
        shifts,
        _table(code),
        o,
        groups,
        group,
        groups,
        outputs,
        KIND,
        BITS,
        ROUNDED,
    )
    values = even
    if BITS == 4:
        values = tl.join(even, odd).reshape(BLOCK, GROUPS, 64)
    at = (o.to(tl.int64)[:, None] * groups + group[None, :]) * 64
    at = at[:, :, None] + tl.arange(0, 64)[None, None, :]
    known = (o < outputs)[:, None, None] & (group < groups)[None, :, None]
    tl.store(y + at, values, mask=known)
