"""The answer to a rolling log-likelihood request."""

from typing import Any

import numpy as np


class TokenScores(float):
    """The log-likelihood of a text in nats.

    Attributes:
        tokens: float64, the log-likelihood of each of its tokens.
    """

    tokens: np.ndarray

    def __new__(cls, tokens: np.ndarray) -> "TokenScores":
        score = super().__new__(cls, tokens.sum())
        score.tokens = tokens
        return score

    def __getnewargs__(self) -> tuple[Any]:
        return (self.tokens,)
