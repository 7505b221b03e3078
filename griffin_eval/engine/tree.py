"""Token sequences as a radix tree, in which every shared prefix is one edge.

A sequence to score is a path of all its tokens but the last; where the next token is scored, the
path has a target. Sequences that begin alike share edges, so reading every edge once answers all of
them: duplicates, prefixes of each other, choices of one question, questions on one document.
"""

import enum
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Limits of the tokens that a tree repeats to avoid almost empty steps: a fraction and a number.
REPEATED, MAX_REPEATED = 1 / 50, 128


class Ablation(enum.IntFlag):
    """Memory that is cleared in the middle of a document: states of recurrent blocks, keys and
    values of attention, or both."""

    NOTHING = 0
    RECURRENT = 1
    ATTENTION = 2


class Scorable(NamedTuple):
    """Token ids; those from ``start`` on (at least 1) are scored given all tokens before them.

    The memory that ``ablation`` names is cleared before token ``start - 1`` is read, the last token
    of the context, so every scored token is predicted without that memory.
    """

    tokens: Sequence[int] | np.ndarray
    start: int
    ablation: Ablation = Ablation.NOTHING

    @property
    def path(self) -> np.ndarray:
        """int32 [N - 1], the ids of all tokens but the last. Tokens from the ablation on have its
        value in their bits from ``ABLATION_SHIFT`` on."""
        tokens = np.asarray(self.tokens, np.int32)[:-1]
        if self.ablation:
            tokens = tokens.copy()
            tokens[self.start - 1 :] |= self.ablation << ABLATION_SHIFT
        return tokens


# The bits of a path above the ids hold the ablation. So sequences diverge in the tree where only
# one of them is ablated, as they do where their tokens differ.
ABLATION_SHIFT = 28

_COMPARED = 1 << 14  # tokens compared at a time while sorting


def ids_of(path: np.ndarray) -> np.ndarray:
    """Return the int32 token ids of a path (see `Scorable.path`)."""
    return path & ((1 << ABLATION_SHIFT) - 1)


def ablation_of(path: np.ndarray) -> np.ndarray:
    """Return the int32 `Ablation` value before each token of a path."""
    return path >> ABLATION_SHIFT


class Targets(NamedTuple):
    """A run of adjacent targets of one sequence on one edge."""

    start: int  # index on the edge of the token that predicts the first target
    end: int  # index on the edge of the token that predicts the last target, plus one
    sequence: int
    place: int  # index of the first target among the sequence's scored tokens


class Edge:
    """Tokens that follow a prefix, and the edges after them.

    Attributes:
        path: int32, the tokens from the root to the end of some sequence through this edge, as in
            `Scorable.path`.
        start, end: Range of the edge's own tokens in ``path``.
        parent: Edge before this one; None at the root.
        children: Edges after this one, in the order of their first tokens.
        targets: Targets on the edge, in the order of the sequences.
        sequence: Index of the sequence that ends here, for the edges without tokens that
            `build_prompts` adds; None for others.
        stored: Key of the state at its end if that is on disk.
        keep: Key under which the state at its end will be saved to disk.
    """

    __slots__ = (
        "children",
        "end",
        "keep",
        "parent",
        "path",
        "sequence",
        "start",
        "stored",
        "targets",
    )

    def __init__(self, path: np.ndarray, start: int, end: int, parent: "Edge | None"):
        self.path, self.start, self.end, self.parent = path, start, end, parent
        self.children: list[Edge] = []
        self.targets: list[Targets] = []
        self.sequence: int | None = None
        self.stored: str | None = None
        self.keep: str | None = None

    @property
    def tokens(self) -> np.ndarray:
        return self.path[self.start : self.end]


class Tree(NamedTuple):
    """A radix tree."""

    roots: list[Edge]
    tokens: int  # total length of all edges if every shared prefix is one edge
    repeated: int  # tokens of short edges near the root that their children repeat


def build(sequences: Sequence[Scorable]) -> Tree:
    """Return the radix tree of sequences to score, in time proportional to their tokens plus
    sorting. All tokens of a sequence but the last are read."""
    paths = [sequence.path for sequence in sequences]
    root, ends = _grow(paths, merge=True)
    for index, (sequence, path) in enumerate(zip(sequences, paths, strict=True)):
        edge = ends[index]
        while edge is not root and edge.end >= sequence.start:
            start, end = max(sequence.start - 1, edge.start), min(len(path), edge.end)
            if start < end:
                place = start + 1 - sequence.start
                edge.targets.append(Targets(start - edge.start, end - edge.start, index, place))
            assert edge.parent is not None
            edge = edge.parent
    return _rooted(root)


def build_prompts(prompts: Sequence[Sequence[int] | np.ndarray]) -> Tree:
    """Return the radix tree of prompts, with an edge without tokens at the end of each."""
    paths = [np.asarray(tokens, np.int32) for tokens in prompts]
    root, ends = _grow(paths, merge=False)
    for index, (path, edge) in enumerate(zip(paths, ends, strict=True)):
        end = Edge(path, len(path), len(path), edge)
        end.sequence = index
        edge.children.insert(0, end)
    return _rooted(root)


def _grow(paths: list[np.ndarray], *, merge: bool) -> tuple[Edge, list[Edge]]:
    """Return an empty root edge of all paths, and the edge on which each path ends. With ``merge``,
    an edge may continue past the end of a path if only one other path does."""
    root = Edge(np.empty(0, np.int32), 0, 0, None)
    stack, previous = [root], root.path
    ends = [root] * len(paths)
    for index in order(paths):
        path = paths[index]
        common = common_prefix(previous, path)
        # Find the edge on which this path diverges from the previous one.
        while stack[-1].start >= common and stack[-1] is not root:
            stack.pop()
        top = stack[-1]
        if len(path) > common:
            if top.end > common:
                stack[-1] = top = split_at(top, common)
            if merge and not top.children and top is not root:  # the previous path ended here
                top.path, top.end = path, len(path)
            else:
                stack.append(Edge(path, top.end, len(path), top))
                top.children.append(stack[-1])
        ends[index], previous = stack[-1], path
    return root, ends


def _rooted(root: Edge) -> Tree:
    total, pending = 0, list(root.children)
    while pending:
        edge = pending.pop()
        total += edge.end - edge.start
        pending += edge.children
    repeated = _dissolve(root, min(int(total * REPEATED), MAX_REPEATED))
    for edge in root.children:
        edge.parent = None
    return Tree(root.children, total, repeated)


def _dissolve(root: Edge, max_repeated: int) -> int:
    """Repeat up to ``max_repeated`` tokens of short edges in each of their children, root first.

    Otherwise an edge such as BOS alone is a step of its own, for which all others wait. Returns the
    number of repeated tokens.
    """
    left, level = max_repeated, [root]
    while left > 0 and level:
        below = []
        for parent in level:
            children: list[Edge] = []
            for edge in parent.children:
                repeated = (edge.end - edge.start) * (len(edge.children) - 1)
                ends = any(child.sequence is not None for child in edge.children)
                if not edge.children or ends or repeated > left:
                    children.append(edge)
                    continue
                left -= repeated
                for child in edge.children:
                    longer = child.start - edge.start
                    child.start, child.parent = edge.start, parent
                    child.targets = [
                        targets._replace(start=targets.start + longer, end=targets.end + longer)
                        for targets in child.targets
                    ]
                first = edge.children[0]
                first.targets = edge.targets + first.targets
                children += edge.children
            parent.children = children
            below += children
        level = below
    return max_repeated - left


def split_at(edge: Edge, length: int) -> Edge:
    """Cut an edge after ``length`` tokens of its path. Returns the first part, a new edge; the
    second part is the old edge with its children."""
    first = Edge(edge.path, edge.start, length, edge.parent)
    if edge.parent is not None:
        siblings = edge.parent.children
        siblings[-1 if siblings[-1] is edge else siblings.index(edge)] = first
    first.children.append(edge)
    own = length - edge.start
    first.targets = [t._replace(end=min(t.end, own)) for t in edge.targets if t.start < own]
    edge.targets = [
        t._replace(
            start=max(t.start - own, 0), end=t.end - own, place=t.place + max(own - t.start, 0)
        )
        for t in edge.targets
        if t.end > own
    ]
    edge.start, edge.parent = length, first
    return first


def order(paths: Sequence[np.ndarray]) -> list[int]:
    """Return the indices of token sequences in lexicographic order."""
    ordered: list[int] = []
    groups = [(list(range(len(paths))), 0)]  # indices of paths equal up to a token, first on top
    while groups:
        group, begin = groups.pop()
        if len(group) < 2 or begin > len(paths[group[0]]):
            ordered += group
            continue
        # Big-endian bytes sort as the tokens do.
        end = begin + _COMPARED
        keys = {i: paths[i][begin:end].astype(">i4").tobytes() for i in group}
        equal = itertools.groupby(sorted(group, key=keys.__getitem__), keys.__getitem__)
        groups += [(list(some), end) for _, some in equal][::-1]
    return ordered


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of leading tokens that two sequences share."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
