"""Local attention in PyTorch on a CPU, by a compiled kernel."""

import ctypes
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from griffin_eval.kernels.attention.reference import Remembered
from griffin_eval.kernels.cpu import compiled
from griffin_eval.kernels.linear.cpu_torch import TYPES


def unsupported(q: Float[Tensor, "B T H D"], keys: Tensor, values: Tensor) -> str | None:
    """Return the reason why the kernel cannot read these arrays, or None."""
    for x in (q, keys, values):
        if x.device.type != "cpu":
            return f"the compiled kernel runs on a CPU, not on {x.device}"
        if x.dtype not in TYPES:
            return f"the compiled kernel takes float32, bfloat16 or float16, not {x.dtype}"
        if x.dtype != q.dtype:
            return f"the compiled kernel takes arrays of one dtype, not {q.dtype} and {x.dtype}"
    if q.shape[3] > compiled.MAX_HEAD_DIM:
        limit = compiled.MAX_HEAD_DIM
        return f"the compiled kernel takes heads of {limit} dimensions, not {q.shape[3]}"
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, keys, values)):
        return "the compiled kernel has no derivative"
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into the compiled kernel"
    return compiled.missing()


def local_attention(
    q: Float[Tensor, "B T H D"],
    keys: Float[Tensor, "B Q J"] | Float[Tensor, "N J"],
    values: Float[Tensor, "B Q J"] | Float[Tensor, "N J"],
    max_age: Int[Tensor, "B T"],
    *,
    past: int,
    lengths: Int[Tensor, " S"],
    starts: Int[Tensor, " S"] | None = None,
    remembered: Remembered | None = None,
    newest: Int[Tensor, " B"] | None = None,
    blocks: Any = None,
) -> Float[Tensor, "B T H*D"]:
    """See `griffin_eval.kernels.attention.api.local_attention`. Padding gets zeros; keys that no
    query sees are not read."""
    batch, length, heads, size = q.shape
    if starts is None:
        starts = length * torch.arange(batch, device=q.device)
    if newest is None:
        newest = torch.full_like(lengths, past)
    layout = [newest, starts, lengths, max_age.clamp(max=past)]
    keys, values = keys.contiguous(), values.contiguous()
    old_keys, old_values = keys, values
    if remembered is not None:
        layout.append(remembered.rows)
        old_keys, old_values = remembered.keys.contiguous(), remembered.values.contiguous()
    out = torch.empty(batch, length, heads * size, dtype=q.dtype, device=q.device)
    joined = keys.shape[-1]  # size of all key heads together
    of_keys, slots = joined // size, old_keys.shape[1]
    sizes = (batch * length, heads, of_keys, size, len(lengths), slots, TYPES[q.dtype])
    integers = [x.to(torch.int32).contiguous() for x in layout]
    floats = [q.contiguous(), keys, values, old_keys, old_values]
    library = compiled.library_for_torch()
    assert library is not None
    rows = [] if remembered is not None else [None]
    pointers = [x.data_ptr() for x in integers] + rows + [x.data_ptr() for x in floats]
    library.griffin_attention(
        (ctypes.c_int64 * len(sizes))(*sizes),
        (ctypes.c_void_p * len(pointers))(*pointers),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
