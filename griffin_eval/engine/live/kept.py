"""Exchange of states and log-probabilities between a live tree and a folder on disk."""

from collections.abc import Container

import numpy as np

from griffin_eval.engine.live.tree import LiveEdge, insert, shared
from griffin_eval.engine.pool import Pool
from griffin_eval.states.state_cache import MIN_TOKENS, Beginning, StateCache


def place(
    root: LiveEdge,
    tokens: np.ndarray,
    cache: StateCache,
    max_tokens: int,
    softmax_dtype: str,
    in_memory: Container[LiveEdge],
) -> tuple[LiveEdge, Beginning] | None:
    """Insert a prompt into a tree, cut where states are on disk or will be saved to disk.

    The part of the prompt that the tree had already is a shared prefix: the edge at its end gets
    ``keep`` if a state there saves `MIN_TOKENS` tokens. The tree is also cut at the prompt's own
    last cacheable beginning, so that its state is available to prompts that continue it.

    Beginnings of more than ``max_tokens`` qualify only if their log-probabilities are on disk.
    ``in_memory`` contains the edges whose states the pool has.

    Returns:
        The longest beginning on disk and the edge at whose end its state belongs; None if there is
        none, or the tree holds a state that is at least as long.
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
            stored = own if own.tokens <= max_tokens or scored else stored
            bare = None if scored else own
        if own.tokens <= common:
            keep = own
    if keep is None or keep.tokens - known < MIN_TOKENS:
        keep = bare  # its log-probabilities may become known later
    if keep is not None:
        edge = insert(root, tokens[: keep.tokens - 1])
        edge.keep = keep, tokens[: keep.tokens].copy()
    if own is not None and own.tokens - known >= MIN_TOKENS:
        insert(root, tokens[: own.tokens - 1])
    have = max((edge.end for edge in last.path() if edge in in_memory), default=0)
    if stored is None or stored.tokens - 1 <= have:
        return None
    return insert(root, tokens[: stored.tokens - 1]), stored


def learn(
    path: list[LiveEdge], cache: StateCache, beginning: Beginning, top: int, softmax_dtype: str
) -> bool:
    """Load the log-probabilities of a beginning, and of the ``top`` most likely tokens, into a
    prompt's path; return whether they were on disk."""
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
    """Save the state after an edge with ``keep`` once it is held, then the log-probabilities up to
    there once all are known."""
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
    """Return the scores of all tokens of a path but the first, up to the first token of its last
    edge; None if some are unknown."""
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
