"""Results of rolling log-likelihood requests."""

from typing import Any

import numpy as np


class TokenScores(float):
    """The log-likelihood of a text in nats; ``tokens`` has that of each token, float64 [N]."""

    tokens: np.ndarray

    def __new__(cls, tokens: np.ndarray) -> "TokenScores":
        score = super().__new__(cls, tokens.sum())
        score.tokens = tokens
        return score

    def __getnewargs__(self) -> tuple[Any]:
        return (self.tokens,)
