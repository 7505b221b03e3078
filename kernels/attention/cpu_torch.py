"""Local attention in PyTorch on a CPU, by the compiled kernel."""

import ctypes
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from griffin_eval.kernels.cpu import compiled
from griffin_eval.kernels.linear.cpu_torch import TYPES


def unsupported(q: Float[Tensor, "B T H D"], keys: Tensor, values: Tensor) -> str | None:
    """The reason for which the kernel cannot read these, or None."""
    for x in (q, keys, values):
        if x.device.type != "cpu":
            return f"the compiled kernel runs on a CPU, not on {x.device}"
        if x.dtype not in TYPES or x.dtype != q.dtype:
            return f"the compiled kernel computes in float32, not {x.dtype} beside {q.dtype}"
    if q.shape[3] > compiled.MOST_HEAD_DIM:
        most = compiled.MOST_HEAD_DIM
        return f"the compiled kernel takes heads of {most} dimensions, not {q.shape[3]}"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, keys, values)):
        return "the compiled kernel has no derivative"
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into the compiled kernel"
    return None if compiled.library() else compiled.NOT_BUILT


def local_attention(
    q: Float[Tensor, "B T H D"],
    keys: Float[Tensor, "B Q D"] | Float[Tensor, "Q D"],
    values: Float[Tensor, "B Q D"] | Float[Tensor, "Q D"],
    max_age: Int[Tensor, "B T"],
    *,
    past: int,
    lengths: Int[Tensor, " S"],
    starts: Int[Tensor, " S"] | None = None,
    offset: int = 0,
    blocks: Any = None,
) -> Float[Tensor, "B T W"]:
    """See `griffin_eval.kernels.attention.api.local_attention`. Padding gets zeros; keys that no
    query sees are not read."""
    batch, length, heads, size = q.shape
    packed = starts is not None
    if starts is None:
        starts = length * torch.arange(batch)
    q = q.contiguous()
    rows_are_dense = keys.stride()[-2:] == (size, 1) and keys.stride(0) % size == 0
    if not rows_are_dense or keys.stride() != values.stride():
        keys, values = keys.contiguous(), values.contiguous()
    out = torch.empty(batch, length, heads * size, dtype=q.dtype)
    newest = past + offset  # slot of a segment's first new key
    stride = newest if packed else keys.stride(0) // size
    kind = TYPES[q.dtype]
    sizes = (batch * length, heads, size, len(lengths), stride, newest, packed, kind)
    layout = (starts, lengths, max_age.clamp(max=past))
    arrays = [x.to(torch.int32).contiguous() for x in layout] + [q, keys, values]
    library = compiled.library_for_torch()
    assert library is not None
    library.griffin_attention(
        (ctypes.c_int64 * len(sizes))(*sizes),
        (ctypes.c_void_p * len(arrays))(*[array.data_ptr() for array in arrays]),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
