"""Where a live tree takes states from a folder, and which of its states are kept there."""

from collections.abc import Container

import numpy as np

from griffin_eval.engine.live.tree import LiveEdge, insert, shared
from griffin_eval.states.state_cache import LEAST, Beginning, StateCache


def place(
    root: LiveEdge,
    tokens: np.ndarray,
    cache: StateCache,
    most: int,
    softmax_dtype: str,
    held: Container[LiveEdge],
) -> tuple[LiveEdge, Beginning] | None:
    """Puts a prompt into a tree, cut where its states are on disk, or are to be kept there.

    What the tree had of it already is what several prompts begin with: at its end an edge gets
    ``keep``, if a state there saves `LEAST` tokens. An edge also ends at the prompt's own last
    beginning, so that its state is there when another prompt goes on from it.

    Args:
        root: of the tree, for texts from their first token.
        tokens: int32 [N], of the prompt.
        cache: the folder.
        most: most tokens of a beginning from whose state the prompt can go on; from longer ones it
            can where their log-probabilities are on disk.
        softmax_dtype: of these.
        held: edges of the tree whose states are in memory.

    Returns:
        The edge at whose end the state of the longest such beginning belongs, and which one it is;
        None if there is none on disk, or the tree has a state that is as long.
    """
    common = shared(root, tokens)
    last = insert(root, tokens)
    path = last.path()
    known = max((edge.end + 1 for edge in path if edge.keep), default=0)
    stored = bare = keep = own = None
    for own in cache.beginning().longer(tokens, len(tokens)):
        if own.key in cache:
            known = max(known, own.tokens)
            scored = own.scores_key(softmax_dtype) in cache
            stored = own if own.tokens <= most or scored else stored
            bare = None if scored else own
        if own.tokens <= common:
            keep = own
    if keep is None or keep.tokens - known < LEAST:
        keep = bare  # whose log-probabilities may come to be known
    if keep is not None:
        edge = insert(root, tokens[: keep.tokens - 1])
        edge.keep = keep, tokens[: keep.tokens].copy()
    if own is not None and own.tokens - known >= LEAST:
        insert(root, tokens[: own.tokens - 1])
    have = max((edge.end for edge in last.path() if edge in held), default=0)
    if stored is None or stored.tokens - 1 <= have:
        return None
    return insert(root, tokens[: stored.tokens - 1]), stored
