"""The least that evaluating requests takes: tokens of their prefix tree, and products of matrices.

Only the products of matrices are counted, of (a, b) by (b, c) as 2abc operations. Norms,
convolutions, recurrences and softmax move memory, and take no time in a limit made of products.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.model_flops import logit_flops, reading_flops
from griffin_eval.config import GriffinConfig
from griffin_eval.engine.tree import Scorable, Tree, build, build_prompts


class Work(NamedTuple):
    """What requests ask for.

    Attributes:
        requested: tokens that the requests, each by itself, would read.
        unique: tokens of their prefix tree.
        flops: to read the unique tokens, with logits where something is scored.
    """

    requested: int
    unique: int
    flops: int


def scoring_work(config: GriffinConfig, sequences: Sequence[Scorable]) -> Work:
    """The work of scoring sequences, of which all tokens but the last are read."""
    tree = build(sequences)
    scored = sum(
        len(np.unique(np.concatenate([np.arange(t.start, t.end) for t in edge.targets])))
        for edge in _edges(tree)
        if edge.targets
    )
    flops = reading_flops(config, _positions(tree)) + scored * logit_flops(config)
    return Work(sum(len(s.tokens) - 1 for s in sequences), tree.tokens, flops)


def prompt_work(config: GriffinConfig, prompts: Sequence[Sequence[int]]) -> Work:
    """The work before generation: the last token of a prompt is the first that continues it."""
    tree = build_prompts([tokens[:-1] for tokens in prompts])
    requested = sum(len(tokens) - 1 for tokens in prompts)
    return Work(requested, tree.tokens, reading_flops(config, _positions(tree)))


def _edges(tree: Tree):
    pending = list(tree.roots)
    while pending:
        edge = pending.pop()
        yield edge
        pending += edge.children


def _positions(tree: Tree) -> np.ndarray:
    parts = [np.arange(edge.start, edge.end) for edge in _edges(tree)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
