"""Token sequences as a radix tree, in which every shared prefix is one edge.

A sequence to score is a path: each of its tokens but the last is read, and wherever the token that
follows counts, the path carries a target. Sequences that begin alike share the edges of what they
have in common, so that reading every edge once answers all of them, whatever they are: duplicates,
prefixes of each other, choices of one question, questions on one document.
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Forget(enum.IntFlag):
    """What a document may lose in the middle: states of recurrent blocks, keys of attention."""

    NOTHING = 0
    RECURRENT = 1
    ATTENTION = 2


class Scorable(NamedTuple):
    """Token ids, of which those from ``start`` on are scored given all before them; start >= 1.

    What ``forget`` says is forgotten before token ``start - 1`` is read. That token is the first
    with something to predict, so that nothing is scored with what was forgotten in mind.
    """

    tokens: Sequence[int] | np.ndarray
    start: int
    forget: Forget = Forget.NOTHING

    @property
    def path(self) -> np.ndarray:
        """int32, what is read: all tokens but the last, marked where something was forgotten."""
        tokens = np.asarray(self.tokens, np.int32)[:-1]
        if self.forget:
            tokens = tokens.copy()
            tokens[self.start - 1 :] |= self.forget << MARK
        return tokens


# Tokens are marked by the bits above their ids with what was forgotten before them. So sequences
# part where only one of them forgets, as they do where their tokens differ.
MARK = 28


def unmarked(path: np.ndarray) -> np.ndarray:
    """The ids of tokens of a path."""
    return path & ((1 << MARK) - 1)


def forgotten(path: np.ndarray) -> np.ndarray:
    """What was forgotten before each token of a path, as numbers of `Forget`."""
    return path >> MARK


class Targets(NamedTuple):
    """What is scored on an edge, in the order of the edge's tokens.

    Attributes:
        offset: int32 [N], the token of the edge after which a target follows, from 0.
        token: int32 [N], the target.
        sequence: int32 [N], which sequence wants to know.
        place: int64 [N], which of that sequence's scored tokens it is.
    """

    offset: np.ndarray
    token: np.ndarray
    sequence: np.ndarray
    place: np.ndarray


class Edge:
    """Tokens that follow a prefix, and what comes after them.

    Attributes:
        path: int32, the tokens from the root to the end of some sequence through this edge, as
            `Scorable.path` has them.
        start, end: where in ``path`` the edge's own tokens are.
        parent: the edge before, None at the root.
        children: the edges after, in the order of their first tokens.
        targets: what is scored on the edge.
        sequence: which sequence ends here, on edges without tokens that say just that.
    """

    __slots__ = ("children", "end", "parent", "path", "sequence", "start", "targets")

    def __init__(self, path: np.ndarray, start: int, end: int, parent: "Edge | None"):
        self.path, self.start, self.end, self.parent = path, start, end, parent
        self.children: list[Edge] = []
        self.targets: Targets | None = None
        self.sequence: int | None = None

    @property
    def tokens(self) -> np.ndarray:
        return self.path[self.start : self.end]


class Tree(NamedTuple):
    """The edges that begin at the root, and how many tokens all edges hold together."""

    roots: list[Edge]
    tokens: int


def build(sequences: Sequence[Scorable]) -> Tree:
    """The radix tree of sequences to score, in time proportional to their tokens, beside sorting.

    All their tokens but the last are read.
    """
    paths = [sequence.path for sequence in sequences]
    root, ends = _grow(paths, merge=True)
    parts: dict[Edge, list[Targets]] = {}
    for index, (sequence, path) in enumerate(zip(sequences, paths, strict=True)):
        edge, tokens = ends[index], np.asarray(sequence.tokens, np.int32)
        while edge is not root and edge.end >= sequence.start:
            at = np.arange(max(sequence.start - 1, edge.start), min(len(path), edge.end))
            if len(at):
                parts.setdefault(edge, []).append(
                    Targets(
                        (at - edge.start).astype(np.int32),
                        tokens[at + 1],
                        np.full(len(at), index, np.int32),
                        at + 1 - sequence.start,
                    )
                )
            assert edge.parent is not None
            edge = edge.parent
    for edge, found in parts.items():
        joined = found[0]
        if len(found) > 1:
            joined = Targets(*(np.concatenate(column) for column in zip(*found, strict=True)))
            by_offset = np.argsort(joined.offset, kind="stable")
            joined = Targets(*(column[by_offset] for column in joined))
        edge.targets = joined

    return _rooted(root)


def build_prompts(prompts: Sequence[Sequence[int] | np.ndarray]) -> Tree:
    """The radix tree of sequences to read to their ends, which are edges without tokens."""
    paths = [np.asarray(tokens, np.int32) for tokens in prompts]
    root, ends = _grow(paths, merge=False)
    for index, (path, edge) in enumerate(zip(paths, ends, strict=True)):
        end = Edge(path, len(path), len(path), edge)
        end.sequence = index
        edge.children.insert(0, end)
    return _rooted(root)


def _grow(paths: list[np.ndarray], *, merge: bool) -> tuple[Edge, list[Edge]]:
    """An empty edge from which all paths start, and the edge on which each of them ends.

    Args:
        paths: tokens.
        merge: no edge ends just because a path does.
    """
    root = Edge(np.empty(0, np.int32), 0, 0, None)
    stack, previous = [root], root.path
    ends = [root] * len(paths)
    for index in order(paths):
        path = paths[index]
        common = common_prefix(previous, path)
        # From here on the top of the stack is the edge on which this path leaves the last one.
        while stack[-1].start >= common and stack[-1] is not root:
            stack.pop()
        top = stack[-1]
        if len(path) > common:
            if top.end > common:
                stack[-1] = top = _split(top, common)
            if merge and not top.children and top is not root:  # the last path ended here
                top.path, top.end = path, len(path)
            else:
                stack.append(_child(top, path))
        ends[index], previous = stack[-1], path
    return root, ends


def _rooted(root: Edge) -> Tree:
    total, pending = 0, list(root.children)
    for edge in root.children:
        edge.parent = None
    while pending:
        edge = pending.pop()
        total += edge.end - edge.start
        pending += edge.children
    return Tree(root.children, total)


def _child(parent: Edge, path: np.ndarray) -> Edge:
    edge = Edge(path, parent.end, len(path), parent)
    parent.children.append(edge)
    return edge


def _split(edge: Edge, at: int) -> Edge:
    """Cuts an edge in two; the first part is new, the second keeps its children and its name."""
    assert edge.parent is not None
    first = Edge(edge.path, edge.start, at, edge.parent)
    assert edge.parent.children[-1] is edge  # sequences come in order
    edge.parent.children[-1] = first
    first.children.append(edge)
    edge.start, edge.parent = at, first
    return first


def order(paths: Sequence[np.ndarray]) -> list[int]:
    """Indices of token sequences, sorted so that what begins alike is together."""
    # Big-endian bytes sort as the tokens do.
    return sorted(range(len(paths)), key=lambda i: paths[i].astype(">i4").tobytes())


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """How many leading tokens two sequences share."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
