"""Pairs of documents that differ in one fact, and what the equations say of them."""

import numpy as np
from fixtures_engine import reference_scores
from parity import BASE

from experiments.causal_map.causal_map import Pair


def pair_of(seed: int, length: int = 30, fact: int = 5, answer: int = 2) -> Pair:
    rng = np.random.default_rng(seed)
    original = rng.integers(BASE.vocab_size, size=length).astype(np.int32)
    changed = original.copy()
    changed[fact] = (changed[fact] + 1 + seed % 5) % BASE.vocab_size
    one, other = rng.integers(BASE.vocab_size, size=(2, answer)).astype(np.int32)
    return Pair(original, changed, fact + 1, one, other)


PAIRS = [pair_of(0), pair_of(1, length=41, fact=20), pair_of(2, answer=1, length=12)]


def by_the_equations(pair: Pair, document: np.ndarray) -> float:
    """log p(changed answer) - log p(original answer) after a document, in float64."""
    one, other = (
        reference_scores((*document.tolist(), *answer.tolist()))[0][-len(answer) :].sum()
        for answer in (pair.original_answer, pair.changed_answer)
    )
    return other - one
