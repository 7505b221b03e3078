"""Reads the prompts of requests that arrive and leave at any time, sharing common prefixes.

All prompts are sequences in one radix tree (`griffin_eval.engine.live.tree`). A step reads parts of
several edges; where sequences diverge, the state and its prediction are kept until memory is
needed. So a common prefix of several requests is read once, and scored tokens are not read again.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from griffin_eval.engine.limits import SMALLEST_STEP, Limits
from griffin_eval.engine.live.kept import keep, learn, place
from griffin_eval.engine.live.requests import Counts, PromptScores, Request
from griffin_eval.engine.live.tree import EDGE_BYTES, NEVER, LiveEdge, insert, remove_oldest
from griffin_eval.engine.memory import return_freed_memory
from griffin_eval.engine.pool import Part, Pool
from griffin_eval.runners.protocol import Runner
from griffin_eval.states.saved_state import SavedState
from griffin_eval.states.state_cache import StateCache

MAX_EDGES = 63  # maximum number of edges in a step
TOKEN_BYTES = 12  # memory of a token's id and log-probability
# The tree is looked through each time it may have grown by this fraction of its limit, so that the
# heap, which its small arrays fragment, stays as small as it was.
GROWTH = 1 / 16
SHORT = 8  # whole steps; a prompt with fewer left to read is not slowed down for decoding
FORGOTTEN = 0.998  # decay of the time of a step that took too long, so that it is tried again
LONG = 512  # length of an edge whose state is kept even if no request needs it yet
SIZES = (16, 128, 512, 4096)  # tokens of a step if each size has to be compiled
USES = 5  # uses of a step shape before a runner compiles it


class PromptReader:
    """The tree of prompts, the pool of their states, and the steps that read them.

    Args:
        slots: Size of the pool, saved states included.
        capacity: Maximum number of tokens of a document, which global attention needs.
        saved: Saved states by name, which requests can continue.
        tree_bytes: Memory limit in bytes for the tree's tokens and their log-probabilities.
        cache: Folder of states on disk that are read and added to.

    Attributes:
        requests: Requests that wait for their prompts to be read, or for a row.
        roots: Roots of the tree by the name of the saved state; None for no saved state.
        pool: States at the ends of edges, and inside edges that are being read.
    """

    def __init__(
        self,
        runner: Runner,
        slots: int,
        capacity: int,
        softmax_dtype: str,
        saved: dict[str, SavedState],
        counts: Counts,
        tree_bytes: int,
        cache: StateCache | None = None,
    ):
        self._tree_bytes = tree_bytes
        self._runner, self._slots, self._capacity = runner, slots, capacity
        self._softmax_dtype, self._saved, self._counts = softmax_dtype, saved, counts
        self._cache = cache
        limits = Limits(runner.step_tokens, min(runner.step_rows, MAX_EDGES))
        self.limits = self._max_limits = limits.fitting(runner.step_bytes(capacity))
        self._fixed_sizes = runner.padded_tokens(3) != 3
        self.requests: list[Request] = []
        self.roots: dict[str | None, LiveEdge] = {
            name: LiveEdge(np.empty(0, np.int32), 0, None) for name in (None, *saved)
        }
        self.open()
        self._at_work: set[LiveEdge] = set()  # edges of the current or last step
        self._clock = self._grown = self._largest_top = 0
        # Recent step time in seconds, keyed by step size rounded up to a power of two.
        self._step_seconds: dict[int, float] = {}

    def open(self) -> None:
        """Allocate the pool and drop all earlier states."""
        self.pool: Any = None  # free the old pool first
        for root in self.roots.values():
            for edge in root.below():
                edge.logits, edge.working, edge.position = None, None, edge.start
        self.pool = Pool(self._runner, self._slots, self._slots, self._capacity, self._evicted)
        for name, saved in self._saved.items():
            slot = self.pool.take()
            assert slot is not None
            self.pool.write(slot, saved.tensors, saved.read)
            self.pool.hold(self.roots[name], slot, pinned=True)

    def _evicted(self, edge: LiveEdge) -> None:
        edge.logits = None
        self._counts.states_evicted += 1

    def warm_up(self) -> None:
        """Run every step shape once if shapes are compiled, ``top`` values above 1 excepted."""
        if not self._fixed_sizes:
            return
        if self._cache is not None and (slot := self.pool.take()) is not None:
            self.pool.write(slot, self.pool.tensors(slot, 1), 1)
            self.pool.free(slot)
        for size in [size for size in SIZES if size <= self.limits.tokens][::-1]:
            hidden: Any = None
            for rows in (MAX_EDGES + 1, 2, 1):
                if rows > size:
                    continue
                first, one = np.zeros(size - rows + 1, np.int32), np.zeros(1, np.int32)
                parts = [Part(None, tokens, -1, -1) for tokens in [first, *[one] * (rows - 1)]]
                for _ in range(USES):
                    hidden, _ = self.pool.read(parts)
            for count in (1, *(1 << power for power in range(1, size.bit_length()))):
                at = np.arange(count)
                self._runner.logits(hidden, at)
                self._runner.score(hidden, at, at * 0, at, self._softmax_dtype)
                self._runner.score(hidden, at, at * 0, at, self._softmax_dtype, top=1)

    def needs(self, requests: Sequence[Request]) -> tuple[list[Request], list[LiveEdge]]:
        """Return the requests whose prompts are done, and the edges to read for the others."""
        ready, edges = [], dict[LiveEdge, None]()
        for request in requests:
            edge = self._next_edge(request)
            if edge is None:
                ready.append(request)
            else:
                edges[edge] = None
        return ready, list(edges)

    def read(self, edges: list[LiveEdge], pause: float | None) -> bool:
        """Read parts of edges from `needs` in one step, during which decoding may wait ``pause``
        seconds (None: nothing is decoded); return whether any could be read."""
        self._at_work = set()
        parts = self._parts(edges, pause) if edges else []
        if parts:
            self._read_parts(parts)
        return bool(parts)

    def shrink(self) -> bool:
        """Halve the limits; return False and restore them if they were at the minimum."""
        smaller = self.limits.halved()
        least, self.limits = smaller == self.limits, smaller
        if least:
            self.limits = self._max_limits
        return not least

    def at_work(self) -> list[Request]:
        """Return the requests for which the last step read."""
        return [r for r in self.requests if r.edge and self._at_work & {*r.edge.path()}]

    def enter(self, request: Request) -> None:
        """Insert a request's tokens into the tree to be read."""
        tokens = np.array([*request.tokens, *request.new], np.int32)
        root = self.roots[request.start]
        if self._cache is not None and request.start is None:
            self._go_on_from_disk(self._cache, request, tokens)
        request.edge, request.drawn = insert(root, tokens), False
        for edge in request.edge.path():
            edge.requests += 1
            if request.score_from is not None:
                edge.requested_from = min(edge.requested_from, request.score_from)
                edge.requested_top = max(edge.requested_top, request.top or 0)
        self._largest_top = max(self._largest_top, request.top or 0)
        self.requests.append(request)

    def _go_on_from_disk(self, cache: StateCache, request: Request, tokens: np.ndarray) -> None:
        """Load the state of the longest beginning of a prompt that is on disk."""
        cache.refresh()
        # Tokens that predict a scored token have to be read, unless its score is known.
        most = len(tokens) if request.score_from is None else request.score_from
        found = place(self.roots[None], tokens, cache, most, self._softmax_dtype, self.pool)
        for edge in insert(self.roots[None], tokens).path():
            self._keep(edge)  # it may have been read before it was known to be shared
        if found is None:
            return
        edge, beginning = found
        if beginning.tokens > most:
            last, top = insert(self.roots[None], tokens), request.top or 0
            if not learn(last.path(), cache, beginning, top, self._softmax_dtype):
                return
        slot = self.pool.take(
            lambda: {one for r in self.requests if r.edge for one in r.edge.path()}
        )
        if slot is None:
            return
        state = cache.load(beginning.key, tokens[: beginning.tokens])
        if state is None:
            self.pool.free(slot)
            return
        self.pool.write(slot, state.tensors, state.read)
        self.pool.hold(edge, slot)
        self._clock += 1
        edge.used = self._clock
        self._counts.tokens_kept += state.read

    def _keep(self, edge: LiveEdge) -> None:
        """Save the state and scores of an edge to disk if they are to be kept."""
        if self._cache is not None:
            keep(edge, self._cache, self.pool, self._softmax_dtype)

    def leave(self, request: Request) -> None:
        """Remove a request from the tree; the edges stay."""
        if request.edge is not None:
            self._clock += 1
            for edge in request.edge.path():
                self._keep(edge)
                edge.requests -= 1
                edge.used = self._clock
                self.pool.used(edge)
                if not edge.requests:
                    self._abandon(edge)
            request.edge = None
        if request in self.requests:
            self.requests.remove(request)

    def reset(self, request: Request) -> None:
        """Drop the states and the non-finite scores on the path of a request."""
        assert request.edge is not None
        for edge in request.edge.path():
            self.pool.drop(edge)
            edge.logits = None
            edge.logprobs[np.isinf(edge.logprobs)] = np.nan
            edge.count()
            self._give_up(edge)

    def _give_up(self, edge: LiveEdge) -> None:
        """Stop reading an edge."""
        if edge.working is not None:
            self.pool.free(edge.working)
            edge.working, edge.position = None, edge.start

    def _abandon(self, edge: LiveEdge) -> None:
        """Stop reading an edge that no request needs, and drop its prediction if it has no
        state."""
        self._give_up(edge)
        if edge not in self.pool:
            edge.logits = None
        edge.requested_from, edge.requested_top = NEVER, 0

    def _next_edge(self, request: Request) -> LiveEdge | None:
        """Return the edge to read next for a request; None if its prompt is done."""
        assert request.edge is not None
        wanted = None
        if request.score_from is not None:
            for edge in request.edge.path():
                unknown = edge.unknown(request.score_from, request.top or 0)
                if len(unknown) and not unknown[0]:
                    self._learn_first(edge)
                    unknown = edge.unknown(request.score_from, request.top or 0)
                if len(unknown):
                    # A state from disk comes without its prediction.
                    first = not unknown[0] and edge.parent is not None and edge.parent.parent
                    wanted = edge.parent if first else edge
                    break
        if wanted is None and request.max_new_tokens:
            last = request.edge
            if (not request.drawn and last.logits is None) or (
                last not in self.pool and request.goes_on
            ):
                wanted = last
        while wanted is not None and wanted.parent is not None and wanted.working is None:
            if wanted.parent.parent is None or wanted.parent in self.pool:
                break
            wanted = wanted.parent
        return wanted

    def _learn_first(self, edge: LiveEdge) -> None:
        """Score the first token of an edge if the prediction of its parent is known."""
        parent = edge.parent
        if parent is None or parent.logits is None:
            return
        logprob, tokens, logprobs = self.normalised(
            parent.logits, int(edge.tokens[0]), _width(edge)
        )
        edge.learn(np.zeros(1, np.int64), np.array([logprob]), tokens[None], logprobs[None])

    def normalised(
        self, logits: np.ndarray, target: int, top: int
    ) -> tuple[float, np.ndarray, np.ndarray]:
        """Return the log-probability of a token, the most likely tokens, and theirs."""
        scores = logits.astype(self._softmax_dtype if self._softmax_dtype == "float64" else "f4")
        largest = scores.max()
        scores = scores - (largest + np.log(np.exp(scores - largest).sum()))
        few = np.argpartition(-scores, top - 1)[:top] if 0 < top < len(scores) else np.arange(top)
        few = few[np.argsort(-scores[few], kind="stable")]
        return float(scores[target]), few, scores[few].astype(np.float64)

    def scores_of(self, request: Request) -> PromptScores:
        assert request.edge is not None and request.score_from is not None
        top, first = request.top or 0, request.score_from
        parts = [
            (e.logprobs[b:], e.top_tokens[b:, :top], e.top_logprobs[b:, :top])
            for e in request.edge.path()
            if (b := max(first - e.start, 0)) < len(e.tokens)
        ]
        if not parts:
            return PromptScores(np.empty(0), np.empty((0, top), int), np.empty((0, top)))
        return PromptScores(*(np.concatenate(each) for each in zip(*parts, strict=True)))

    def _parts(self, edges: list[LiveEdge], pause: float | None) -> list[Part]:
        """Return the parts of some edges for the next step."""
        begun_from = {e.parent for e in edges if e.working is None}
        needed = {*begun_from, *(r.edge for r in self.requests)}
        edges = edges[: self.limits.rows]
        left = [max(self._last(edge) - edge.position, 1) for edge in edges]
        # Short prompts are read at once, long ones in the pauses of decoding.
        unused = self._budget(pause if min(left) > SHORT * self.limits.tokens else None)
        share = max(unused // len(edges), SMALLEST_STEP)
        counts = [min(each, share) for each in left]
        spare = max(unused - sum(counts), 0)
        parts: list[Part] = []
        for edge, most, count in zip(edges, left, counts, strict=True):
            more = min(most - count, spare)
            count, spare = min(count + more, unused), spare - more
            if not count:
                break
            if edge.working is None:
                source = self._source(edge)
                whole = count == most and not self._needs_state(edge)
                target = -1 if whole else self.pool.take(lambda: needed)
                if target is None:
                    continue
            else:
                source = target = edge.working
            unused -= count
            parts.append(Part(edge, edge.next_ids(count), source, target))
        if not parts and pause is None:  # every slot waits for another one: overwrite one
            edge = next(e for e in edges if e.working is None)
            source, parent = self._source(edge), edge.parent
            if parent is not None and parent.parent is not None:
                target = self.pool.take_over(parent)
            else:
                target = self.pool.take()
            assert target is not None
            count = min(self._last(edge) - edge.position, max(unused, 1))
            parts.append(Part(edge, edge.next_ids(count), source, target))
        return parts

    def _source(self, edge: LiveEdge) -> int:
        """Return the slot of the state before an edge; -1 at the start of a document."""
        assert edge.parent is not None
        return self.pool.slot_of(edge.parent)

    def _budget(self, pause: float | None) -> int:
        """Return the number of tokens to read in a step."""
        if pause is None:
            return self.limits.tokens
        size = SMALLEST_STEP
        while (twice := 2 * size) <= self.limits.tokens:
            took = self._step_seconds.get(twice)
            if took is None:  # not measured yet: try it
                return twice
            if took > pause:
                self._step_seconds[twice] *= FORGOTTEN
                break
            size = twice
        return size

    def _last(self, edge: LiveEdge) -> int:
        """Return the end in the sequence of the tokens to read: the last token of an edge is left
        out if no request needs its prediction and nothing follows."""
        follows = self._needs_state(edge) or any(
            r.edge is edge and r.max_new_tokens and not r.drawn for r in self.requests
        )
        return edge.end if follows else max(edge.end - 1, edge.start + 1)

    def _needs_state(self, edge: LiveEdge) -> bool:
        """Return whether the state after an edge is needed, or likely to be."""
        if edge.children or len(edge.tokens) >= LONG:
            return True
        return any(request.edge is edge and request.goes_on for request in self.requests)

    def _read_parts(self, parts: list[Part]) -> None:
        begin = time.perf_counter()
        for edge, _, _, target, _ in parts:
            if edge.working is None:
                edge.position, edge.working = edge.start, target
        self._at_work = {part.edge for part in parts}
        read = sum(len(part.tokens) for part in parts)
        filler = self._filler(read)
        hidden, bases = self.pool.read(parts, filler)
        self._score(hidden, parts, bases)
        self._end_edges(hidden, parts, bases)
        self._counts.steps += 1
        self._counts.tokens_read += read
        size = 1 << (read - 1).bit_length()
        took = time.perf_counter() - begin
        self._step_seconds[size] = lately(self._step_seconds.get(size, 0.0), took)

    def _filler(self, tokens: int) -> int:
        """Return the number of padding tokens, so that few step sizes are compiled."""
        if not self._fixed_sizes:
            return 0
        return next((size for size in SIZES if size >= tokens), tokens) - tokens

    def _score(self, hidden: Any, parts: list[Part], bases: np.ndarray) -> None:
        """Compute the requested log-probabilities that the parts of a step predict."""
        every = self._requested(parts, bases)
        for with_top in (False, True):
            selected = [one for one in every if (_width(one[0]) > 0) is with_top]
            if not selected:
                continue
            positions = np.concatenate([places for *_, places in selected])
            position_of = np.arange(len(positions))
            if not self._fixed_sizes:
                positions, position_of = np.unique(positions, return_inverse=True)
            targets = np.concatenate([edge.tokens[index] for edge, index, _ in selected])
            arguments = hidden, positions, targets, position_of, self._softmax_dtype
            if with_top:
                top = max(_width(edge) for edge, *_ in selected)
                results = self._runner.score(*arguments, top=top)
            else:
                results = (self._runner.score(*arguments)[0],)
            first = 0
            for edge, index, _ in selected:
                part = slice(first, first := first + len(index))
                top = _width(edge)
                edge.learn(index, results[0][part], *(one[part, :top] for one in results[1:]))

    def _requested(
        self, parts: list[Part], bases: np.ndarray
    ) -> list[tuple[LiveEdge, np.ndarray, np.ndarray]]:
        """Return edges with the indices of their requested tokens that the parts of a step predict,
        and the hidden vector that predicts each token."""
        own: list[tuple[LiveEdge, np.ndarray, np.ndarray]] = []
        after: list[tuple[LiveEdge, np.ndarray, np.ndarray]] = []
        for (edge, tokens, *_), base in zip(parts, bases.tolist(), strict=True):
            at = edge.position - edge.start
            end = at + len(tokens)
            unknown = edge.unknown(edge.requested_from, edge.requested_top)
            unknown = unknown[(unknown > at) & (unknown <= end)]
            if len(unknown):
                own.append((edge, unknown, base + unknown - 1 - at))
            if end == len(edge.tokens):
                for child in edge.children.values():
                    unknown = child.unknown(child.requested_from, child.requested_top)
                    if len(unknown) and not unknown[0]:
                        after.append((child, unknown[:1], np.array([base + len(tokens) - 1])))
        if self._fixed_sizes:  # compiled for at most `read`; `_learn_first` does the rest
            read = sum(len(part.tokens) for part in parts)
            after = after[: read - sum(len(index) for _, index, _ in own)]
        return own + after

    def _end_edges(self, hidden: Any, parts: list[Part], bases: np.ndarray) -> None:
        """Advance the edges of a step, and keep the predictions of those that are complete."""
        ended: list[tuple[LiveEdge, int]] = []
        for (edge, tokens, *_), base in zip(parts, bases.tolist(), strict=True):
            edge.position += len(tokens)
            if edge.position < self._last(edge):
                continue
            whole = edge.position == edge.end
            slot, edge.working, edge.position = edge.working, None, edge.start
            assert slot is not None
            self._clock += 1
            edge.used = self._clock
            if not whole:
                self.pool.free(slot)
                continue
            if edge in self.pool:  # it was read again only for its scores
                self.pool.free(slot)
                self.pool.used(edge)
            elif slot >= 0:
                self.pool.hold(edge, slot)
            self._keep(edge)
            asked = any(each.edge is edge and not each.drawn for each in self.requests)
            if slot >= 0 or asked:
                ended.append((edge, base + len(tokens) - 1))
        if ended:
            logits = self._runner.logits(hidden, np.array([place for _, place in ended]))
            for (edge, _), row in zip(ended, logits, strict=False):
                edge.logits = row.copy()

    def forget(self) -> None:
        """Remove the least recently used edges from a tree that has grown too large, and return
        freed memory to the system."""
        token_bytes = TOKEN_BYTES + 16 * self._largest_top
        grown = token_bytes * self._counts.tokens_read + 2 * EDGE_BYTES * self._counts.requests
        if grown - self._grown < self._tree_bytes * GROWTH:
            return
        self._grown = grown
        for edge in remove_oldest(self.roots.values(), self._tree_bytes // 2):
            self.pool.drop(edge)
        return_freed_memory()


def lately(before: float, now: float) -> float:
    """Return the exponential moving average of about the last ten values."""
    return 0.9 * before + 0.1 * now if before else now


def _width(edge: LiveEdge) -> int:
    """Return the number of most likely tokens to compute for each token of an edge."""
    return max(edge.requested_top, edge.top)
