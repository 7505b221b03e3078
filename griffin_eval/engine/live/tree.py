"""A radix tree of tokens that grows while it is read, with what was computed on its edges."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from griffin_eval.engine.tree import common_prefix
from griffin_eval.states.state_cache import Beginning

NEVER = 1 << 62  # a token that no sequence reaches
_NONE = np.empty(0, np.int64)


class LiveEdge:
    """Tokens that follow a prefix, their log-probabilities as far as they are known, and the state
    after them while it is kept.

    Attributes:
        tokens: int32 [N].
        start: number of tokens before them.
        parent: the edge before; None of a root, which has no tokens.
        children: edges behind it by their first token.
        logits: float [V], what follows the last token; None where there is no state.
        keep: the beginning whose state is that after the last token, if it or its log-probabilities
            are to be kept on disk, and int32 [M], its tokens; None if not.
        position: index in the sequence of the next token to read, while it is being read.
        working: slot of the state before that token; None while it is not being read.
        logprobs: float64 [N], log-probability of each token in nats: NaN where it is not known,
            infinity where the model's answer was not finite.
        missing: number of tokens of which it is not known; the first of a sequence does not count.
        top: number of likeliest tokens that are known in each token's place.
        top_tokens, top_logprobs: [N, top], these tokens and their log-probabilities.
        wanted_from: index in the sequence of the first token whose log-probability was asked for.
        wanted_top: how many of the likeliest tokens were asked for.
        requests: number of unfinished requests that end on this edge or behind it.
        used: when it was last used, a number that grows.
    """

    __slots__ = (
        "children",
        "keep",
        "logits",
        "logprobs",
        "missing",
        "parent",
        "position",
        "requests",
        "start",
        "tokens",
        "top",
        "top_logprobs",
        "top_tokens",
        "used",
        "wanted_from",
        "wanted_top",
        "working",
    )

    def __init__(self, tokens: np.ndarray, start: int, parent: "LiveEdge | None"):
        self.tokens, self.start, self.parent = tokens, start, parent
        self.children: dict[int, LiveEdge] = {}
        self.position = start
        self.logits: np.ndarray | None = None
        self.keep: tuple[Beginning, np.ndarray] | None = None
        self.working: int | None = None
        self.logprobs = np.full(len(tokens), np.nan)
        self.missing, self.top = len(tokens) - (start == 0), 0
        self.top_tokens = np.empty((len(tokens), 0), np.int64)
        self.top_logprobs = np.empty((len(tokens), 0))
        self.wanted_from, self.wanted_top = NEVER, 0
        self.requests = self.used = 0

    @property
    def end(self) -> int:
        """Number of tokens up to its last one."""
        return self.start + len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Memory in bytes of the tokens and their log-probabilities."""
        arrays = self.tokens, self.logprobs, self.top_tokens, self.top_logprobs
        return sum(array.nbytes for array in arrays)

    def next_ids(self, count: int) -> np.ndarray:
        """int32 [count], the tokens that are read next."""
        return self.tokens[(at := self.position - self.start) : at + count]

    def path(self) -> list["LiveEdge"]:
        """The edges from the root, which is left out, to this one."""
        edges, edge = [], self
        while edge.parent is not None:
            edges.append(edge)
            edge = edge.parent
        return edges[::-1]

    def below(self) -> Iterator["LiveEdge"]:
        """This edge and all behind it, parents first."""
        pending: list[LiveEdge] = [self]
        while pending:
            edge = pending.pop()
            yield edge
            pending += edge.children.values()

    def unknown(self, first: int, top: int) -> np.ndarray:
        """Indices on this edge, from token ``first`` of the sequence on, of tokens of which not
        everything is known that is asked for. The first token of a sequence is never among them."""
        begin = max(first, 1) - self.start
        if begin >= len(self.tokens) or not (self.missing or self.top < top):
            return _NONE
        begin = max(begin, 0)
        if self.top < top:
            return np.arange(begin, len(self.tokens))
        return begin + np.flatnonzero(np.isnan(self.logprobs[begin:]))

    def learn(
        self,
        indices: np.ndarray,
        logprobs: np.ndarray,
        top_tokens: np.ndarray | None = None,
        top_logprobs: np.ndarray | None = None,
    ) -> None:
        """Keeps what a step found of the tokens at some indices on this edge."""
        if top_tokens is not None and top_logprobs is not None:
            if (found := top_tokens.shape[1]) > self.top:
                # What was known of fewer is found again.
                self.top, self.logprobs = found, np.full(len(self.tokens), np.nan)
                self.top_tokens = np.zeros((len(self.tokens), found), np.int64)
                self.top_logprobs = np.zeros((len(self.tokens), found))
            self.top_tokens[indices] = top_tokens[:, : self.top]
            self.top_logprobs[indices] = top_logprobs[:, : self.top]
        self.logprobs[indices] = np.where(np.isnan(logprobs), np.inf, logprobs)
        self.count()

    def count(self) -> None:
        """Counts what is ``missing``."""
        self.missing = int(np.isnan(self.logprobs[self.start == 0 :]).sum())


def insert(root: LiveEdge, tokens: np.ndarray) -> LiveEdge:
    """The edge at whose end a sequence ends, which is made where there is none.

    Args:
        tokens: int32 [N], N >= 1. Where the sequence leaves an edge or ends on one, that is cut.
    """
    edge, depth = root, 0
    while depth < len(tokens):
        child = edge.children.get(int(tokens[depth]))
        if child is None:
            child = LiveEdge(tokens[depth:].copy(), depth, edge)
            edge.children[int(tokens[depth])] = child
            return child
        common = common_prefix(child.tokens, tokens[depth : depth + len(child.tokens)])
        depth += common
        edge = child if common == len(child.tokens) else split(child, depth)
    return edge


def shared(root: LiveEdge, tokens: np.ndarray) -> int:
    """Number of tokens that a sequence has in common with a tree."""
    edge, depth = root, 0
    while depth < len(tokens) and (child := edge.children.get(int(tokens[depth]))) is not None:
        common = common_prefix(child.tokens, tokens[depth : depth + len(child.tokens)])
        depth += common
        if common < len(child.tokens):
            break
        edge = child
    return depth


def split(edge: LiveEdge, length: int) -> LiveEdge:
    """Cuts an edge where the sequence has ``length`` tokens. The first part is a new edge, which is
    returned; the second is the old one."""
    own, parent = length - edge.start, edge.parent
    assert parent is not None
    # Copies: one part may be forgotten while the other is kept.
    first = LiveEdge(edge.tokens[:own].copy(), edge.start, parent)
    parent.children[int(edge.tokens[0])] = first
    for name in ("logprobs", "top_tokens", "top_logprobs"):
        known: Any = getattr(edge, name)
        setattr(first, name, known[:own].copy())
        setattr(edge, name, known[own:].copy())
    first.top, first.requests, first.used = edge.top, edge.requests, edge.used
    first.wanted_from, first.wanted_top = edge.wanted_from, edge.wanted_top
    if edge.working is not None and edge.position < length:
        # The first part is what is being read.
        first.working, first.position, edge.working = edge.working, edge.position, None
    edge.tokens, edge.start, edge.parent = edge.tokens[own:].copy(), length, first
    first.count()
    edge.count()
    if edge.working is None:
        edge.position = edge.start
    first.children[int(edge.tokens[0])] = edge
    return first
