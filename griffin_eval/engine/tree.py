"""Token sequences as a radix tree, in which every shared prefix is one edge.

A sequence to score is a path: each of its tokens but the last is read, and wherever the token that
follows counts, the path carries a target. Sequences that begin alike share the edges of what they
have in common, so that reading every edge once answers all of them, whatever they are: duplicates,
prefixes of each other, choices of one question, questions on one document.
"""

import enum
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Tokens that a tree may repeat, to spare steps that would be almost empty: a part of all of them,
# and how many at most.
REPEATED, MOST_REPEATED = 1 / 50, 128


class Ablation(enum.IntFlag):
    """Memory that is cleared in the middle of a document: states of recurrent blocks, keys of
    attention, or both."""

    NOTHING = 0
    RECURRENT = 1
    ATTENTION = 2


class Scorable(NamedTuple):
    """Token ids, of which those from ``start`` on are scored given all before them; start >= 1.

    Before token ``start - 1`` is read, the last token of the context, the memory that ``ablation``
    names is cleared; so every scored token is predicted without it.
    """

    tokens: Sequence[int] | np.ndarray
    start: int
    ablation: Ablation = Ablation.NOTHING

    @property
    def path(self) -> np.ndarray:
        """int32 [N - 1], what is read: the ids of all tokens but the last. Those that are read
        after the ablation have its number in their bits from ``ABLATION_SHIFT`` on."""
        tokens = np.asarray(self.tokens, np.int32)[:-1]
        if self.ablation:
            tokens = tokens.copy()
            tokens[self.start - 1 :] |= self.ablation << ABLATION_SHIFT
        return tokens


# The bits of a path above the ids say which memory was cleared before a token is read. So sequences
# part in the tree where only one of them is ablated, as they do where their tokens differ.
ABLATION_SHIFT = 28

_COMPARED = 1 << 14  # tokens at a time


def ids_of(path: np.ndarray) -> np.ndarray:
    """int32, the token ids of a path (see `Scorable.path`)."""
    return path & ((1 << ABLATION_SHIFT) - 1)


def ablation_of(path: np.ndarray) -> np.ndarray:
    """int32, the memory that was cleared before each token of a path, as numbers of `Ablation`."""
    return path >> ABLATION_SHIFT


class Targets(NamedTuple):
    """Neighbouring targets of one sequence on one edge. They are a range, however many they are.

    Attributes:
        start: the token of the edge after which the first target follows, from 0.
        end: the token after which the last one follows, plus one.
        sequence: index of the sequence that the targets belong to.
        place: index of the first target among that sequence's scored tokens.
    """

    start: int
    end: int
    sequence: int
    place: int


class Edge:
    """Tokens that follow a prefix, and what comes after them.

    Attributes:
        path: int32, the tokens from the root to the end of some sequence through this edge, as
            `Scorable.path` has them.
        start, end: where in ``path`` the edge's own tokens are.
        parent: the edge before, None at the root.
        children: the edges after, in the order of their first tokens.
        targets: what is scored on the edge, in the order of the sequences.
        sequence: index of the sequence that ends here, on the edges without tokens that
            `build_prompts` adds; else None.
        stored: key of the state at its end, which is on disk; else None.
        keep: key under which the state at its end is to be kept on disk; else None.
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
    """A radix tree.

    Attributes:
        roots: the edges that begin at the root.
        tokens: sum of the lengths of all edges in which every shared prefix is one.
        repeated: tokens of short edges near the root that each of their children has instead.
    """

    roots: list[Edge]
    tokens: int
    repeated: int


def build(sequences: Sequence[Scorable]) -> Tree:
    """The radix tree of sequences to score, in time proportional to their tokens plus sorting.

    All tokens of a sequence but the last are read.
    """
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
    """The radix tree of prompts. The end of each is an edge without tokens (`Edge.sequence`)."""
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
        paths: int32 arrays of tokens.
        merge: let an edge go on where a path ends on it and only one other path continues.
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
                stack[-1] = top = split_at(top, common)
            if merge and not top.children and top is not root:  # the last path ended here
                top.path, top.end = path, len(path)
            else:
                stack.append(_child(top, path))
        ends[index], previous = stack[-1], path
    return root, ends


def _rooted(root: Edge) -> Tree:
    total, pending = 0, list(root.children)
    while pending:
        edge = pending.pop()
        total += edge.end - edge.start
        pending += edge.children
    repeated = _dissolve(root, min(int(total * REPEATED), MOST_REPEATED))
    for edge in root.children:
        edge.parent = None
    return Tree(root.children, total, repeated)


def _dissolve(root: Edge, most: int) -> int:
    """Gives the tokens of short edges to each of their children, the edges next to the root first.
    An edge, such as BOS alone, is otherwise a step of its own, for which all others wait.

    Args:
        most: tokens that may be repeated.

    Returns:
        How many are.
    """
    left, level = most, [root]
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
    return most - left


def _child(parent: Edge, path: np.ndarray) -> Edge:
    edge = Edge(path, parent.end, len(path), parent)
    parent.children.append(edge)
    return edge


def split_at(edge: Edge, length: int) -> Edge:
    """Cuts an edge after ``length`` tokens of its path. The first part is a new edge, which is
    returned; the second is the old one, with its children."""
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
    """Indices of token sequences in lexicographic order, which puts shared prefixes together."""
    ordered: list[int] = []
    groups = [(list(range(len(paths))), 0)]  # equal up to a token, the first group on top
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
    """Number of leading tokens that two sequences share."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length
