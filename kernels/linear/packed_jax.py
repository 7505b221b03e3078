"""Matrices whose elements stay in a few bits, in JAX.

They are arguments of a compiled program as they were stored, and each is dequantised inside it,
for its own product alone. On a CPU products of a few rows read them as they lie, by the compiled
kernel.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct, lax
from jaxtyping import Float

from griffin_eval.kernels import devices
from griffin_eval.kernels.cpu import compiled

# Rows of which the compiled kernel's product is the faster one.
MOST_ROWS = {"float32": 32, "bfloat16": 8}
MOST_ROWS_IN_BFLOAT16 = 32  # the same, where the processor multiplies bfloat16
MOST_ROWS_OF_LARGE = 24  # of matrices of more rows than `ROWS`
BLOCK = 64  # elements that have a scale in common, for the compiled kernel
ROWS = 16_384  # of a matrix that are dequantised at a time
# In the order of linear/packed.c.
_PACKINGS = (("nf4", 4), ("affine", 4), ("affine", 8), ("fp4", 4), ("int8", 8))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("elements", "scales", "shifts", "code"),
    meta_fields=("kind", "bits", "rounded_to", "dtype"),
)
@dataclasses.dataclass(frozen=True)
class PackedMatrix:
    """A matrix [O, I] that is dequantised where it is needed.

    Attributes:
        kind, bits, elements, scales, shifts, code: as of
            `griffin_eval.converters.codecs.quantised.PackedRows`.
        rounded_to: the dtype that its values are rounded to, float32, bfloat16 or float16.
        dtype: to compute in, in which values are given.
    """

    kind: str
    bits: int
    elements: Any  # arrays, and whatever else JAX puts in their places
    scales: Any
    shifts: Any
    code: Any
    rounded_to: jnp.dtype
    dtype: jnp.dtype

    @property
    def shape(self) -> tuple[int, int]:
        rows, stored = self.elements.shape
        return rows, stored * 8 // self.bits

    def __getitem__(self, rows: Array | EllipsisType) -> "PackedMatrix | Float[Array, '*N I']":
        """Rows by number, dequantised; the matrix itself for ``...``, by which nnx reads."""
        return (
            self
            if isinstance(rows, EllipsisType)
            else self._each(lambda array: array[rows]).dense()
        )

    def dense(self, after: Array | None = None) -> Float[Array, "*N I"]:
        """All rows, dequantised.

        Args:
            after: an array that has to be there before, so that XLA does not dequantise all the
                matrices of a model at once. (On a CPU it drops `lax.optimization_barrier`.)
        """
        if self.elements.ndim == 2 and _unsupported(self) is None:
            out = ShapeDtypeStruct(self.shape, self.dtype)
            before = () if after is None else (lax.stop_gradient(after),)
            return jax.ffi.ffi_call("griffin_unpack", out)(*_arguments(self), *before)
        elements = self.elements
        if after is not None:  # never true, but XLA has to compute it
            elements = elements ^ (after.ravel()[0] > jnp.inf).astype(elements.dtype)
        *rows, stored = elements.shape
        numbers = _numbers(elements, self.kind, self.bits).reshape(*rows, self.scales.shape[-1], -1)
        scales = self.scales.astype(jnp.float32)[..., None]
        if self.code is not None:
            values = self.code[numbers] * scales
        elif self.shifts is None:  # as bitsandbytes computes: 1 / 127
            values = numbers.astype(jnp.float32) * scales * jnp.float32(7.874015718698502e-3)
        else:
            values = _product(numbers.astype(jnp.float32), scales, self.rounded_to)
            values = values + self.shifts.astype(jnp.float32)[..., None]
        values = _nearest(values, self.rounded_to).astype(self.dtype)
        return values.reshape(*rows, stored * 8 // self.bits)

    def products(
        self, x: Float[Array, "*N I"], product: Callable[[Array, Array], Array]
    ) -> Float[Array, "*N O"]:
        """x W^T, of which no more than `ROWS` rows of W are dequantised at a time.

        Args:
            x: inputs.
            product: the same of x and dequantised rows.
        """
        outputs = self.shape[0]
        if outputs <= ROWS:
            return product(x, self.dense(x))

        size = math.ceil(outputs / math.ceil(outputs / ROWS))

        def part(index: Array, y: Array) -> Array:
            start = jnp.minimum(index * size, outputs - size)  # the last ones may repeat a few
            rows = self._each(lambda array: lax.dynamic_slice_in_dim(array, start, size))
            return lax.dynamic_update_slice_in_dim(y, product(x, rows.dense(x)), start, -1)

        found = jax.eval_shape(product, x, ShapeDtypeStruct((size, x.shape[-1]), self.dtype))
        y = jnp.zeros((*x.shape[:-1], outputs), found.dtype)
        return lax.fori_loop(0, math.ceil(outputs / size), part, y)

    def _each(self, of: Callable[[Array], Array]) -> "PackedMatrix":
        """The matrix that a function makes of rows of arrays."""
        shifts = None if self.shifts is None else of(self.shifts)
        return dataclasses.replace(
            self, elements=of(self.elements), scales=of(self.scales), shifts=shifts
        )


def unsupported(x: Array, weight: PackedMatrix) -> str | None:
    """The reason for which the compiled kernel cannot multiply these, or None."""
    most = MOST_ROWS.get(weight.dtype.name, 0)
    if weight.dtype == jnp.bfloat16 and compiled.multiplies_bfloat16():
        most = MOST_ROWS_IN_BFLOAT16
    if weight.shape[0] > ROWS:
        most = max(most, MOST_ROWS_OF_LARGE)
    if x.dtype != weight.dtype or not 0 < math.prod(x.shape[:-1]) <= most:
        return "the compiled kernel is for a few rows"
    return _unsupported(weight)


def _unsupported(weight: PackedMatrix) -> str | None:
    if devices.platform(weight.elements) != "cpu":
        return "the compiled kernel runs on a CPU"
    if (weight.kind, weight.bits) not in _PACKINGS or weight.rounded_to == jnp.float16:
        return f"the compiled kernel has no {weight.kind} in {weight.bits} bits"
    if weight.shape[1] % BLOCK:
        return f"the compiled kernel has rows of whole blocks of {BLOCK} elements"
    if weight.kind != "int8" and weight.scales.shape[-1] * BLOCK != weight.shape[1]:
        return f"the compiled kernel has a scale for every {BLOCK} elements"
    if weight.dtype not in (jnp.float32, _rounded_to(weight)):
        return f"the compiled kernel has values of {weight.rounded_to}, not {weight.dtype}"
    return _missing()


@functools.cache
def _missing() -> str | None:
    return compiled.missing_in_jax(_works)


def _works() -> bool:
    """Whether a row of 64 times 3 · 2 + 1 has that sum."""
    elements, scales = jnp.full((1, BLOCK), 3, jnp.uint8), jnp.full((1, 1), 2, jnp.float32)
    out = ShapeDtypeStruct((1, 1), jnp.float32)
    x = jnp.ones((1, BLOCK), jnp.float32)
    call = jax.ffi.ffi_call("griffin_packed", out)
    return float(call(x, elements, scales, scales / 2)[0, 0]) == 7.0 * BLOCK


@jax.custom_jvp
def product(x: Float[Array, "*N I"], weight: PackedMatrix) -> Float[Array, "*N O"]:
    """x W^T in float32, differentiable in x alone; see `unsupported`."""
    outputs, inputs = weight.shape
    rows = x.reshape(-1, inputs)
    out = ShapeDtypeStruct((len(rows), outputs), jnp.float32)
    y = jax.ffi.ffi_call("griffin_packed", out)(rows, *_arguments(weight))
    return y.reshape(*x.shape[:-1], outputs)


@product.defjvp
def _derivative(primals, tangents):
    (x, weight), (dx, _) = primals, tangents
    change = jnp.einsum("...i,oi->...o", dx, weight.dense(), preferred_element_type=jnp.float32)
    return product(x, weight), change


def _rounded_to(weight: PackedMatrix) -> jnp.dtype:
    """The dtype that the compiled kernel rounds values to: once, where no shift is added later."""
    once = weight.kind != "affine" and weight.rounded_to == jnp.float32
    return weight.dtype if once and weight.dtype == jnp.bfloat16 else weight.rounded_to


def _arguments(weight: PackedMatrix) -> tuple[Array, Array, Array]:
    shifts = weight.shifts
    if shifts is None:  # the kernel is told the packing by their number
        shifts = jnp.zeros(_PACKINGS.index((weight.kind, weight.bits)), _rounded_to(weight))
    return weight.elements, weight.scales, shifts


def _numbers(elements: Array, kind: str, bits: int) -> Array:
    """The numbers of rows: [*N, I] of [*N, I * bits / 8]."""
    if bits == 8:
        return elements
    if bits == 4:
        lower, upper = elements & 15, elements >> 4
        first, second = (lower, upper) if kind == "affine" else (upper, lower)
        return jnp.stack([first, second], -1).reshape(*elements.shape[:-1], -1)
    # 8 numbers take as many bytes as each of them has bits.
    words = elements.reshape(*elements.shape[:-1], -1, bits).astype(jnp.uint16)
    words = jnp.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, 1)])
    places = [divmod(i * bits, 8) for i in range(8)]
    numbers = [(words[..., at] | words[..., at + 1] << 8) >> shift for at, shift in places]
    numbers = jnp.stack(numbers, -1) & ((1 << bits) - 1)
    return numbers.reshape(*elements.shape[:-1], -1)


def _product(numbers: Array, scales: Array, dtype: jnp.dtype) -> Array:
    """Numbers of 8 bits times scales, rounded to a dtype before anything is added.

    XLA may round a float32 product only after an addition. A scale in two parts of 12 bits has two
    exact products, so that their sum is the one thing that is rounded.
    """
    if dtype != jnp.float32:
        return _nearest(numbers * scales, dtype)
    bits = lax.bitcast_convert_type(scales, jnp.uint32) & jnp.uint32(0xFFFFF000)
    upper = lax.bitcast_convert_type(bits, jnp.float32)
    return numbers * upper + numbers * (scales - upper)


def _nearest(values: Array, dtype: jnp.dtype) -> Array:
    """float32 rounded to a dtype, also where XLA would leave conversions there and back out."""
    if dtype == jnp.float32:
        return values
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(values, 8, 7)
    # Below 2^-14 float16 has multiples of 2^-24.
    small = lax.round(values * 2.0**24, lax.RoundingMethod.TO_NEAREST_EVEN) * 2.0**-24
    return jnp.where(jnp.abs(values) < 2.0**-14, small, lax.reduce_precision(values, 5, 10))
