"""The recurrences in float64, step by step: the reference for tests of every kernel.

Arrays are numpy's, or those of ``xp=jax.numpy`` (with ``jax_enable_x64``), through which JAX can
differentiate.

All operators read tokens in one of two layouts.

- **Rows**: x is [B, T, L] and every row has its own state, so S = B. In row b only the first
  ``lengths[b]`` tokens are read, the rest is padding.
- **Packed** (with ``starts``): x is [1, N, L] with S segments in its one row, segment s at
  ``starts[s] … starts[s] + lengths[s]``, each with its own state. Segments do not overlap, and
  tokens outside of them are padding.

Padding does not change the state; h is meaningless there.
"""

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

C = 8.0  # equation 3
MAX_SQRT_GRADIENT = 1000.0  # limit for the square root of equation 4 in all kernels but this one


class Gates(NamedTuple):
    """Parameters of an RG-LRU or, with an imaginary part, of a CG-LRU.

    Attributes:
        recurrent_param: [D], Λ. D is L, or L / 2 for a CG-LRU, whose numbers are complex.
        input_weight: [G, L / G, D / G], W_x, blocks of a block-diagonal matrix, (in, out).
        input_bias: [G, D / G], b_x.
        recurrent_weight, recurrent_bias: W_a and b_a, with the shapes of W_x and b_x.
        imaginary_param: [D], θ, or None.
    """

    recurrent_param: Any
    input_weight: Any
    input_bias: Any
    recurrent_weight: Any
    recurrent_bias: Any
    imaginary_param: Any = None


def linear_scan(
    a: Any,
    x: Any,
    h0: Any = None,
    *,
    resets: Any = None,
    lengths: Any = None,
    starts: Any = None,
    xp: ModuleType = np,
) -> tuple[Any, Any]:
    """Compute h_t = a_t h_{t-1} + x_t (equation 4, with gated input).

    Arguments and results are those of `griffin_eval.kernels.rglru.api.linear_scan`; ``xp`` is numpy
    or jax.numpy.

    With a = [[.5], [.5]], x = [[1.], [1.]] and h0 = [4.]: h = [[3.], [2.5]].
    """
    a, x = _wide(a, xp), _wide(x, xp)
    batch, time, width = x.shape
    segments = batch if starts is None else len(starts)
    first = np.zeros(segments, int) if starts is None else np.asarray(starts)
    count = np.full(segments, time) if lengths is None else np.asarray(lengths)
    h0 = xp.zeros((segments, width), x.dtype) if h0 is None else _wide(h0, xp)
    forget = np.zeros((batch, time), bool) if resets is None else np.asarray(resets)

    rows = [[xp.zeros_like(x[0, 0])] * time for _ in range(batch)]
    last = []
    for s in range(segments):
        b, h = (s if starts is None else 0), h0[s]
        for t in range(first[s], first[s] + count[s]):
            h = x[b, t] if forget[b, t] else a[b, t] * h + x[b, t]
            rows[b][t] = h
        last.append(h)
    return xp.stack([xp.stack(row) for row in rows]), xp.stack(last)


def rglru(
    x: Any,
    gates: Gates,
    h0: Any = None,
    *,
    resets: Any = None,
    lengths: Any = None,
    starts: Any = None,
    c: float = C,
    xp: ModuleType = np,
) -> tuple[Any, Any]:
    """Compute the RG-LRU of section 2.4, or with an imaginary part the CG-LRU of appendix B.

    r_t = σ(W_a x_t + b_a), i_t = σ(W_x x_t + b_x), log a_t = -c softplus(Λ) r_t (equations 1-3) and
    h_t = a_t h_{t-1} + sqrt(1 - |a_t|²) (i_t x_t) (4); at the start of a document h_t = i_t x_t.
    For the CG-LRU log a_t = (-c softplus(Λ) + iθ) r_t, and the two halves of x, h and the states
    are real and imaginary parts. Arguments are those of `griffin_eval.kernels.rglru.api.rglru`.
    """
    x = _wide(x, xp)
    gates = Gates(*(None if p is None else _wide(p, xp) for p in gates))
    r_t = _sigmoid(_block_diagonal(x, gates.recurrent_weight, gates.recurrent_bias, xp), xp)
    i_t = _sigmoid(_block_diagonal(x, gates.input_weight, gates.input_bias, xp), xp)
    log_a = -c * xp.logaddexp(gates.recurrent_param, 0.0) * r_t
    multiplier = xp.sqrt(-xp.expm1(2 * log_a))
    if resets is not None:
        multiplier = xp.where(np.asarray(resets)[:, :, None], 1.0, multiplier)
    layout = {"resets": resets, "lengths": lengths, "starts": starts, "xp": xp}
    if gates.imaginary_param is None:
        return linear_scan(xp.exp(log_a), multiplier * i_t * x, h0, **layout)
    a = xp.exp(log_a + 1j * gates.imaginary_param * r_t)
    states = None if h0 is None else _complex(_wide(h0, xp))
    h, last = linear_scan(a, multiplier * i_t * _complex(x), states, **layout)
    return xp.concatenate([h.real, h.imag], -1), xp.concatenate([last.real, last.imag], -1)


def _wide(array: Any, xp: ModuleType) -> Any:
    array = xp.asarray(array)
    return array if xp.iscomplexobj(array) else array.astype(xp.float64)


def _complex(x: Any) -> Any:
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


def _sigmoid(x: Any, xp: ModuleType) -> Any:
    return xp.exp(-xp.logaddexp(0.0, -x))


def _block_diagonal(x: Any, weight: Any, bias: Any, xp: ModuleType) -> Any:
    blocks = x.reshape(*x.shape[:2], *weight.shape[:2])
    return (xp.einsum("btgi,gio->btgo", blocks, weight) + bias).reshape(*x.shape[:2], -1)
