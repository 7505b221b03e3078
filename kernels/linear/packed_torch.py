"""Matrices whose elements stay in 4 or 8 bits, in PyTorch on a CPU.

Products of a few rows read them as they lie, by the compiled kernel. For more rows a matrix is
dequantised while its product is computed, and then let go of.
"""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from griffin_eval.kernels.cpu import compiled
from griffin_eval.kernels.linear.shapes import check_widths

BLOCK = 64  # elements that have a scale in common
PACKINGS = ("nf4", "affine-4", "affine-8", "fp4", "int8")  # in the order of linear/packed.c
# Rows of which a product by the compiled kernel is the faster one.
MOST_ROWS = {
    torch.float32: dict.fromkeys(PACKINGS, 64),
    torch.bfloat16: {"nf4": 12, "affine-4": 8, "affine-8": 8, "fp4": 12, "int8": 8},
}
MOST_ROWS_IN_BFLOAT16 = 48  # the same, where the processor multiplies bfloat16
ROUNDED_ONCE = ("nf4", "fp4", "int8")  # whose values are rounded where they are complete
_TYPES = {torch.float32: 0, torch.bfloat16: 1}  # of cpu/floats.h
THEN = {"none": 0, "gelu_pytorch_tanh": 1, "mul": 2}  # what linear/linear.h lets follow a product
ROWS = 16_384  # of a matrix that are dequantised at a time, where a whole one is too large


class Blocks(NamedTuple):
    """The elements of a matrix as bitsandbytes and MLX store them, those of 4 bits and affine ones
    in blocks of `BLOCK`.

    Attributes:
        packing: one of `PACKINGS`.
        elements: uint8 [O, I / 2], or [O, I] in 8 bits.
        scales: [O, I / 64], of int8 [O, 1]: of affine in the dtype of values, else in float32.
        shifts: the same of affine, None for the others.
        dtype: to which values are rounded, float32 or bfloat16; on a CUDA device float16, too.
        code: float32 [16], what the numbers of nf4 and fp4 stand for; the kernels for a CPU know.
    """

    packing: str
    elements: Tensor
    scales: Tensor
    shifts: Tensor | None
    dtype: torch.dtype
    code: Tensor | None = None

    def rows(self, chosen: slice | Tensor) -> "Blocks":
        """Some of the rows."""
        shifts = None if self.shifts is None else self.shifts[chosen]
        return self._replace(
            elements=self.elements[chosen], scales=self.scales[chosen], shifts=shifts
        )

    def run_in(self, dtype: torch.dtype) -> "Blocks":
        """The same, where values are needed in a dtype: rounded to it at once if they may be."""
        if self.packing in ROUNDED_ONCE and self.dtype == torch.float32:
            return self._replace(dtype=dtype)
        return self

    def to(self, device: torch.device) -> "Blocks":
        """The same on a device."""
        return self._replace(
            elements=self.elements.to(device),
            scales=self.scales.to(device),
            shifts=None if self.shifts is None else self.shifts.to(device),
            code=None if self.code is None else self.code.to(device),
        )

    @property
    def sizes(self) -> tuple[int, int]:
        """What the kernel is told of packing and values."""
        return PACKINGS.index(self.packing), _TYPES[self.dtype]

    @property
    def addresses(self) -> tuple[int, int, int | None]:
        shifts = None if self.shifts is None else self.shifts.data_ptr()
        return self.elements.data_ptr(), self.scales.data_ptr(), shifts


class PackedMatrix:
    """A matrix [O, I] that is dequantised where it is needed.

    Attributes:
        shape, dtype, device: as of a tensor; of what it is dequantised to.

    Args:
        shape: O and I.
        dtype: to compute in.
        read: gives rows from one to another, in any dtype; for what the kernel does not know.
        blocks: the elements, where it does.
    """

    requires_grad = False
    device = torch.device("cpu")

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        read: Callable[[int, int], Tensor],
        blocks: Blocks | None,
    ):
        self.shape, self.dtype = torch.Size(shape), dtype
        self._read = read
        exact = False
        if blocks is not None:
            blocks = blocks.run_in(dtype)
            exact = blocks.dtype in _TYPES and dtype in (torch.float32, blocks.dtype)
        self._blocks = blocks if exact and compiled.library() is not None else None

    def __len__(self) -> int:
        return self.shape[0]

    def dense(self, start: int = 0, stop: int | None = None) -> Float[Tensor, "R I"]:
        """Rows from one to another, dequantised."""
        start, stop, _ = slice(start, stop).indices(len(self))
        if self._blocks is None:
            return self._read(start, stop).to(self.dtype)
        return self._unpacked(self._blocks.rows(slice(start, stop)))

    def chosen(self, rows: Int[Tensor, "*N"]) -> Float[Tensor, "*N I"]:
        """Rows by number, dequantised."""
        numbers, where = torch.unique(rows, return_inverse=True)
        if self._blocks is None:
            found = torch.cat([self.dense(int(n), int(n) + 1) for n in numbers])
        else:
            found = self._unpacked(self._blocks.rows(numbers))
        return found[where]

    def linear(
        self,
        x: Float[Tensor, "*B I"],
        bias: Float[Tensor, " O"] | None,
        then: str,
        other: Float[Tensor, "*B O"] | None,
    ) -> Float[Tensor, "*B O"] | None:
        """A product and one of `THEN` of it, by the compiled kernel; None where it should not."""
        return self._product(x, bias, then, other, self.dtype, self.dtype)

    def logits(self, hidden: Float[Tensor, "*N I"]) -> Float[Tensor, "*N O"]:
        """x W^T in float32, or wider where x is."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        # The other way is a product in float32.
        found = self._product(hidden, None, "none", None, torch.float32, torch.float32)
        if found is not None and wide == torch.float32:
            return found
        parts = (self.dense(at, at + ROWS).to(wide) for at in range(0, len(self), ROWS))
        return torch.cat([F.linear(hidden.to(wide), part) for part in parts], -1)

    def _product(
        self,
        x: Tensor,
        bias: Tensor | None,
        then: str,
        other: Tensor | None,
        out_dtype: torch.dtype,
        other_way: torch.dtype,
    ) -> Tensor | None:
        """A product, or None where the kernel cannot compute it or another way is faster.

        Args:
            x, bias, then, other: as of `linear`.
            out_dtype: of the product.
            other_way: dtype of the product with a dequantised matrix.
        """
        check_widths(x, self)
        blocks, (outputs, inputs) = self._blocks, self.shape
        if blocks is None or x.dtype != self.dtype:
            return None
        most = MOST_ROWS[other_way][blocks.packing]
        if self.dtype == torch.bfloat16 and compiled.multiplies_bfloat16():
            most = max(most, MOST_ROWS_IN_BFLOAT16)
        if not 0 < x.numel() <= most * inputs:
            return None
        if not takes(x, outputs, bias, other) or torch.is_autocast_enabled("cpu"):
            return None
        library = compiled.library_for_torch()
        assert library is not None
        wide = x.float().contiguous()
        out = torch.empty(*x.shape[:-1], outputs, dtype=out_dtype)
        bias = None if bias is None else bias.contiguous()
        other = None if other is None else other.contiguous()
        types = _TYPES[self.dtype], _TYPES[out_dtype], THEN[then], torch.get_num_threads()
        rows = x.numel() // inputs
        library.griffin_packed(
            (ctypes.c_int64 * 9)(rows, inputs, outputs, *types, *blocks.sizes),
            wide.data_ptr(),
            *blocks.addresses,
            None if bias is None else bias.data_ptr(),
            None if other is None else other.data_ptr(),
            out.data_ptr(),
        )
        return out

    def _unpacked(self, blocks: Blocks) -> Tensor:
        library = compiled.library_for_torch()
        assert library is not None
        rows, inputs = len(blocks.elements), self.shape[1]
        out = torch.empty(rows, inputs, dtype=self.dtype)
        sizes = (rows, inputs, _TYPES[self.dtype], *blocks.sizes, torch.get_num_threads())
        library.griffin_unpack((ctypes.c_int64 * 6)(*sizes), *blocks.addresses, out.data_ptr())
        return out


def takes(
    x: Tensor,
    outputs: int,
    bias: Tensor | None,
    other: Tensor | None,
    device: torch.device = PackedMatrix.device,
) -> bool:
    """Whether x, and what is added to its product and multiplies it, lie where kernels for the
    device read them, are what these take them for, and need no gradient."""
    graded = torch.is_grad_enabled()
    if x.device != device or (graded and x.requires_grad):
        return False
    if bias is not None and not (
        bias.device == device
        and bias.dtype == x.dtype
        and bias.shape == (outputs,)
        and not (graded and bias.requires_grad)
    ):
        return False
    return other is None or (
        other.device == device
        and other.dtype == x.dtype
        and other.shape == (*x.shape[:-1], outputs)
        and not (graded and other.requires_grad)
    )
