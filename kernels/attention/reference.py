"""Causal attention with one or several key heads in float64, query by query: the test reference.

Operators read queries in one of three layouts, with P remembered keys and values for each segment.
J is the size of all key heads together: D for one, or K D for K heads side by side, each of which
serves H / K neighbouring query heads.

- **Padded rows**: q is [B, T, H, D], keys and values are [B, Q, J], and every row is a segment. In
  row b only the first ``lengths[b]`` queries are read, the rest is padding. The first P of a row's
  Q slots hold remembered keys, the next T those of the queries' own tokens.
- **Rings** (with ``newest``): one query per row, whose own key is in slot ``newest[b]``; the key of
  the previous token is in the slot before, and so on around the Q slots.
- **Packed** (with ``starts``): q is [1, N, H, D] with S segments one after the other, segment s at
  ``starts[s] … starts[s] + lengths[s]``, padding last. Keys and values are [N, J] for the row; the
  remembered ones stay in row ``remembered.rows[s]`` of ``remembered.keys`` and ``.values``.
"""

from typing import Any, NamedTuple

import numpy as np


class Remembered(NamedTuple):
    """Remembered keys and values of packed segments, arrays of any framework.

    Attributes:
        keys, values: [R, P, J], oldest first.
        rows: int [S], row of each segment; several segments may share one.
    """

    keys: Any
    values: Any
    rows: Any


def local_attention(
    q: Any,
    keys: Any,
    values: Any,
    max_age: Any,
    *,
    past: int,
    lengths: Any,
    starts: Any = None,
    remembered: Remembered | None = None,
    newest: Any = None,
) -> Any:
    """Compute softmax(q k^T / sqrt(D)) v over the keys that each query sees (section 2.3).

    A query sees the key of its own token and those of the ``max_age`` tokens before it in its
    segment, at most ``past``. Arguments are those of
    `griffin_eval.kernels.attention.api.local_attention`; padding gets zeros.

    With q = [[0.]], two visible keys and values 1 and 3, the result is 2.
    """
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    max_age = np.minimum(max_age, past)
    out = np.zeros((*q.shape[:2], q.shape[2] * q.shape[3]))
    for s, length in enumerate(np.asarray(lengths)):
        if starts is None:
            row, first = s, 0
            k, v = keys[s], values[s]
            if newest is not None:
                k, v = (np.roll(x, past - int(newest[s]), 0) for x in (k, v))
        else:
            assert remembered is not None
            row, first = 0, int(starts[s])
            old, new = int(remembered.rows[s]), slice(first, first + length)
            k = np.concatenate([np.asarray(remembered.keys[old], np.float64), keys[new]])
            v = np.concatenate([np.asarray(remembered.values[old], np.float64), values[new]])
        for t in range(length):
            end = past + t + 1
            seen = slice(end - 1 - max_age[row, first + t], end)
            # [K, H / K, D] and [K, keys, D]: each key head beside the query heads that it serves.
            heads = k.shape[1] // q.shape[3]
            queries = q[row, first + t].reshape(heads, -1, q.shape[3])
            k_t, v_t = (x[seen].reshape(-1, heads, q.shape[3]).swapaxes(0, 1) for x in (k, v))
            scores = queries @ k_t.swapaxes(1, 2) / q.shape[3] ** 0.5
            weights = np.exp(scores - scores.max(2, keepdims=True))
            weights = weights / weights.sum(2, keepdims=True)
            out[row, first + t] = (weights @ v_t).reshape(-1)
    return out
