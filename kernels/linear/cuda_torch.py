"""Linear maps in PyTorch on a CUDA device: products in float32, and matrices in 4 or 8 bits."""

import functools
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from griffin_eval.errors import ArgumentError, MissingExtraError
from griffin_eval.kernels.devices import multiprocessors
from griffin_eval.kernels.linear.packed_torch import BLOCK, ROWS, Blocks, PackedMatrix, takes
from griffin_eval.kernels.linear.shapes import check_widths

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PROGRAMS = 8  # of a multiprocessor that a product should have
_FEWEST_GROUPS = 4  # of 64 inputs, that a program should have
# Of each packing, what its elements are, and their bits.
KINDS = {
    "nf4": ("code", 4),
    "fp4": ("code", 4),
    "affine-4": ("affine", 4),
    "affine-8": ("affine", 8),
    "int8": ("int8", 8),
}


def wide_product(x: Float[Tensor, "*B I"], weight: Float[Tensor, "O I"]) -> Float[Tensor, "*B O"]:
    """x W^T of 16 bits, added up and returned in float32; not differentiable."""
    y = torch.mm(x.reshape(-1, x.shape[-1]), weight.T, out_dtype=torch.float32)
    return y.view(*x.shape[:-1], len(weight))


class DevicePackedMatrix(PackedMatrix):
    """A packed matrix on a CUDA device. Products of a few rows read its elements as they lie; for
    more it is dequantised, and then let go of.

    Args:
        blocks: the elements and what belongs to them, on the device.
        dtype: to compute in: float32, or the one that values are rounded to.

    Raises:
        ArgumentError: no such kernel, or no CUDA device; says which.
        MissingExtraError: triton is not installed.
    """

    def __init__(self, blocks: Blocks, dtype: torch.dtype):
        if (reason := unsupported(blocks, dtype)) is not None:
            raise ArgumentError(reason)
        bits = KINDS[blocks.packing][1]
        outputs, stored = blocks.elements.shape
        self.shape, self.dtype = torch.Size((outputs, stored * 8 // bits)), dtype
        self.device, self._blocks = blocks.elements.device, blocks.run_in(dtype)

    def dense(self, start: int = 0, stop: int | None = None) -> Float[Tensor, "R I"]:
        return self._unpacked(self._blocks.rows(slice(start, stop)))

    def chosen(self, rows: Int[Tensor, "*N"]) -> Float[Tensor, "*N I"]:
        found = self._unpacked(self._blocks.rows(rows.flatten()))
        return found.view(*rows.shape, self.shape[1])

    def logits(self, hidden: Float[Tensor, "*N I"]) -> Float[Tensor, "*N O"]:
        if hidden.dtype != self.dtype or not hidden.is_cuda or self.dtype == torch.float32:
            return super().logits(hidden)
        found = self._product(hidden, None, "none", None, torch.float32, torch.float32)
        if found is not None:
            return found
        parts = (self.dense(at, at + ROWS) for at in range(0, len(self), ROWS))
        return torch.cat([wide_product(hidden, part) for part in parts], -1)

    def _product(
        self,
        x: Tensor,
        bias: Tensor | None,
        then: str,
        other: Tensor | None,
        out_dtype: torch.dtype,
        other_way: torch.dtype,
    ) -> Tensor | None:
        check_widths(x, self)
        outputs, inputs = self.shape
        rows, kernels = x.numel() // inputs, _kernels()
        fits = x.dtype == self.dtype and 0 < rows <= kernels.ROWS.value
        if not fits or not takes(x, outputs, bias, other, self.device):
            return None
        x, y = x.contiguous(), torch.empty(*x.shape[:-1], outputs, dtype=out_dtype, device=x.device)
        after = {
            "bias": None if bias is None else bias.contiguous(),
            "other": None if other is None else other.contiguous(),
            "THEN": then,
        }
        nothing = {"bias": None, "other": None, "THEN": "none"}
        parts, products = self._parts(), y
        if parts > 1:
            products = torch.empty(parts, rows, outputs, dtype=torch.float32, device=x.device)
        with torch.cuda.device_of(x):
            kernels.multiply[lambda config: (-(-outputs // config["BLOCK"]), parts)](
                x,
                **self._matrix(self._blocks),
                **(after if parts == 1 else nothing),
                y=products,
                rows=rows,
                outputs=outputs,
                inputs=inputs,
                enable_fp_fusion=False,
            )
            if parts > 1:
                kernels.finish[-(-outputs // 256), rows](
                    products, **after, y=y, parts=parts, outputs=outputs, BLOCK=256
                )
        return y

    def _parts(self) -> int:
        """Into how many parts the inputs of a product are cut, so that programs fill the device."""
        outputs, inputs = self.shape
        wanted = -(-_PROGRAMS * multiprocessors(self.device) // -(-outputs // 16))
        return max(1, min(wanted, inputs // (64 * _FEWEST_GROUPS)))

    def _unpacked(self, blocks: Blocks) -> Tensor:
        outputs, inputs = len(blocks.elements), self.shape[1]
        y = torch.empty(outputs, inputs, dtype=self.dtype, device=blocks.elements.device)
        grid = (-(-outputs // 4), -(-inputs // (8 * BLOCK)))
        if outputs:
            with torch.cuda.device_of(y):
                _kernels().unpack[grid](
                    **self._matrix(blocks),
                    y=y,
                    outputs=outputs,
                    inputs=inputs,
                    BLOCK=4,
                    GROUPS=8,
                    enable_fp_fusion=False,
                )
        return y

    def _matrix(self, blocks: Blocks) -> dict[str, Any]:
        """The kernels' arguments that are of the matrix."""
        kind, bits = KINDS[blocks.packing]
        rounded = getattr(_kernels().tl, str(blocks.dtype).removeprefix("torch."))
        return {
            "elements": blocks.elements,
            "scales": blocks.scales,
            "shifts": blocks.shifts,
            "code": blocks.code,
            "KIND": kind,
            "BITS": bits,
            "ROUNDED": rounded,
        }


def unsupported(blocks: Blocks, dtype: torch.dtype) -> str | None:
    """Why a matrix in blocks cannot be computed with in a dtype, if it cannot.

    Raises:
        MissingExtraError: triton is not installed.
    """
    blocks, kernels = blocks.run_in(dtype), _kernels()
    device = blocks.elements.device
    if not (device.type == "cuda" or kernels.INTERPRETED):
        return f"the Triton kernels need a CUDA device, and the matrix is on {device}"
    if dtype not in (torch.float32, blocks.dtype) or blocks.dtype not in DTYPES:
        return (
            f"the Triton kernels compute with values of {blocks.dtype} in that dtype or in "
            f"torch.float32, not in {dtype}"
        )
    return None


@functools.cache
def _kernels() -> ModuleType:
    if find_spec("triton") is None:
        raise MissingExtraError("triton", "torch")
    from griffin_eval.kernels.linear import triton_kernels

    return triton_kernels
