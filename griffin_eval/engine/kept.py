"""Prepares a tree for states that are kept on disk: where reading begins, and what is kept."""

from griffin_eval.engine.tree import Edge, Tree, split_at
from griffin_eval.states.state_cache import LEAST, StateCache


def prepare(tree: Tree, cache: StateCache) -> Tree:
    """The same tree, without the beginnings whose states are kept; it is changed in place.

    An edge that ends where a state is on disk becomes a root, with ``Edge.stored``; what only led
    to it is gone. Edges at whose ends states are to be kept have ``Edge.keep``.
    """
    roots: list[Edge] = []
    before = _tokens(tree.roots)
    for root in tree.roots:
        _cut(root, cache)
    for root in _tops(tree.roots):
        if _needed(root, roots):
            roots.append(root)
    return Tree(roots, tree.tokens - (before - _tokens(roots)), tree.repeated)


def _tokens(roots: list[Edge]) -> int:
    """Tokens of all edges that are read."""
    total, pending = 0, [*roots]
    while pending:
        edge = pending.pop()
        total += 0 if edge.stored else edge.end - edge.start
        pending += edge.children
    return total


def _tops(roots: list[Edge]) -> list[Edge]:
    """The roots, or the first parts of those that were cut."""
    tops = []
    for edge in roots:
        while edge.parent is not None:
            edge = edge.parent
        tops.append(edge)
    return tops


def _cut(first: Edge, cache: StateCache) -> None:
    """Cuts a root and the edges after it, where states are on disk or are to be kept."""
    # Each with the longest beginning before it, and the length of the last one whose state is there
    # or will be.
    pending = [(first, cache.beginning(), 0)]
    while pending:
        edge, before, last = pending.pop()
        # Tokens after which something is scored have to be read.
        most = min([edge.end, *(edge.start + each.start + 1 for each in edge.targets)])
        begin = edge.start + 1
        stored = keep = None
        for longer in before.longer(edge.path, edge.end):
            if begin < longer.tokens <= most and longer.key in cache:
                stored = longer
            before = keep = longer
        if stored is not None:
            split_at(edge, stored.tokens - 1).stored = stored.key
            last = stored.tokens
        fork = len(edge.children) > 1
        if fork and keep and keep.tokens > begin and keep.tokens - last >= LEAST:
            split_at(edge, keep.tokens - 1).keep = keep.key
            last = keep.tokens
        pending += [(child, before, last) for child in edge.children]


def _needed(edge: Edge, roots: list[Edge]) -> bool:
    """Whether an edge has to be read for itself or for what follows; edges whose states are on
    disk and whose followers have to be read are added to the roots."""
    order, pending = [], [edge]
    while pending:
        one = pending.pop()
        order.append(one)
        pending += one.children
    needed: set[Edge] = set()
    for one in reversed(order):  # children before their parents
        had = bool(one.children)
        one.children = [child for child in one.children if child in needed]
        if one.stored and one.children:
            one.parent, one.start = None, 0  # what is read if the state is lost
            roots.append(one)
        elif not one.stored and (one.children or one.targets or one.sequence is not None):
            needed.add(one)
        elif not one.stored and not had:  # nothing follows, and nothing is scored: kept as it was
            needed.add(one)
    return edge in needed
