"""How tokens are chosen."""

from typing import NamedTuple

import numpy as np


class Sampling(NamedTuple):
    """How a token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token; else logits are divided by it.
        top_k: number of likeliest tokens to choose from; 0 for all.
        top_p: total probability of the likeliest tokens to choose from.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


GREEDY = Sampling()


class Chooser:
    """Draws tokens for one prompt, from random numbers of its own."""

    def __init__(self, sampling: Sampling, seed: int, index: int):
        self._sampling = sampling
        self._rng = np.random.default_rng([seed, index])

    def __call__(self, logits: np.ndarray) -> int:
        if not self._sampling.temperature:
            return int(logits.argmax())
        scaled = logits.astype(np.float64) / self._sampling.temperature
        order = np.argsort(-scaled, kind="stable")
        if self._sampling.top_k:
            order = order[: self._sampling.top_k]
        p = np.exp(scaled[order] - scaled[order[0]])
        p /= p.sum()
        if self._sampling.top_p < 1:
            before = np.cumsum(p) - p  # keeps the first token that crosses the line
            order, p = order[before < self._sampling.top_p], p[before < self._sampling.top_p]
            p /= p.sum()
        return int(self._rng.choice(order, p=p))

    @property
    def draws(self) -> bool:
        """Whether it needs logits; else the likeliest token is enough."""
        return self._sampling.temperature > 0
