"""Linear maps in PyTorch, fused on the CPU with the operation that follows."""

import ctypes
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from griffin_eval.config import Activation
from griffin_eval.errors import ArgumentError
from griffin_eval.kernels.cpu import compiled
from griffin_eval.kernels.linear.quantised_torch import QuantisedMatrix
from griffin_eval.kernels.registry import check_widths
from griffin_eval.kernels.rglru.plain_torch import accumulation_dtype

# Rows up to which the compiled kernel is the fastest. For bfloat16, for which processors have
# instructions, it gains only while reading the weight takes most of the time.
MAX_ROWS = {torch.float32: 16, torch.bfloat16: 8, torch.float16: 32}
MAX_PRODUCT_ROWS = 64  # the same for wider results, for which PyTorch widens the weight
ROWS = 16_384  # rows of a weight that are dequantised, or widened to float32, at a time
TYPES = {getattr(torch, name): number for name, number in compiled.TYPES.items()}
THEN = {"none": 0, "gelu_pytorch_tanh": 1, "mul": 2}  # enum Then of linear/cpu.c
# oneDNN's names and algorithms of the activations.
_ONEDNN = {
    "none": ("none", ""),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "gelu": ("gelu", "none"),
    "silu": ("swish", ""),
}


class Map(NamedTuple):
    """A linear map: a matrix with outputs first, and an optional bias."""

    weight: Float[Tensor, "O I"] | QuantisedMatrix
    bias: Float[Tensor, " O"] | None


def linear(
    x: Float[Tensor, "*B I"],
    weight: Float[Tensor, "O I"] | QuantisedMatrix,
    bias: Float[Tensor, " O"] | None = None,
    then: Activation | Literal["none", "mul"] = "none",
    other: Float[Tensor, "*B O"] | None = None,
) -> Float[Tensor, "*B O"]:
    """Compute y = x W^T + b, then an activation of y, or its product with another tensor.

    Without gradients, few rows on the CPU (`MAX_ROWS`) use the compiled kernel, which reads the
    weight at the speed of memory. More rows in float32 use oneDNN, which applies the following
    operation while a tile of the result is in the cache. F.linear calls MKL instead, writes the
    bias before and reads the result again; on processors of other makers it is half as fast. The
    oneDNN operation is the one that PyTorch's compiler generates; F.linear replaces it if PyTorch
    lacks it or ``torch.backends.mkldnn`` is switched off. More rows in float16 are multiplied in
    float32, since few processors have float16 products.

    Args:
        x: Inputs of any floating dtype.
        weight: Matrix in the dtype of x, outputs first; a quantised one is dequantised.
        then: Operation that follows; activations have their names in transformers.
        other: Second factor, for ``mul`` only.

    Returns:
        A new tensor of the same dtype; implementations differ by rounding only. Differentiable.

    Raises:
        ArgumentError: ``other`` is missing or unexpected, or x and weight have different numbers of
            inputs.
    """
    if (other is not None) != (then == "mul"):
        raise ArgumentError(f"linear: other= needs then='mul', found then={then!r}")
    check_widths(x, weight)
    if isinstance(weight, QuantisedMatrix):
        weight = weight.dense()
    if _is_plain(x, weight, bias, other):
        bias = None if bias is None else bias.contiguous()  # oneDNN needs this too
        if unsupported(x, weight) is None:
            if then in THEN:
                return _compiled(x, weight, bias, then, other, weight.dtype)
            return _followed(_compiled(x, weight, bias, "none", None, weight.dtype), then, other)
        if x.dtype == torch.float16:
            b = None if bias is None else bias.float()
            y = linear(x.float(), weight.float(), b).half()
            return _followed(y, then, other)
        if x.dtype == torch.float32 and _has_onednn():
            ops = torch.ops.mkldnn
            if other is not None:
                return ops._linear_pointwise.binary(x, other, weight, bias, then)
            name, by = _ONEDNN[then]
            return ops._linear_pointwise(x, weight, bias, name, [], by)
    return _followed(F.linear(x, weight, bias), then, other)


def gated(x: Float[Tensor, "*B I"], gate: Map, up: Map, by: Activation) -> Float[Tensor, "*B O"]:
    """Compute an activation of one map of x times another map of x, each in one pass on a CPU."""
    return linear(x, *up, "mul", linear(x, *gate, by))


def product(
    x: Float[Tensor, "*B I"], weight: Float[Tensor, "O I"] | QuantisedMatrix
) -> Float[Tensor, "*B O"]:
    """Compute x W^T, accumulated and returned in float32 or wider.

    Raises:
        ArgumentError: The numbers of inputs of x and weight differ.
    """
    check_widths(x, weight)
    if isinstance(weight, QuantisedMatrix):
        parts = [weight.rows(slice(at, at + ROWS)) for at in range(0, len(weight), ROWS)]
        return torch.cat([product(x, part.dense()) for part in parts], -1)
    wider = accumulation_dtype(x.dtype)
    if x.dtype == wider:
        return linear(x, weight)
    if _is_plain(x, weight) and unsupported(x, weight, MAX_PRODUCT_ROWS) is None:
        return _compiled(x, weight, None, "none", None, torch.float32)
    graded = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if x.is_cuda and x.dtype == weight.dtype and not graded:
        y = torch.mm(x.reshape(-1, x.shape[-1]), weight.T, out_dtype=torch.float32)
        return y.view(*x.shape[:-1], len(weight))
    return torch.cat([F.linear(x.to(wider), part.to(wider)) for part in weight.split(ROWS)], -1)


def unsupported(x: Tensor, weight: Tensor, max_rows: int | None = None) -> str | None:
    """Return the reason why the compiled kernel should not multiply these, or None.

    ``max_rows`` is the largest number of rows for which it should, by default `MAX_ROWS`.
    """
    if weight.dtype not in MAX_ROWS or x.dtype != weight.dtype:
        return f"the compiled kernel has no products of {x.dtype} with {weight.dtype}"
    limit = MAX_ROWS[x.dtype] if max_rows is None else max_rows
    if not 0 < x.numel() <= limit * x.shape[-1]:
        return "the compiled kernel is for a few rows"
    if not weight.is_contiguous():
        return "the compiled kernel takes weights that lie as they were stored"
    return compiled.missing()


def _is_plain(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, other: Tensor | None = None
) -> bool:
    """Return whether matching CPU tensors without gradients, autocast or tracing are multiplied.
    PyTorch handles all other cases, including errors."""
    graded = torch.is_grad_enabled()

    def fits(tensor: Tensor | None, *shape: int) -> bool:
        return tensor is None or (
            tensor.is_cpu
            and tensor.dtype == x.dtype
            and tensor.shape == shape
            and not (graded and tensor.requires_grad)
        )

    return (
        fits(x, *x.shape)
        and fits(weight, *weight.shape)
        and fits(bias, len(weight))
        and fits(other, *x.shape[:-1], len(weight))
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def _has_onednn() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _followed(y: Tensor, then: str, other: Tensor | None) -> Tensor:
    if other is not None:
        return y * other
    if then == "silu":
        return F.silu(y)
    if then == "none":
        return y
    return F.gelu(y, approximate="none" if then == "gelu" else "tanh")


def _compiled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    then: str,
    other: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    library = compiled.library_for_torch()
    assert library is not None
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    out = torch.empty(*x.shape[:-1], outputs, dtype=dtype, device=x.device)
    x = x.float().contiguous()
    other = None if other is None else other.contiguous()
    types = TYPES[weight.dtype], TYPES[dtype], THEN[then]
    library.griffin_linear(
        (ctypes.c_int64 * 7)(rows, inputs, outputs, *types, torch.get_num_threads()),
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if other is None else other.data_ptr(),
        out.data_ptr(),
    )
    return out
