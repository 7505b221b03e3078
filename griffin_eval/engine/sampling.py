"""Sampling of tokens."""

from typing import NamedTuple

import numpy as np

from griffin_eval.errors import ArgumentError


class Sampling(NamedTuple):
    """Sampling parameters."""

    temperature: float = 0.0  # divisor of the logits; 0 takes the most likely token
    top_k: int = 0  # number of most likely tokens to choose from; 0 or less for all
    top_p: float = 1.0  # total probability of the most likely tokens to choose from


GREEDY = Sampling()


def checked(sampling: Sampling) -> Sampling:
    """Return sampling parameters, or raise ArgumentError if one is out of range."""
    if not 0 <= sampling.temperature < np.inf:
        raise ArgumentError(f"expected a temperature of at least 0, not {sampling.temperature}")
    if not 0 <= sampling.top_p <= 1:
        raise ArgumentError(f"expected top_p from 0 to 1, not {sampling.top_p}")
    return sampling


class Chooser:
    """Draws tokens for one prompt with its own random generator."""

    def __init__(self, sampling: Sampling, seed: int, index: int):
        self._sampling = sampling
        self._rng = np.random.default_rng([seed, index])

    def __call__(self, logits: np.ndarray) -> int:
        if not self._sampling.temperature:
            return int(logits.argmax())
        if np.isinf(largest := logits.max()):
            return int(logits.argmax())
        with np.errstate(over="ignore"):  # a tiny temperature gives -inf, a probability of 0
            scaled = (logits.astype(np.float64) - largest) / self._sampling.temperature
        order = np.argsort(-scaled, kind="stable")
        if self._sampling.top_k > 0:
            order = order[: self._sampling.top_k]
        p = np.exp(scaled[order])
        p /= p.sum()
        if self._sampling.top_p < 1:
            before = np.cumsum(p) - p
            kept = before < self._sampling.top_p  # includes the token that reaches top_p
            kept[0] = True
            order, p = order[kept], p[kept] / p[kept].sum()
        return int(self._rng.choice(order, p=p))

    @property
    def draws(self) -> bool:
        """Whether logits are needed; otherwise the most likely token is enough."""
        return self._sampling.temperature > 0
