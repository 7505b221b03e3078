"""What a live tree takes from a folder of states, and what of it is kept there."""

from collections.abc import Container

import numpy as np

from griffin_eval.engine.live.tree import LiveEdge, insert, shared
from griffin_eval.engine.pool import Pool
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


def learn(
    path: list[LiveEdge], cache: StateCache, beginning: Beginning, top: int, softmax_dtype: str
) -> bool:
    """Takes the log-probabilities of a beginning from a folder; whether they were there.

    Args:
        path: edges of a prompt that begins so.
        beginning: whose tokens they are.
        top: number of likeliest tokens that are needed beside each.
        softmax_dtype: of the log-probabilities.
    """
    scores = cache.load_scores(beginning.scores_key(softmax_dtype), beginning.tokens)
    if scores is None or scores["top_tokens"].shape[1] < top:
        return False
    for edge in path:
        first, last = max(edge.start, 1), min(edge.end, beginning.tokens)
        count = max(edge.top, top)
        if first < last and count <= scores["top_tokens"].shape[1]:
            known = slice(first - 1, last - 1)
            edge.learn(
                np.arange(first, last) - edge.start,
                scores["logprobs"][known],
                scores["top_tokens"][known, :count],
                scores["top_logprobs"][known, :count],
            )
    return True


def keep(edge: LiveEdge, cache: StateCache, pool: Pool, softmax_dtype: str) -> None:
    """Keeps what is to be kept of an edge: the state after it once it is held, and then the
    log-probabilities up to there once all are known.

    Args:
        pool: in which states are held.
        softmax_dtype: of the log-probabilities.
    """
    if edge.keep is None:
        return
    beginning, tokens = edge.keep
    if beginning.key not in cache:
        if edge not in pool:
            return
        cache.save(beginning.key, tokens, pool.tensors(pool.slot_of(edge), edge.end))
    key = beginning.scores_key(softmax_dtype)
    if cache.writes and beginning.key in cache and key not in cache:
        scores = _known_scores([*edge.path(), edge.children.get(int(tokens[-1]))])
        if scores is None:
            return
        cache.save_scores(key, scores)
    edge.keep = None


def _known_scores(path: list[LiveEdge | None]) -> dict[str, np.ndarray] | None:
    """What is known of the tokens of a path but the first, up to the first token of its last edge;
    None if that is not everything."""
    known: dict[str, list[np.ndarray]] = {"logprobs": [], "top_tokens": [], "top_logprobs": []}
    for edge in path:
        part = slice(0 if edge is None or edge.start else 1, 1 if edge is path[-1] else None)
        if edge is None or np.isnan(edge.logprobs[part]).any():
            return None
        for name, parts in known.items():
            parts.append(getattr(edge, name)[part])
    top = min(part.shape[1] for part in known["top_tokens"])
    return {
        name: np.concatenate([part[..., :top] if part.ndim > 1 else part for part in parts])
        for name, parts in known.items()
    }
