"""Matrices that stay quantised in memory; JAX dequantises each within the compiled program, for its
own product."""

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

ROWS = 16_384  # rows of a matrix that are dequantised at a time
ONE_127TH = 7.874015718698502e-3  # bitsandbytes' factor of int8 and its scale


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("elements", "scales", "shifts", "table"),
    meta_fields=("bits", "rounded_to", "dtype"),
)
@dataclasses.dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix [O, I] whose rows are groups of elements with a common scale.

    Attributes:
        bits, elements, scales, shifts, table: Fields of
            `griffin_eval.converters.quantised.PackedRows`.
        rounded_to: Dtype to which the checkpoint's dequantised values are rounded.
        dtype: Dtype to compute in.
    """

    bits: int
    elements: Any  # an array, or a placeholder that JAX substitutes
    scales: Any
    shifts: Any
    table: Any
    rounded_to: jnp.dtype
    dtype: jnp.dtype

    @property
    def shape(self) -> tuple[int, int]:
        rows, stored = self.elements.shape
        return rows, stored * 8 // self.bits

    def __getitem__(self, rows: Array | EllipsisType) -> "QuantisedMatrix | Float[Array, '*N I']":
        """Dequantise rows by number; return the matrix itself for ``...``, with which nnx reads."""
        return self if isinstance(rows, EllipsisType) else self._rows(lambda a: a[rows]).dense()

    def products(
        self, x: Float[Array, "*N I"], product: Callable[[Array, Array], Array]
    ) -> Float[Array, "*N O"]:
        """Compute x W^T with ``product``, dequantising at most `ROWS` rows of W at a time."""
        outputs = self.shape[0]
        if outputs <= ROWS:
            return product(x, self.dense(x))

        size = math.ceil(outputs / math.ceil(outputs / ROWS))

        def part(index: Array, y: Array) -> Array:
            start = jnp.minimum(index * size, outputs - size)  # the last parts may overlap
            rows = self._rows(lambda array: lax.dynamic_slice_in_dim(array, start, size))
            return lax.dynamic_update_slice_in_dim(y, product(x, rows.dense(x)), start, -1)

        like = jax.eval_shape(product, x, ShapeDtypeStruct((size, x.shape[-1]), self.dtype))
        y = jnp.zeros((*x.shape[:-1], outputs), like.dtype)
        return lax.fori_loop(0, math.ceil(outputs / size), part, y)

    def dense(self, after: Array | None = None) -> Float[Array, "*N I"]:
        """Dequantise all rows.

        Args:
            after: Array to be computed first, so that XLA does not dequantise all matrices of a
                model at once. (On a CPU it drops `lax.optimization_barrier`.)
        """
        elements = self.elements
        if after is not None:  # always zero, but XLA must compute it
            elements = elements ^ (after.ravel()[0] > jnp.inf).astype(elements.dtype)
        *rows, stored = elements.shape
        numbers = self._numbers(elements).reshape(*self.scales.shape, -1)
        values = numbers * self.scales.astype(jnp.float32)[..., None]
        if self.shifts is not None:
            shifts = self.shifts.astype(jnp.float32)[..., None]
            values = _rounded(values, self.rounded_to) + shifts
        elif self.table is None:
            values = values * jnp.float32(ONE_127TH)
        values = _rounded(values, self.rounded_to).astype(self.dtype)
        return values.reshape(*rows, stored * 8 // self.bits)

    def _numbers(self, elements: Array) -> Array:
        """Return the values of stored numbers, in float32 and in the order of the elements."""
        if self.table is not None:
            return self.table[elements]
        if self.bits == 8:
            return elements.astype(jnp.float32)
        # Eight numbers of b bits take b bytes.
        words = jnp.pad(elements.reshape(-1, self.bits).astype(jnp.uint16), ((0, 0), (0, 1)))
        places = [divmod(i * self.bits, 8) for i in range(8)]
        numbers = [(words[:, at] | words[:, at + 1] << 8) >> shift for at, shift in places]
        return (jnp.stack(numbers, -1) & (1 << self.bits) - 1).astype(jnp.float32)

    def _rows(self, select: Callable[[Array], Array]) -> "QuantisedMatrix":
        """Select rows, which stay quantised, by a function of each array."""
        shifts = None if self.shifts is None else select(self.shifts)
        return dataclasses.replace(
            self, elements=select(self.elements), scales=select(self.scales), shifts=shifts
        )


def _rounded(values: Array, dtype: jnp.dtype) -> Array:
    """Round float32 to a dtype, in a form that XLA does not optimise away."""
    if dtype == jnp.float32:
        return values
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(values, 8, 7)
    # Below 2^-14 float16 holds multiples of 2^-24.
    small = lax.round(values * 2.0**24, lax.RoundingMethod.TO_NEAREST_EVEN) * 2.0**-24
    return jnp.where(jnp.abs(values) < 2.0**-14, small, lax.reduce_precision(values, 5, 10))
