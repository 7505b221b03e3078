"""The linear recurrence in PyTorch: a blocked two-pass scan with its own backward pass."""

import math

import torch
from jaxtyping import Inexact
from torch import Tensor

_STEPWISE = 8  # up to this length a plain loop is shorter than the two passes


def linear_scan(
    a: Inexact[Tensor, "B T D"], x: Inexact[Tensor, "B T D"], h0: Inexact[Tensor, "B D"]
) -> Inexact[Tensor, "B T D"]:
    """Compute h_t = a_t * h_{t-1} + x_t (equation 4, with gated input).

    a, x and h0 have one dtype: float32, float64, or complex numbers of these. Differentiable in all
    three. Return every h_t.
    """
    return _LinearScan.apply(a, x, h0)  # type: ignore[no-any-return]


class _LinearScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor, x: Tensor, h0: Tensor) -> Tensor:
        h = _scan(a, x, h0)
        ctx.save_for_backward(a, h, h0)
        return h

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The adjoint is the same recurrence backwards: g_t = dh_t + a_{t+1} g_{t+1}. For complex
        # numbers torch passes dL/dRe + i dL/dIm, so that factors are conjugated.
        a, h, h0 = ctx.saved_tensors
        (dh,) = grads
        a = a.conj().resolve_conj()
        shifted = torch.cat([a[:, 1:], torch.zeros_like(a[:, :1])], 1)
        g = _scan(shifted.flip(1), dh.flip(1), torch.zeros_like(h0)).flip(1)
        previous = torch.cat([h0[:, None], h[:, :-1]], 1)
        return g * previous.conj(), g, a[:, 0] * g[:, 0]


def _scan(a: Tensor, x: Tensor, h0: Tensor) -> Tensor:
    batch, length, width = x.shape
    if length <= _STEPWISE:
        steps = []
        h = h0
        for t in range(length):
            h = torch.addcmul(x[:, t], a[:, t], h)
            steps.append(h)
        return torch.stack(steps, 1)

    # About sqrt(T) blocks of sqrt(T) steps: first all blocks at once from zero states, then the
    # state from block to block.
    block = math.isqrt(length - 1) + 1
    blocks = -(-length // block)
    if pad := blocks * block - length:
        a = torch.cat([a, a.new_ones(batch, pad, width)], 1)
        x = torch.cat([x, x.new_zeros(batch, pad, width)], 1)
    a = a.reshape(batch, blocks, block, width)
    x = x.reshape(batch, blocks, block, width)
    decay, h = torch.empty_like(a), torch.empty_like(x)  # decay: product of a within the block
    decay[:, :, 0], h[:, :, 0] = a[:, :, 0], x[:, :, 0]
    for k in range(1, block):
        torch.mul(decay[:, :, k - 1], a[:, :, k], out=decay[:, :, k])
        torch.addcmul(x[:, :, k], a[:, :, k], h[:, :, k - 1], out=h[:, :, k])
    for n in range(blocks):
        before = h0 if n == 0 else h[:, n - 1, -1]
        h[:, n].addcmul_(decay[:, n], before[:, None])
    return h.reshape(batch, -1, width)[:, :length]
