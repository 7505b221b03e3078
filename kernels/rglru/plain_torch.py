"""The recurrences in plain PyTorch, on any device and in any precision."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Complex, Float, Inexact, Int
from torch import Tensor

from griffin_eval.kernels.rglru.plain_scan_torch import linear_scan as blocked_scan
from griffin_eval.kernels.rglru.reference import MAX_SQRT_GRADIENT, C, Gates


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or the dtype itself if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def linear_scan(
    a: Inexact[Tensor, "B T D"],
    x: Inexact[Tensor, "B T D"],
    h0: Inexact[Tensor, "S D"],
    *,
    resets: Bool[Tensor, "B T"] | None = None,
    lengths: Int[Tensor, " S"] | None = None,
    starts: Int[Tensor, " S"] | None = None,
) -> tuple[Inexact[Tensor, "B T D"], Inexact[Tensor, "S D"]]:
    """See `griffin_eval.kernels.rglru.api.linear_scan`."""
    dtype, wider = x.dtype, accumulation_dtype(x.dtype)
    a, x, h0 = a.to(wider), x.to(wider), h0.to(wider)
    if resets is not None:
        a = torch.where(resets[:, :, None], 0.0, a)
    t = torch.arange(x.shape[1], device=x.device)
    if starts is None:
        if lengths is not None:
            padding = (t >= lengths[:, None])[:, :, None]
            a, x = torch.where(padding, 1.0, a), torch.where(padding, 0.0, x)
        h = blocked_scan(a, x, h0)
        return h.to(dtype), h[:, -1]
    # One recurrence over the whole row: the first step of a segment forgets the previous state
    # (a = 0) and has the segment's own state as part of its input (a h0 + x).
    assert lengths is not None
    some, read = (lengths > 0).long(), (lengths > 0)[:, None]
    first = starts.clamp(max=len(t) - 1)
    begins = torch.zeros(len(t) + 1, dtype=torch.int64, device=x.device)
    begins = begins.index_add(0, first, some)
    inside = begins.index_add(0, (first + lengths).long(), -some).cumsum(0)[None, :-1, None] > 0
    x = torch.where(inside, x, 0.0)
    x = x.index_add(1, first, torch.where(read, a[0, first] * h0, 0.0)[None])
    a = torch.where(inside & (begins[None, :-1, None] == 0), a, 0.0)
    h = blocked_scan(a, x, torch.zeros_like(h0[:1]))
    return h.to(dtype), torch.where(read, h[0, (starts + lengths - 1).clamp(min=0)], h0)


def rglru(
    x: Float[Tensor, "B T L"],
    gates: Gates,
    h0: Float[Tensor, "S L"],
    *,
    resets: Bool[Tensor, "B T"] | None = None,
    lengths: Int[Tensor, " S"] | None = None,
    starts: Int[Tensor, " S"] | None = None,
    c: float = C,
) -> tuple[Float[Tensor, "B T L"], Float[Tensor, "S L"]]:
    """See `griffin_eval.kernels.rglru.api.rglru`."""
    wider = accumulation_dtype(x.dtype)
    x_t = x.to(wider)
    # (1) and (2): r_t = sigma(W_a x_t + b_a), i_t = sigma(W_x x_t + b_x)
    r_t = torch.sigmoid(block_diagonal(x_t, gates.recurrent_weight, gates.recurrent_bias))
    i_t = torch.sigmoid(block_diagonal(x_t, gates.input_weight, gates.input_bias))
    # (3) in log space: a_t = sigma(-Lambda)^(c r_t)
    log_a = -c * F.softplus(gates.recurrent_param.to(wider)) * r_t
    # (4): h_t = a_t h_{t-1} + sqrt(1 - a_t^2) (i_t x_t); a document starts with h_t = i_t x_t.
    multiplier = bounded_sqrt(-torch.expm1(2 * log_a))
    if resets is not None:
        multiplier = torch.where(resets[:, :, None], 1.0, multiplier)
    layout = {"resets": resets, "lengths": lengths, "starts": starts}
    if gates.imaginary_param is None:
        h, last = linear_scan(torch.exp(log_a), multiplier * i_t * x_t, h0, **layout)
        return h.to(x.dtype), last
    a_t = torch.polar(torch.exp(log_a), gates.imaginary_param.to(wider) * r_t)
    gated = torch.cat([multiplier * i_t] * 2, -1) * x_t
    h, last = linear_scan(a_t, _joined(gated), _joined(h0.to(wider)), **layout)
    return _halves(h).to(x.dtype), _halves(last)


def _joined(halves: Float[Tensor, "*N L"]) -> Complex[Tensor, "*N Z"]:
    """Return complex numbers from real parts followed by imaginary parts."""
    return torch.complex(*halves.chunk(2, -1))


def _halves(numbers: Complex[Tensor, "*N Z"]) -> Float[Tensor, "*N L"]:
    """Invert `_joined`."""
    return torch.cat([numbers.real, numbers.imag], -1)


def block_diagonal(
    x: Float[Tensor, "B T L"], weight: Float[Tensor, "G I O"], bias: Float[Tensor, "G O"]
) -> Float[Tensor, "B T M"]:
    """Compute x W + b in the dtype of x; W has G blocks of I x O on its diagonal, M = G O."""
    batch, length, _ = x.shape
    blocks = x.reshape(batch * length, *weight.shape[:2]).transpose(0, 1)
    y = torch.baddbmm(bias.to(x.dtype)[:, None], blocks, weight.to(x.dtype))
    return y.transpose(0, 1).reshape(batch, length, -1)


class _BoundedSqrt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] / torch.sqrt(torch.clamp(4 * x, min=MAX_SQRT_GRADIENT**-2))


def bounded_sqrt(x: Tensor) -> Tensor:
    """Return sqrt(x) with a derivative of at most ``MAX_SQRT_GRADIENT``, for a_t near 1."""
    return _BoundedSqrt.apply(x)  # type: ignore[no-any-return]
