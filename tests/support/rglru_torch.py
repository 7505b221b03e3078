"""The recurrences of `griffin_eval.kernels.rglru.reference` in torch.

Autograd in float64 gives the expected gradients of every kernel."""

import numpy as np
import torch

from griffin_eval.kernels.rglru import reference


def linear_scan(a, x, h0=None, *, resets=None, lengths=None, starts=None):
    """Return every h_t and the last states, as `reference.linear_scan` does."""
    batch, time, width = x.shape
    lengths = np.full(batch, time) if lengths is None else lengths
    h0 = x.new_zeros(len(lengths), width) if h0 is None else h0
    rows, last = [[x.new_zeros(width)] * time for _ in range(batch)], []
    for s, length in enumerate(lengths):
        b, first = (s, 0) if starts is None else (0, starts[s])
        h = h0[s]
        for t in range(first, first + length):
            h = x[b, t] if resets is not None and resets[b, t] else a[b, t] * h + x[b, t]
            rows[b][t] = h
        last.append(h)
    return torch.stack([torch.stack(row) for row in rows]), torch.stack(last)


def rglru(x, gates, h0=None, *, resets=None, **layout):
    """Return every h_t and the last states, as `reference.rglru` does."""
    blocks = x.unflatten(-1, gates.input_weight.shape[:2])
    r, i = (
        torch.sigmoid(torch.einsum("btgi,gio->btgo", blocks, weight) + bias).flatten(2)
        for weight, bias in (gates[3:5], gates[1:3])
    )
    softplus = torch.logaddexp(gates.recurrent_param, torch.zeros_like(gates.recurrent_param))
    log_a = -reference.C * softplus * r
    multiplier = torch.sqrt(-torch.expm1(2 * log_a))
    if resets is not None:
        multiplier = torch.where(torch.tensor(resets)[:, :, None], 1.0, multiplier)
    layout |= {"resets": resets}
    if gates.imaginary_param is None:
        return linear_scan(torch.exp(log_a), multiplier * i * x, h0, **layout)
    a = torch.polar(torch.exp(log_a), gates.imaginary_param * r)
    states = None if h0 is None else _complex(h0)
    results = linear_scan(a, multiplier * i * _complex(x), states, **layout)
    return tuple(torch.cat([v.real, v.imag], -1) for v in results)


def _complex(x):
    return torch.complex(*x.chunk(2, -1))
