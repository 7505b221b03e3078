"""Causal attention of one or several heads of keys as on paper, in float64 and query by query: what
every kernel is tested against.

Operators read queries in one of three layouts, with P remembered keys and values for each segment.
**Padded rows**: q is [B, T, H, D], keys and values are [B, Q, J], every row is a segment; of row b
only the first ``lengths[b]`` queries are read, the rest is padding. The first P of a row's Q slots
hold remembered keys, the next T those of the queries' own tokens. **Rings** (``newest`` is given):
the same with one query a row, whose own key is in slot ``newest[b]``; the key of the token before
is in the slot before, and so on around the Q slots. **Packed** (``starts`` is given): q is
[1, N, H, D], S segments lie behind each other in its one row, segment s at
``starts[s] … starts[s] + lengths[s]``, padding last; keys and values are [N, J], those of the row,
and what the segments remember stays where it is: row ``remembered.rows[s]`` of ``remembered.keys``
and ``remembered.values``. J is the size of all heads of keys together: D of one, or K D of K heads
side by side, each of which serves H / K neighbouring heads of queries.
"""

from typing import Any, NamedTuple

import numpy as np


class Remembered(NamedTuple):
    """Keys and values that packed segments remember, arrays of any framework.

    Attributes:
        keys, values: [R, P, J], oldest first.
        rows: int [S], which of the R each segment remembers; several may share one.
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
    """softmax(q k^T / sqrt(D)) v over the keys that each query sees (section 2.3), heads joined.

    A query sees the key of its own token and those of the last ``max_age`` tokens of its segment
    before it, but no more than ``past``.

    Args:
        q: [B, T, H, D] queries.
        keys, values: [B, Q, J], or [N, J] of packed segments.
        max_age: [B, T] how many earlier tokens each query may see. It never reaches beyond what was
            read of the segment.
        past: P, remembered keys of each segment.
        lengths: [S] tokens that are read.
        starts: [S] of packed segments.
        remembered: of packed segments.
        newest: [B] slot of each query's own key in a ring.

    Returns:
        [B, T, H D] weighted values, zeros for padding.

    With q = [[0.]], two keys that are seen and values 1 and 3, the result is 2.
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
            # [K, H / K, D], [K, keys, D]: each head of keys beside the queries that it serves.
            heads = k.shape[1] // q.shape[3]
            queries = q[row, first + t].reshape(heads, -1, q.shape[3])
            k_t, v_t = (x[seen].reshape(-1, heads, q.shape[3]).swapaxes(0, 1) for x in (k, v))
            scores = queries @ k_t.swapaxes(1, 2) / q.shape[3] ** 0.5
            weights = np.exp(scores - scores.max(2, keepdims=True))
            weights = weights / weights.sum(2, keepdims=True)
            out[row, first + t] = (weights @ v_t).reshape(-1)
    return out
