"""Local attention in PyTorch on a CPU, in float32, by the compiled kernel."""

import ctypes

import torch
from jaxtyping import Float, Int
from torch import Tensor

from griffin_eval.kernels import cpu


def unsupported(q: Float[Tensor, "B T H D"], keys: Tensor, values: Tensor) -> str | None:
    """Why the kernel cannot read these, if it cannot."""
    for x in (q, keys, values):
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return f"the compiled kernel is for float32 on a CPU, not {x.dtype} on {x.device}"
    if q.shape[3] > cpu.MOST_HEAD_DIM:
        return (
            f"the compiled kernel takes heads of {cpu.MOST_HEAD_DIM} dimensions, not {q.shape[3]}"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, keys, values)):
        return "the compiled kernel has no derivative"
    if torch.compiler.is_compiling():
        return "torch.compile cannot look into the compiled kernel"
    return None if cpu.library() else cpu.NOT_BUILT


def local_attention(
    q: Float[Tensor, "B T H D"],
    keys: Float[Tensor, "S Q D"] | Float[Tensor, "Q D"],
    values: Float[Tensor, "S Q D"] | Float[Tensor, "Q D"],
    reach: Int[Tensor, "B T"],
    starts: Int[Tensor, " S"],
    lengths: Int[Tensor, " S"],
    newest: int,
) -> Float[Tensor, "B T W"]:
    """Attention of every query to the keys that it sees, heads joined.

    Args:
        q: queries, of tokens in the order of their segments.
        keys, values: of every segment the remembered ones and the new ones behind them; or first
            all that are remembered, ``newest`` of each segment, then the new ones as the queries.
        reach: how many keys before its own a query sees; at most what is remembered, and what was
            read of the segment.
        starts, lengths: of each segment its first token and how many it has; others get zeros.
        newest: place of a segment's first new key.
    """
    batch, length, heads, size = q.shape
    packed = keys.ndim == 2
    q = q.contiguous()
    behind_each_other = keys.stride()[-2:] == (size, 1) and keys.stride(0) % size == 0
    if not behind_each_other or keys.stride() != values.stride():
        keys, values = keys.contiguous(), values.contiguous()
    out = torch.empty(batch, length, heads * size)
    stride = newest if packed else keys.stride(0) // size
    numbers = (batch * length, heads, size, len(lengths), stride, newest, packed)
    arrays = [x.to(torch.int32).contiguous() for x in (starts, lengths, reach)] + [q, keys, values]
    library = cpu.library_for_torch()
    assert library is not None
    library.griffin_attention(
        (ctypes.c_int64 * len(numbers))(*numbers),
        (ctypes.c_void_p * len(arrays))(*[array.data_ptr() for array in arrays]),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
