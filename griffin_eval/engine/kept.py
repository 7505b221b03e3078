"""Prepares a radix tree for states on disk: where reading starts, and which states are saved."""

from griffin_eval.engine.tree import Edge, Tree, split_at
from griffin_eval.states.state_cache import MIN_TOKENS, StateCache


def prepare(tree: Tree, cache: StateCache) -> Tree:
    """Prune prefixes whose states are cached on disk (in place).

    An edge that ends at a cached state becomes a root with ``Edge.stored``; edges that only led to
    it are removed. Edges at whose ends a state will be saved get ``Edge.keep``.
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
    """Return the number of tokens that reading all edges takes."""
    total, pending = 0, [*roots]
    while pending:
        edge = pending.pop()
        total += 0 if edge.stored else edge.end - edge.start
        pending += edge.children
    return total


def _tops(roots: list[Edge]) -> list[Edge]:
    """Return the roots, or the first part of each root that was cut."""
    tops = []
    for edge in roots:
        while edge.parent is not None:
            edge = edge.parent
        tops.append(edge)
    return tops


def _cut(first: Edge, cache: StateCache) -> None:
    """Cut a root and the edges below it where states are on disk or will be saved."""
    # Each entry has an edge, the longest beginning before it, and the length of the last beginning
    # whose state is or will be on disk.
    pending = [(first, cache.beginning(), 0)]
    while pending:
        edge, before, last = pending.pop()
        # Tokens that predict a target have to be read.
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
        if fork and keep and keep.tokens > begin and keep.tokens - last >= MIN_TOKENS:
            split_at(edge, keep.tokens - 1).keep = keep.key
            last = keep.tokens
        pending += [(child, before, last) for child in edge.children]


def _needed(edge: Edge, roots: list[Edge]) -> bool:
    """Return whether an edge has to be read for its own targets or for edges below it. Edges with a
    state on disk are appended to ``roots`` if edges below them have to be read."""
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
            one.parent, one.start = None, 0  # so that it can be read if the state is lost
            roots.append(one)
        elif not one.stored and (one.children or one.targets or one.sequence is not None):
            needed.add(one)
        elif not one.stored and not had:  # an edge that was a leaf without targets from the start
            needed.add(one)
    return edge in needed
