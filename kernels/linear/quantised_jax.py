"""Matrices that stay quantised in memory and are dequantised by operations of JAX where they are
used: inside a compiled program, each for its own product."""

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
ONE_127TH = 7.874015718698502e-3  # by which bitsandbytes multiplies int8 and its scale


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("elements", "scales", "shifts", "table"),
    meta_fields=("bits", "rounded_to", "dtype"),
)
@dataclasses.dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix [O, I] of which each row is groups of elements with a scale in common.

    Attributes:
        bits, elements, scales, shifts, table: Fields of
            `griffin_eval.converters.quantised.PackedRows`.
        rounded_to: Dtype that values are rounded to as the checkpoint is dequantised.
        dtype: Dtype to compute in.
    """

    bits: int
    elements: Any  # arrays, and whatever else JAX puts in their places
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
        """Dequantise rows by number; return the matrix itself for ``...``, by which nnx reads."""
        return self if isinstance(rows, EllipsisType) else self._rows(lambda a: a[rows]).dense()

    def products(
        self, x: Float[Array, "*N I"], product: Callable[[Array, Array], Array]
    ) -> Float[Array, "*N O"]:
        """Compute x W^T and dequantise at most `ROWS` rows of W at a time.

        Args:
            x: Inputs.
            product: Function that computes the same of x and dequantised rows.
        """
        outputs = self.shape[0]
        if outputs <= ROWS:
            return product(x, self.dense(x))

        size = math.ceil(outputs / math.ceil(outputs / ROWS))

        def part(index: Array, y: Array) -> Array:
            start = jnp.minimum(index * size, outputs - size)  # the last rows may overlap
            rows = self._rows(lambda array: lax.dynamic_slice_in_dim(array, start, size))
            return lax.dynamic_update_slice_in_dim(y, product(x, rows.dense(x)), start, -1)

        like = jax.eval_shape(product, x, ShapeDtypeStruct((size, x.shape[-1]), self.dtype))
        y = jnp.zeros((*x.shape[:-1], outputs), like.dtype)
        return lax.fori_loop(0, math.ceil(outputs / size), part, y)

    def dense(self, after: Array | None = None) -> Float[Array, "*N I"]:
        """Dequantise all rows.

        Args:
            after: An array that has to be computed before, so that XLA does not dequantise all
                matrices of a model at once. (On a CPU it drops `lax.optimization_barrier`.)
        """
        elements = self.elements
        if after is not None:  # never true, but XLA has to compute it
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
        """Return what stored numbers stand for, in float32 and in the order of the elements."""
        if self.table is not None:
            return self.table[elements]
        if self.bits == 8:
            return elements.astype(jnp.float32)
        # Eight numbers take as many bytes as each of them has bits.
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
    """Round float32 to a dtype, also where XLA would leave conversions there and back out."""
    if dtype == jnp.float32:
        return values
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(values, 8, 7)
    # Below 2^-14 float16 has multiples of 2^-24.
    small = lax.round(values * 2.0**24, lax.RoundingMethod.TO_NEAREST_EVEN) * 2.0**-24
    return jnp.where(jnp.abs(values) < 2.0**-14, small, lax.reduce_precision(values, 5, 10))
