"""The linear recurrence in numpy, as on paper: what every implementation is tested against."""

import numpy as np


def linear_scan(a: np.ndarray, x: np.ndarray, h0: np.ndarray) -> np.ndarray:
    """Computes h_t = a_t * h_{t-1} + x_t in float64 (equation 4, its input already gated).

    Args:
        a: [B, T, D] decay of each step.
        x: [B, T, D] input of each step.
        h0: [B, D] state before the first step.

    Returns:
        [B, T, D] float64, every h_t.

    With a = [[.5], [.5]], x = [[1.], [1.]] and h0 = [4.]: h = [[3.], [2.5]].
    """
    a, x, h = (np.asarray(v, np.float64) for v in (a, x, h0))
    out = np.empty_like(x)
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        out[:, t] = h
    return out
