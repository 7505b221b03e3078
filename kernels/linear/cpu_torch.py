"""A linear map in PyTorch, on the CPU in one pass together with what follows it."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

_FEW_ROWS = 16  # of fewer, MKL's products of vectors are faster


def linear(
    x: Float[Tensor, "*B I"],
    weight: Float[Tensor, "O I"],
    bias: Float[Tensor, " O"] | None = None,
    then: Literal["none", "gelu", "mul"] = "none",
    other: Float[Tensor, "*B O"] | None = None,
) -> Float[Tensor, "*B O"]:
    """y = x W^T + b, and then GeLU (by tanh) of it, or its product with another tensor.

    Where nothing needs a gradient, float32 on the CPU goes through oneDNN, which does what follows
    while a tile of the result is in the cache. PyTorch's own F.linear calls MKL, writes the bias
    before and reads the result after; on processors of other makers than MKL's it is also half as
    fast. The operation is the one that PyTorch's compiler generates; where a version of PyTorch
    lacks it, or ``torch.backends.mkldnn`` is switched off, F.linear does its work.

    Args:
        x: inputs, any floating dtype.
        weight: of the same dtype, outputs first.
        bias: added to every row.
        then: what follows.
        other: the other factor, given with ``mul`` only.

    Returns:
        A new tensor of the same dtype, the same to rounding either way. Differentiable.

    Raises:
        ValueError: ``other`` is missing, or given for nothing.
    """
    if (other is not None) != (then == "mul"):
        raise ValueError(f"linear: other goes with 'mul', found then={then!r}")
    if _fits_onednn(x, weight):
        ops = torch.ops.mkldnn
        if other is not None:
            return ops._linear_pointwise.binary(x, other, weight, bias, then)
        return ops._linear_pointwise(x, weight, bias, then, [], "tanh" if then == "gelu" else "")
    y = F.linear(x, weight, bias)
    if other is None:
        return F.gelu(y, approximate="tanh") if then == "gelu" else y
    return y * other


def _fits_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() >= _FEW_ROWS * x.shape[-1] > 0
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
