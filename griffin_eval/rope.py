"""Rotary angles that are exact at any position.

In float32, ``position * frequency`` is off by 0.03 at a million tokens. Here a position is written
in base 256, each digit looks up its own rotation, computed in float64, and the product of the four
rotations is the rotation of the position, up to a few float32 roundings.
"""

from functools import cache

import numpy as np

BASE = 256
DIGITS = 4  # positions below 2**32


@cache
def digit_tables(rotary_dim: int, rope_base: float) -> tuple[np.ndarray, np.ndarray]:
    """Return cosine and sine of the rotation of each digit of a position, lowest digit first.

    Args:
        rotary_dim: Number of rotated dimensions of a head, R.
        rope_base: Longest wavelength over 2 pi.

    Returns:
        Two float64 arrays ``[DIGITS, BASE, R / 2]``.
    """
    frequency = rope_base ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    position = np.arange(BASE) * (BASE ** np.arange(DIGITS))[:, None]
    angle = position[:, :, None] * frequency
    return np.cos(angle), np.sin(angle)
