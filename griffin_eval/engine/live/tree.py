"""A radix tree of tokens that grows while it is read, with the results on its edges."""

from collections.abc import Iterable, Iterator

import numpy as np

from griffin_eval.engine.tree import common_prefix
from griffin_eval.states.state_cache import Beginning

# Memory of an edge without the elements of its arrays, measured in the fragmented heap of a server.
EDGE_BYTES = 1200
NEVER = 1 << 62  # larger than the index of any token
_NONE = np.empty(0, np.int64)


class LiveEdge:
    """Tokens that follow a prefix, their known log-probabilities, and what follows them.

    Attributes:
        tokens: int32 [N].
        start: Number of tokens before the edge.
        parent: Edge before this one; None for a root, which has no tokens.
        children: Edges after this one by their first token.
        logits: float [V], prediction after the last token; None without a state.
        keep: Beginning whose state or log-probabilities will be saved to disk at the end of this
            edge, with its int32 [M] tokens.
        position: Index in the sequence of the next token to read.
        working: Slot of the state before that token; None unless the edge is being read.
        scores: float64 [N, 1 + 2 * top], the next three attributes in one array, since three short
            arrays take twice as much memory.
        logprobs: float64 [N], log-probabilities in nats: NaN where unknown, infinity where the
            model's result was not finite.
        top_tokens, top_logprobs: [N, top], the most likely tokens in the place of each token, and
            their log-probabilities.
        missing: Number of unknown log-probabilities, not counting the first token of a sequence.
        requested_from: Index in the sequence of the first token whose log-probability is requested.
        requested_top: Number of most likely tokens that is requested.
        requests: Number of unfinished requests that end on this edge or below it.
        used: Clock value of the last use.
    """

    __slots__ = (
        "children",
        "keep",
        "logits",
        "missing",
        "parent",
        "position",
        "requests",
        "scores",
        "start",
        "tokens",
        "used",
        "requested_from",
        "requested_top",
        "working",
    )

    def __init__(self, tokens: np.ndarray, start: int, parent: "LiveEdge | None"):
        self.tokens, self.start, self.parent = tokens, start, parent
        self.children: dict[int, LiveEdge] = {}
        self.position = start
        self.logits: np.ndarray | None = None
        self.keep: tuple[Beginning, np.ndarray] | None = None
        self.working: int | None = None
        self.scores = np.full((len(tokens), 1), np.nan)
        self.missing = len(tokens) - (start == 0)
        self.requested_from, self.requested_top = NEVER, 0
        self.requests = self.used = 0

    @property
    def end(self) -> int:
        """Number of tokens up to the end of the edge."""
        return self.start + len(self.tokens)

    @property
    def top(self) -> int:
        """Number of most likely tokens that are known in the place of each token."""
        return self.scores.shape[1] // 2

    @property
    def logprobs(self) -> np.ndarray:
        return self.scores[:, 0]

    @property
    def top_tokens(self) -> np.ndarray:
        return self.scores[:, 1 : 1 + self.top].astype(np.int64)

    @property
    def top_logprobs(self) -> np.ndarray:
        return self.scores[:, 1 + self.top :]

    @property
    def nbytes(self) -> int:
        """Memory in bytes of the edge, its tokens and their log-probabilities."""
        return EDGE_BYTES + self.tokens.nbytes + self.scores.nbytes

    def next_ids(self, count: int) -> np.ndarray:
        """Return the int32 [count] ids of the next tokens."""
        return self.tokens[(at := self.position - self.start) : at + count]

    def path(self) -> list["LiveEdge"]:
        """Return the edges from below the root to this one."""
        edges, edge = [], self
        while edge.parent is not None:
            edges.append(edge)
            edge = edge.parent
        return edges[::-1]

    def below(self) -> Iterator["LiveEdge"]:
        """Yield this edge and all edges below it, parents first."""
        pending: list[LiveEdge] = [self]
        while pending:
            edge = pending.pop()
            yield edge
            pending += edge.children.values()

    def unknown(self, first: int, top: int) -> np.ndarray:
        """Return the indices on this edge of tokens from ``first`` of the sequence on whose
        requested scores are unknown, except for the first token of a sequence."""
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
        """Store the scores of the tokens at some indices on this edge."""
        if top_tokens is not None and top_logprobs is not None:
            if (found := top_tokens.shape[1]) > self.top:
                # Scores with fewer top tokens are computed again.
                self.scores = np.zeros((len(self.tokens), 1 + 2 * found))
                self.logprobs[:] = np.nan
            self.scores[indices, 1 : 1 + self.top] = top_tokens[:, : self.top]
            self.scores[indices, 1 + self.top :] = top_logprobs[:, : self.top]
        self.logprobs[indices] = np.where(np.isnan(logprobs), np.inf, logprobs)
        self.count()

    def count(self) -> None:
        """Update ``missing``."""
        self.missing = int(np.isnan(self.logprobs[self.start == 0 :]).sum())


def insert(root: LiveEdge, tokens: np.ndarray) -> LiveEdge:
    """Return the edge at whose end a sequence of at least one token ends, adding or cutting one if
    necessary."""
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
    """Return the number of leading tokens of a sequence that are in a tree."""
    edge, depth = root, 0
    while depth < len(tokens) and (child := edge.children.get(int(tokens[depth]))) is not None:
        common = common_prefix(child.tokens, tokens[depth : depth + len(child.tokens)])
        depth += common
        if common < len(child.tokens):
            break
        edge = child
    return depth


def split(edge: LiveEdge, length: int) -> LiveEdge:
    """Cut an edge after ``length`` tokens of the sequence. Returns the first part, a new edge; the
    second part is the old edge."""
    own, parent = length - edge.start, edge.parent
    assert parent is not None
    # Copy, so that one part can be freed while the other is kept.
    first = LiveEdge(edge.tokens[:own].copy(), edge.start, parent)
    parent.children[int(edge.tokens[0])] = first
    first.scores, edge.scores = edge.scores[:own].copy(), edge.scores[own:].copy()
    first.requests, first.used = edge.requests, edge.used
    first.requested_from, first.requested_top = edge.requested_from, edge.requested_top
    if edge.working is not None and edge.position < length:
        # Reading has not passed the cut.
        first.working, first.position, edge.working = edge.working, edge.position, None
    edge.tokens, edge.start, edge.parent = edge.tokens[own:].copy(), length, first
    first.count()
    edge.count()
    if edge.working is None:
        edge.position = edge.start
    first.children[int(edge.tokens[0])] = edge
    return first


def remove_oldest(roots: Iterable[LiveEdge], max_bytes: int) -> Iterator[LiveEdge]:
    """Remove the least recently used edges from trees until they take at most ``max_bytes``, and
    yield each. Edges with unfinished requests or with children stay."""
    edges = [edge for root in roots for edge in root.below() if edge.parent is not None]
    total = sum(edge.nbytes for edge in edges)
    for edge in sorted(edges, key=lambda one: (one.used, -one.start)):
        if total <= max_bytes:
            break
        if edge.requests or edge.children or edge.parent is None:
            continue
        del edge.parent.children[int(edge.tokens[0])]
        total -= edge.nbytes
        yield edge
