"""A live scheduler: requests come and go at any time, from any thread, and share what is read.

All requests are sequences in one radix tree (`griffin_eval.engine.live_tree`). A step reads parts
of several edges; where sequences part, the state and what it predicts are kept until memory is
needed. So a beginning that several requests have in common is read once, and one whose tokens were
scored already is not read again. Prompts are read in chunks between the steps that generate.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from griffin_eval.engine.generation import GREEDY, Chooser, Sampling
from griffin_eval.engine.limits import SMALLEST_STEP, is_out_of_memory
from griffin_eval.engine.live_tree import NEVER, LiveEdge, insert
from griffin_eval.runners.protocol import Runner
from griffin_eval.states.saved_state import SavedState

MOST_TOP = 20  # likeliest tokens that can be asked for
MOST_EDGES = 63  # that a step reads from
MOST_SLOTS = 256  # states in the pool
MOST_TOKENS = 1 << 22  # tokens of the tree that are remembered
LONG = 512  # tokens of an edge whose state is kept even if nothing asks for it yet
SIZES = (16, 128, 512, 4096)  # tokens of a step, where each number has to be compiled for

logger = logging.getLogger(__name__)


class PromptScores(NamedTuple):
    """What was asked for of the tokens of a prompt.

    Attributes:
        logprobs: float64 [N], log-probabilities in nats of the tokens from `Request.score_from` on.
        top_tokens: int64 [N, K], the likeliest tokens in the place of each.
        top_logprobs: float64 [N, K], their log-probabilities.
    """

    logprobs: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray


class NewToken(NamedTuple):
    """A token that was generated.

    Attributes:
        id: of the token.
        ends: whether it is one that ends a text.
        logprob: its log-probability in nats; None unless it was asked for.
        top_tokens, top_logprobs: [K], the likeliest tokens in its place.
    """

    id: int
    ends: bool
    logprob: float | None
    top_tokens: np.ndarray
    top_logprobs: np.ndarray


class Listener(Protocol):
    """Who gets the answer to a request, in the scheduler's thread; it should return soon."""

    def prompt(self, scores: PromptScores) -> None:
        """The prompt has been scored, if that was asked for."""
        ...

    def token(self, token: NewToken) -> bool:
        """A token has been generated; True ends the continuation with it."""
        ...

    def done(self, reason: str, error: Exception | None) -> None:
        """Nothing more comes.

        Args:
            reason: ``stop``, ``length``, ``cancelled`` or ``error``.
            error: why, where the reason is ``error``.
        """
        ...


@dataclass(eq=False)
class Request:
    """What is asked of a model.

    Attributes:
        tokens: int32 [N], ids of the prompt, N >= 1.
        listener: gets the answer.
        score_from: index of the first token of the prompt to score, at least 1; None to score none.
        top: number of likeliest tokens to give beside each token, at most `MOST_TOP`; None for no
            log-probabilities of new tokens either.
        max_new_tokens: most tokens to generate.
        sampling: how they are chosen.
        seed: of the random numbers.
        start: name of the saved state that the prompt goes on from; None for none.
    """

    tokens: np.ndarray
    listener: Listener
    score_from: int | None = None
    top: int | None = None
    max_new_tokens: int = 0
    sampling: Sampling = GREEDY
    seed: tuple[int, int] = (0, 0)
    start: str | None = None
    # Of the scheduler:
    new: list[int] = field(default_factory=list, repr=False)
    cancelled: bool = field(default=False, repr=False)
    edge: LiveEdge | None = field(default=None, repr=False)
    drawn: bool = field(default=False, repr=False)  # what follows ``edge``
    chooser: Chooser | None = field(default=None, repr=False)


@dataclass
class Counts:
    """What a scheduler has done.

    Attributes:
        requests: that were added.
        finished: by reason.
        prompt_tokens: of all requests that began.
        tokens_read: that steps read of prompts.
        tokens_generated: that were generated.
        states_evicted: states that were dropped for others.
        steps: calls of the model.
    """

    requests: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    tokens_read: int = 0
    tokens_generated: int = 0
    states_evicted: int = 0
    steps: int = 0


class _Rows:
    """Documents that are continued together, as the runner holds them."""

    def __init__(self, state: Any, rows: int):
        self.state = state
        self.requests: list[Request | None] = [None] * rows

    @property
    def free(self) -> list[int]:
        return [row for row, request in enumerate(self.requests) if request is None]


class Scheduler:
    """Answers requests with one model.

    Args:
        runner: the model. Nobody else may use it meanwhile.
        eos_ids: tokens that end a text.
        capacity: most tokens of a document, which models with global attention need.
        state_bytes: memory for states that are kept; None for 25% of what is free now.
        rows: most requests that are continued at a time; None for as many as the runner should.
        softmax_dtype: dtype in which logits are normalised.
        saved: saved states by name, from which requests may go on.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        eos_ids: frozenset[int] = frozenset(),
        capacity: int = 1 << 20,
        state_bytes: int | None = None,
        rows: int | None = None,
        softmax_dtype: str = "float32",
        saved: dict[str, SavedState] | None = None,
    ):
        self._runner, self._eos_ids, self._saved = runner, eos_ids, saved or {}
        self._capacity, self._softmax_dtype = runner.padded_tokens(capacity), softmax_dtype
        budget = runner.free_memory() // 4 if state_bytes is None else state_bytes
        each = runner.state_bytes(self._capacity)
        self.rows = max(1, min(rows or min(runner.decode_rows, 32), budget // (4 * each)))
        fit = min(MOST_SLOTS, budget // each - self.rows) - len(self._saved)
        self._slots = max(fit, 2) + len(self._saved)
        self._step_tokens = self._most = runner.step_tokens
        self._fixed_sizes = runner.padded_tokens(3) != 3
        self.counts = Counts()
        self._changed = threading.Condition()
        self._added: list[Request] = []
        self._closing = self._cancels = False
        self._waiting: deque[Request] = deque()
        self._reading: list[Request] = []  # whose prompts are read, or that wait for a row
        self._roots: dict[str | None, LiveEdge] = {}
        self._at_work: set[LiveEdge] = set()  # of the step that runs
        self._clock = self._tokens = 0
        # Seconds of a step that generates, and of reading a token, as they were lately.
        self._decode_seconds, self._read_seconds = 0.0, 0.0
        self._thread: threading.Thread | None = None
        self.failed: Exception | None = None
        for name in (None, *self._saved):
            self._roots[name] = LiveEdge(np.empty(0, np.int32), 0, None)
        self._open()

    # From any thread

    def start(self) -> None:
        """Begins to answer, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> None:
        """Takes a request.

        Raises:
            RuntimeError: the scheduler has been closed.
        """
        with self._changed:
            if self._closing:
                raise RuntimeError("the scheduler has ended")
            self.counts.requests += 1
            self._added.append(request)
            self._changed.notify()

    def warm_up(self) -> None:
        """Runs every shape of step that can be met once, where shapes are compiled. Before `start`.

        Not compiled are numbers of likeliest tokens other than 1.
        """
        runner, vocab = self._runner, self._runner.config.vocab_size
        if self._fixed_sizes:
            sizes = [size for size in SIZES if size <= self._step_tokens]
            hidden: Any = None
            for size in sizes[::-1]:
                for rows in (MOST_EDGES + 1, 2, 1):
                    if rows > size:
                        continue
                    lengths = np.ones(rows, np.int64)
                    lengths[0] += size - rows
                    for _ in range(5):  # the runner compiles what is used so often
                        hidden, self._pool = runner.read(
                            self._pool,
                            np.zeros(size, np.int32),
                            lengths,
                            np.full(rows, -1),
                            np.full(rows, -1),
                        )
                count = 64
                while count // 2 < size:
                    at = np.arange(min(count, size))
                    runner.logits(hidden, at)
                    runner.score(hidden, at, at * 0, at, self._softmax_dtype)
                    runner.score_top(hidden, at, at * 0, at, self._softmax_dtype, 1)
                    count *= 2
        for rows in self._rows:
            places, none = np.arange(len(rows.requests)), np.zeros(len(rows.requests), np.int64)
            rows.state = runner.insert_rows(rows.state, places[:1], self._pool, np.array([-1]))
            hidden, rows.state = runner.decode_step(rows.state, none, none)
            runner.greedy(hidden, places)
            runner.logits(hidden, places)
            runner.score_top(hidden, places, none, places, self._softmax_dtype, min(1, vocab))

    def cancel(self, request: Request) -> None:
        """Ends a request as soon as the step that runs is over, if it has not ended yet."""
        with self._changed:
            request.cancelled = self._cancels = True
            self._changed.notify()

    def refuse(self) -> None:
        """Takes no more requests."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def cancel_all(self) -> int:
        """Ends all requests; gives how many there were."""
        with self._changed:
            left = [*self._added, *self._waiting, *self._running()]
            for request in left:
                request.cancelled = True
            self._cancels = True
            self._changed.notify()
        return len(left)

    def close(self) -> None:
        """Takes no more requests, answers those that are there, and ends the thread."""
        self.refuse()
        if self._thread is not None:
            self._thread.join()

    @property
    def unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._added) + len(self._waiting) + len(self._running())

    @property
    def generating(self) -> int:
        """Number of requests that have a row."""
        return sum(each is not None for rows in self._rows for each in rows.requests)

    @property
    def states(self) -> int:
        """Number of slots of states that are taken."""
        return self._slots - len(self._free)

    def run(self) -> None:
        """Answers all requests that are there, in this thread."""
        while self._step():
            pass

    # In the scheduler's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._added or self._cancels or self._waiting or self._running()):
                    if self._closing:
                        return
                    self._changed.wait()
            try:
                self._step()
            except Exception as error:  # not even an empty pool fits, or a mistake of this class
                logger.exception("the scheduler has ended")
                self._end(error)
                return

    def _end(self, error: Exception) -> None:
        with self._changed:
            self._closing, self.failed = True, error
            left = [*self._added, *self._waiting, *self._running()]
            self._added, self._waiting = [], deque()
        for request in left:
            self._finish(request, "error", error)

    def _running(self) -> list[Request]:
        seated = [each for rows in self._rows for each in rows.requests if each is not None]
        return self._reading + seated

    def _open(self) -> None:
        """Takes memory for states; none is kept from before."""
        for root in self._roots.values():
            for edge in root.below():
                edge.slot, edge.logits, edge.working, edge.position = -1, None, None, edge.start
        runner = self._runner
        self._pool: Any = None
        self._rows: list[_Rows] = []
        self._pool = runner.open_pool(self._slots, self._capacity)
        self._free = list(range(self._slots))[::-1]
        for name, saved in self._saved.items():
            self._roots[name].slot = slot = self._free.pop()
            self._pool = runner.write_state(
                self._pool, slot, saved.tensors, saved.read, self._capacity
            )
        # One request alone need not pay for the rows of many.
        for rows in sorted({1, self.rows}):
            self._rows.append(_Rows(runner.start_decoding(rows, self._capacity), rows))

    def _step(self) -> bool:
        """Reads parts of prompts once, and continues every row once; whether there was anything
        to do."""
        with self._changed:
            self._waiting += self._added
            self._added = []
            cancels, self._cancels = self._cancels, False
        if cancels:
            self._drop_cancelled()
        while self._waiting and len(self._reading) < 2 * self.rows:
            self._begin(self._waiting.popleft())
        self._at_work = set()
        try:
            self._read()
            self._seat()
            self._continue()
        except Exception as error:  # of a framework, whatever its kind
            self._recover(error)
        self._forget()
        return bool(self._waiting or self._running())

    def _begin(self, request: Request) -> None:
        self.counts.prompt_tokens += len(request.tokens)
        request.chooser = Chooser(request.sampling, *request.seed)
        if request.top is not None:
            request.top = min(request.top, MOST_TOP, self._runner.config.vocab_size)
        self._enter(request)

    def _enter(self, request: Request) -> None:
        """Puts a request's tokens into the tree, and lets them be read."""
        tokens = np.array([*request.tokens, *request.new], np.int32)
        root = self._roots[request.start]
        request.edge, request.drawn = insert(root, tokens), False
        for edge in request.edge.path():
            edge.requests += 1
            if request.score_from is not None:
                edge.wanted_from = min(edge.wanted_from, request.score_from)
                edge.wanted_top = max(edge.wanted_top, request.top or 0)
        self._reading.append(request)

    def _leave(self, request: Request) -> None:
        """Takes a request out of the tree, and out of its row."""
        if request.edge is not None:
            self._clock += 1
            for edge in request.edge.path():
                edge.requests -= 1
                edge.used = self._clock
                if not edge.requests:
                    self._abandon(edge)
            request.edge = None
        if request in self._reading:
            self._reading.remove(request)
        for rows in self._rows:
            rows.requests = [None if each is request else each for each in rows.requests]

    def _abandon(self, edge: LiveEdge) -> None:
        """Nobody asks for an edge any more: it is not read on, and what nothing follows is not
        predicted."""
        if edge.working is not None:
            if edge.working >= 0:
                self._free.append(edge.working)
            edge.working, edge.position = None, edge.start
        if edge.slot < 0:
            edge.logits = None
        edge.wanted_from, edge.wanted_top = NEVER, 0

    def _finish(self, request: Request, reason: str, error: Exception | None = None) -> None:
        self._leave(request)
        with self._changed:
            self.counts.finished[reason] = self.counts.finished.get(reason, 0) + 1
        try:
            request.listener.done(reason, error)
        except Exception:
            logger.exception("a listener failed")

    def _drop_cancelled(self) -> None:
        waiting = [each for each in self._waiting if each.cancelled]
        self._waiting = deque(each for each in self._waiting if not each.cancelled)
        for request in waiting + [each for each in self._running() if each.cancelled]:
            self._finish(request, "cancelled")

    # Reading

    def _next_edge(self, request: Request) -> LiveEdge | None:
        """The edge that has to be read next for a request; None if it has all that it needs."""
        assert request.edge is not None
        wanted = None
        if request.score_from is not None:
            for edge in request.edge.path():
                unknown = edge.unknown(request.score_from, request.top or 0)
                if len(unknown) and not unknown[0]:
                    self._learn_first(edge)
                    unknown = edge.unknown(request.score_from, request.top or 0)
                if len(unknown):
                    wanted = edge
                    break
        if wanted is None and request.max_new_tokens:
            last = request.edge
            if (not request.drawn and last.logits is None) or (
                last.slot < 0 and self._goes_on(request)
            ):
                wanted = last
        while wanted is not None and wanted.parent is not None and wanted.working is None:
            if wanted.parent.parent is None or wanted.parent.slot >= 0:
                break
            wanted = wanted.parent
        return wanted

    def _goes_on(self, request: Request) -> bool:
        """Whether a row will be needed, unless the next token ends the text."""
        return request.max_new_tokens - len(request.new) > (0 if request.drawn else 1)

    def _learn_first(self, edge: LiveEdge) -> None:
        """Learns of the first token of an edge, if what its parent predicts is kept."""
        parent = edge.parent
        if parent is None or parent.logits is None:
            return
        width = max(edge.wanted_top, edge.top)
        logprob, tokens, logprobs = self._normalised(parent.logits, int(edge.tokens[0]), width)
        edge.learn(np.zeros(1, np.int64), np.array([logprob]), tokens[None], logprobs[None])

    def _normalised(
        self, logits: np.ndarray, target: int, top: int
    ) -> tuple[float, np.ndarray, np.ndarray]:
        """Log-probability of a token, the likeliest tokens, and theirs."""
        scores = logits.astype(self._softmax_dtype if self._softmax_dtype == "float64" else "f4")
        largest = scores.max()
        scores = scores - (largest + np.log(np.exp(scores - largest).sum()))
        few = np.argpartition(-scores, top - 1)[:top] if 0 < top < len(scores) else np.arange(top)
        few = few[np.argsort(-scores[few], kind="stable")]
        return float(scores[target]), few, scores[few].astype(np.float64)

    def _read(self) -> None:
        """Reads a step of what prompts need, and answers those that need nothing more."""
        edges: dict[LiveEdge, None] = {}
        for request in list(self._reading):
            edge = self._next_edge(request)
            if edge is None:
                self._ready(request)
            else:
                edges[edge] = None
        if edges:
            self._read_parts(self._parts(list(edges)))

    def _ready(self, request: Request) -> None:
        """The prompt of a request has been read: gives its scores, and the first new token."""
        edge = request.edge
        assert edge is not None
        if request.score_from is not None:
            scores = self._scores_of(request)
            request.score_from = None
            if not np.isfinite(scores.logprobs).all():
                self._finish(request, "error", self._not_finite())
                return
            if not self._told(request, lambda: request.listener.prompt(scores)):
                return
        if not request.max_new_tokens:
            self._finish(request, "length")
        elif not request.drawn:
            assert edge.logits is not None and request.chooser is not None
            if np.isnan(edge.logits).any():
                self._finish(request, "error", self._not_finite())
                return
            request.drawn = True
            sampled = request.sampling.temperature
            token = request.chooser(edge.logits) if sampled else int(edge.logits.argmax())
            found = (
                (None, _NONE, _NONE)
                if request.top is None
                else self._normalised(edge.logits, token, request.top)
            )
            self._give(request, token, *found)

    def _scores_of(self, request: Request) -> PromptScores:
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

    def _parts(self, edges: list[LiveEdge]) -> list[tuple[LiveEdge, int, int, int]]:
        """Edges to read from in the next step, with how many tokens, and the slots of the states
        before and after them."""
        needed = {e.parent for e in edges if e.working is None} | {r.edge for r in self._reading}
        # Where memory is short one at a time, so that it is known which of them has not enough.
        edges = edges[
            : min(self._runner.step_rows, MOST_EDGES if self._most > SMALLEST_STEP else 1)
        ]
        unused = self._budget()
        share = max(unused // len(edges), SMALLEST_STEP)
        counts = [min(edge.end - edge.position, share) for edge in edges]
        spare = max(unused - sum(counts), 0)
        parts = []
        for edge, count in zip(edges, counts, strict=True):
            more = min(edge.end - edge.position - count, spare)
            count, spare = min(count + more, unused), spare - more
            if not count:
                break
            if edge.working is None:
                source = edge.parent.slot if edge.parent is not None else -1
                whole = count == len(edge.tokens) and not self._kept(edge)
                target = -1 if whole else self._slot(needed)
                if target is None:
                    continue
            else:
                source = target = edge.working
            unused -= count
            parts.append((edge, count, source, target))
        if not parts and not self.generating:  # all slots wait for each other
            edge = next(e for e in edges if e.working is None)
            source = edge.parent.slot if edge.parent is not None else -1
            target = source if edge.parent is not None and edge.parent.parent else None
            if target is None:
                target = self._slot(set())
            elif edge.parent is not None:
                edge.parent.slot = -1  # it is written over
            assert target is not None
            parts.append((edge, min(edge.end - edge.position, max(unused, 1)), source, target))
        return parts

    def _budget(self) -> int:
        """Tokens to read in a step: while rows generate, as many as take the time of a step of
        theirs."""
        if not self.generating or not self._read_seconds:
            return self._most
        count = int(self._decode_seconds / self._read_seconds)
        return min(max(1 << max(count, 1).bit_length() - 1, SMALLEST_STEP), self._most)

    def _kept(self, edge: LiveEdge) -> bool:
        """Whether the state after an edge is needed, or likely to be."""
        if edge.children or len(edge.tokens) >= LONG:
            return True
        return any(each.edge is edge and self._goes_on(each) for each in self._reading)

    def _slot(self, needed: set[LiveEdge | None]) -> int | None:
        """A slot, taken from the state that was not used for longest if none is free."""
        if self._free:
            return self._free.pop()
        held = [
            edge
            for root in self._roots.values()
            for edge in root.below()
            if edge.parent is not None and edge.slot >= 0 and edge not in needed
        ]
        if not held:
            return None
        edge = min(held, key=lambda one: one.used)
        slot, edge.slot, edge.logits = edge.slot, -1, None
        self.counts.states_evicted += 1
        return slot

    def _read_parts(self, parts: list[tuple[LiveEdge, int, int, int]]) -> None:
        if not parts:
            return
        begin = time.perf_counter()
        pieces = [edge.tokens[(at := edge.position - edge.start) : at + n] for edge, n, *_ in parts]
        counts, sources, targets = map(list, [*zip(*parts, strict=True)][1:])
        if filler := self._filler(sum(counts)):
            pieces.append(np.zeros(filler, np.int32))
            counts.append(filler)
            sources.append(-1)
            targets.append(-1)
        for edge, _, _, target in parts:
            if edge.working is None:
                edge.position, edge.working = edge.start, target
        self._at_work = {edge for edge, *_ in parts}
        hidden, self._pool = self._runner.read(
            self._pool,
            np.concatenate(pieces),
            np.array(counts),
            np.array(sources),
            np.array(targets),
        )
        bases = np.cumsum(counts) - counts
        self._score(hidden, parts, bases)
        self._end_edges(hidden, parts, bases)
        read = sum(count for _, count, *_ in parts)
        self.counts.steps += 1
        self.counts.tokens_read += read
        took = (time.perf_counter() - begin) / (read + (filler or 0))
        self._read_seconds = _lately(self._read_seconds, took)

    def _filler(self, tokens: int) -> int:
        """Tokens that are added so that few sizes of steps are compiled."""
        if not self._fixed_sizes:
            return 0
        return next((size for size in SIZES if size >= tokens), tokens) - tokens

    def _score(self, hidden: Any, parts: list[Any], bases: np.ndarray) -> None:
        """Learns the log-probabilities that are wanted of what the parts of a step predict."""
        for with_top in (False, True):
            found: list[tuple[LiveEdge, np.ndarray, np.ndarray]] = []
            for (edge, count, *_), base in zip(parts, bases.tolist(), strict=False):
                if (max(edge.wanted_top, edge.top) > 0) is not with_top:
                    continue
                at = edge.position - edge.start
                unknown = edge.unknown(edge.wanted_from, edge.wanted_top)
                unknown = unknown[(unknown > at) & (unknown <= at + count)]
                if len(unknown):
                    found.append((edge, unknown, base + unknown - 1 - at))
            if not found:
                continue
            positions = np.concatenate([places for *_, places in found])
            targets = np.concatenate([edge.tokens[index] for edge, index, _ in found])
            asked = hidden, positions, targets, np.arange(len(targets)), self._softmax_dtype
            if with_top:
                top = max(max(edge.wanted_top, edge.top) for edge, *_ in found)
                results = self._runner.score_top(*asked, top)
            else:
                results = (self._runner.score(*asked)[0],)
            first = 0
            for edge, index, _ in found:
                part = slice(first, first := first + len(index))
                width = max(edge.wanted_top, edge.top)
                edge.learn(index, results[0][part], *(each[part, :width] for each in results[1:]))

    def _end_edges(self, hidden: Any, parts: list[Any], bases: np.ndarray) -> None:
        """Goes on to the next tokens; keeps what edges predict that have been read to the end."""
        ended: list[tuple[LiveEdge, int]] = []
        for (edge, count, *_), base in zip(parts, bases.tolist(), strict=False):
            edge.position += count
            if edge.position < edge.end:
                continue
            slot, edge.working, edge.position = edge.working, None, edge.start
            assert slot is not None
            self._clock += 1
            edge.used = self._clock
            if edge.slot < 0:
                edge.slot = slot
            elif slot >= 0:  # it was read again for its tokens' sake
                self._free.append(slot)
            asked = any(each.edge is edge and not each.drawn for each in self._reading)
            if slot >= 0 or asked:
                ended.append((edge, base + count - 1))
        if ended:
            logits = self._runner.logits(hidden, np.array([place for _, place in ended]))
            for (edge, _), row in zip(ended, logits, strict=False):
                edge.logits = row.copy()

    # Generating

    def _seat(self) -> None:
        """Gives rows to requests whose first token has been chosen."""
        ready = [each for each in self._reading if each.drawn and each.edge and each.edge.slot >= 0]
        alone = not self.generating and len(ready) == 1
        for rows in self._rows if alone else self._rows[::-1][:1]:
            free = rows.free
            taken, ready = ready[: len(free)], ready[len(free) :]
            if not taken:
                continue
            slots = [each.edge.slot for each in taken if each.edge is not None]
            rows.state = self._runner.insert_rows(
                rows.state, np.array(free[: len(taken)]), self._pool, np.array(slots)
            )
            for row, request in zip(free, taken, strict=False):
                rows.requests[row] = request
                self._reading.remove(request)

    def _continue(self) -> None:
        """Reads the last token of every row and chooses the next."""
        begin = time.perf_counter()
        if not self.generating:
            return
        for rows in self._rows:
            taken = [(row, r) for row, r in enumerate(rows.requests) if r is not None]
            if taken:
                self._continue_rows(rows, taken)
        self._decode_seconds = _lately(self._decode_seconds, time.perf_counter() - begin)

    def _continue_rows(self, rows: _Rows, taken: list[tuple[int, Request]]) -> None:
        last, active = np.zeros((2, len(rows.requests)), np.int64)
        for row, request in taken:
            last[row], active[row] = request.new[-1], 1
        hidden, rows.state = self._runner.decode_step(rows.state, last, active)
        self.counts.steps += 1
        chosen = np.array(self._runner.greedy(hidden, np.arange(len(active))))
        if drawn := [(row, each) for row, each in taken if each.sampling.temperature]:
            logits = self._runner.logits(hidden, np.array([row for row, _ in drawn]))
            for (row, request), scores in zip(drawn, logits, strict=False):
                if chosen[row] >= 0 and request.chooser is not None:
                    chosen[row] = request.chooser(scores)
        found: dict[int, Any] = {}
        asked = [(row, r.top) for row, r in taken if r.top is not None and chosen[row] >= 0]
        if asked:
            places = np.array([row for row, _ in asked])
            results = self._runner.score_top(
                hidden,
                places,
                chosen[places],
                np.arange(len(places)),
                self._softmax_dtype,
                max(1, *(top for _, top in asked)),
            )
            for (row, top), logprob, tokens, logprobs in zip(asked, *results, strict=True):
                found[row] = float(logprob), tokens[:top], logprobs[:top]
        for row, request in taken:
            if chosen[row] < 0:
                self._finish(request, "error", self._not_finite())
            else:
                self._give(request, int(chosen[row]), *found.get(row, (None, _NONE, _NONE)))

    def _give(
        self,
        request: Request,
        token: int,
        logprob: float | None,
        top_tokens: np.ndarray,
        top_logprobs: np.ndarray,
    ) -> None:
        """Hands a new token to its listener, and ends the request if it is the last one."""
        ends = token in self._eos_ids
        new = NewToken(token, ends, logprob, top_tokens, top_logprobs)
        request.new.append(token)
        self.counts.tokens_generated += 1
        stopped: list[bool] = []
        if not self._told(request, lambda: stopped.append(request.listener.token(new))):
            return
        if ends or stopped[0]:
            self._finish(request, "stop")
        elif len(request.new) >= request.max_new_tokens:
            self._finish(request, "length")

    def _told(self, request: Request, tell: Callable[[], object]) -> bool:
        """Calls a listener; if that fails, its request ends and no other."""
        try:
            tell()
        except Exception as error:
            self._finish(request, "error", error)
            return False
        return True

    def _not_finite(self) -> Exception:
        return ArithmeticError(
            f"the model's answer in {self._runner.dtype} is not finite: try dtype float32"
        )

    # Memory

    def _recover(self, error: Exception) -> None:
        """Goes on after a failed step. States are lost: what is unfinished is read again, in
        smaller steps if memory ran out; the request for which not even the smallest step fits
        ends with the error."""
        short, running = is_out_of_memory(error), self._running()
        if not short:
            logger.error("a step failed: %s", error, exc_info=error)
            failed = running
        elif self._most > SMALLEST_STEP:
            self._most, failed = max(self._most // 4, SMALLEST_STEP), []
            logger.warning("out of memory: going on with %d tokens a step", self._most)
        else:
            ours = [r for r in self._reading if r.edge and self._at_work & {*r.edge.path()}]
            self._most, failed = self._step_tokens, (ours or running)[:1]
        kept = [each for each in running if each not in failed]
        for request in failed:
            reason = "not enough memory for this request" if short else str(error)
            self._finish(request, "error", MemoryError(reason) if short else error)
        for request in kept:
            self._leave(request)
        self._open()
        for request in kept:
            self._enter(request)

    def _forget(self) -> None:
        """Removes what was not used for longest from a tree that has grown too large."""
        if self.counts.tokens_read - self._tokens < MOST_TOKENS // 4:
            return
        self._tokens = self.counts.tokens_read
        edges = [e for root in self._roots.values() for e in root.below() if e.parent is not None]
        total = sum(len(edge.tokens) for edge in edges)
        for edge in sorted(edges, key=lambda one: (one.used, -one.start)):
            if total <= MOST_TOKENS // 2:
                break
            if edge.requests or edge.children or edge.parent is None:
                continue
            if edge.slot >= 0:
                self._free.append(edge.slot)
            del edge.parent.children[int(edge.tokens[0])]
            total -= len(edge.tokens)


_NONE = np.empty(0)


def _lately(before: float, now: float) -> float:
    """A mean in which the last ten or so count."""
    return 0.9 * before + 0.1 * now if before else now
