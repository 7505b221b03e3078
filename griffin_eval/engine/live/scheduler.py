"""A scheduler for requests that arrive and leave at any time, from any thread, sharing prefixes.

Prompts are read in chunks (`griffin_eval.engine.live.prompt_reader`) between decoding steps.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from griffin_eval.engine.live.prompt_reader import PromptReader, lately
from griffin_eval.engine.live.requests import MAX_TOP, Counts, NewToken, Request
from griffin_eval.engine.recovery import release
from griffin_eval.engine.rows import Row, Rows
from griffin_eval.engine.sampling import Chooser
from griffin_eval.engine.scoring import cause_of_not_finite
from griffin_eval.errors import is_out_of_memory
from griffin_eval.runners.protocol import Runner
from griffin_eval.states.saved_state import SavedState
from griffin_eval.states.state_cache import StateCache

MAX_SLOTS = 256  # maximum number of states in the pool
TREE_SHARE = 8  # at most an eighth of the memory for states is for the tokens that were read
MIN_TREE, MAX_TREE = 1 << 20, 1 << 28  # bytes; clearing the tree walks through all of it
MAX_PAUSE = 8  # maximum time to read prompts between decoding steps, in decoding steps

logger = logging.getLogger(__name__)


class Scheduler:
    """Answers requests with one model.

    Args:
        runner: Model, which nothing else may use meanwhile.
        eos_ids: Tokens that end a text.
        capacity: Maximum number of tokens of a document, which global attention needs.
        state_bytes: Memory in bytes for states, the logits after them, and the log-probabilities
            of tokens that were read; None for 25% of the memory that is free now.
        rows: Maximum number of requests that are decoded together; None for the runner's choice.
        softmax_dtype: Dtype in which logits are normalised.
        saved: Saved states by name, which requests can continue.
        cache: Folder of states on disk that are read and added to.
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
        cache: StateCache | None = None,
    ):
        self._runner, self._eos_ids, self._saved = runner, eos_ids, saved or {}
        self._capacity, self._softmax_dtype = runner.padded_tokens(capacity), softmax_dtype
        budget = runner.free_memory() // 4 if state_bytes is None else state_bytes
        each = runner.state_bytes(self._capacity)
        self.rows = max(1, min(rows or min(runner.decode_rows, 32), budget // (4 * each)))
        tree_bytes = min(max(budget // TREE_SHARE, MIN_TREE), MAX_TREE)
        # The logits after a state, float32 [V], are kept beside it.
        for_states = budget - min(tree_bytes, budget // TREE_SHARE)
        kept = for_states // (each + 4 * runner.config.vocab_size)
        fit = min(MAX_SLOTS, kept - self.rows) - len(self._saved)
        slots = max(fit, 2) + len(self._saved)
        self.counts = Counts()
        self._prompts = PromptReader(
            runner,
            slots,
            self._capacity,
            softmax_dtype,
            self._saved,
            self.counts,
            tree_bytes,
            cache,
        )
        self._changed = threading.Condition()
        self._unfinished: set[Request] = set()
        self._added: list[Request] = []
        self._closing = self._cancels = False
        self._waiting: deque[Request] = deque()
        # Requests with non-finite results, and the one that is being read again alone.
        self._suspects: deque[Request] = deque()
        self._alone: Request | None = None
        self._decode_seconds = 0.0  # recent time of a decoding step
        self._thread: threading.Thread | None = None
        self.failed: Exception | None = None
        self._open_rows()

    def start(self) -> None:
        """Start to answer requests in a new thread."""
        self._thread = threading.Thread(target=self.serve, name="scheduler", daemon=True)
        self._thread.start()

    def add(self, request: Request) -> None:
        """Add a request, or raise RuntimeError if the scheduler has been closed."""
        with self._changed:
            if self._closing:
                raise RuntimeError("the scheduler has ended")
            self.counts.requests += 1
            self._unfinished.add(request)
            self._added.append(request)
            self._changed.notify()

    def warm_up(self) -> None:
        """Run every step shape once before `start` if shapes are compiled, ``top`` values above 1
        excepted."""
        self._prompts.warm_up()
        for rows in self._rows:
            rows.warm_up(self._prompts.pool, self._softmax_dtype)

    def cancel(self, request: Request) -> None:
        """End a request after the current step, if it has not ended yet."""
        with self._changed:
            request.cancelled = self._cancels = True
            self._changed.notify()

    def refuse(self) -> None:
        """Refuse new requests."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def cancel_all(self) -> list[Request]:
        """Cancel all requests, and return them."""
        with self._changed:
            left = list(self._unfinished)
            for request in left:
                request.cancelled = True
            self._cancels = True
            self._changed.notify()
        return left

    def close(self) -> None:
        """Refuse new requests, answer the ones there are, and end the thread."""
        self.refuse()
        if self._thread is not None:
            self._thread.join()

    @property
    def unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self._unfinished)

    @property
    def generating(self) -> int:
        """Number of requests that are being decoded."""
        return sum(len(rows.taken) for rows in self._rows)

    @property
    def states(self) -> int:
        """Number of taken slots of the pool."""
        return 0 if self._prompts.pool is None else self._prompts.pool.taken

    def run(self) -> None:
        """Answer all added requests in this thread."""
        while self._step():
            pass

    def serve(self) -> None:
        """Answer requests in this thread until the scheduler has been closed."""
        self._thread = threading.current_thread()
        while True:
            with self._changed:
                while not (self._added or self._cancels or self._waiting or self._running()):
                    if self._closing:
                        return
                    self._changed.wait()
            try:
                self._step()
            except Exception as error:  # not even an empty pool fits, or a bug in this class
                logger.exception("the scheduler has ended")
                self._end(error)
                return

    def _end(self, error: Exception) -> None:
        with self._changed:
            self._closing, self.failed = True, error
            left = list(self._unfinished)
            self._added, self._waiting = [], deque()
        for request in left:
            self._finish(request, "error", error)

    def _running(self) -> list[Request]:
        seated = [each for rows in self._rows for each in rows.owners]
        return [*self._prompts.requests, *seated, *self._suspects]

    def _open_rows(self) -> None:
        # A single request should not pay for the rows of many.
        counts = sorted({1, self.rows})
        self._rows = [Rows(self._runner, count, self._capacity) for count in counts]

    def _step(self) -> bool:
        """Read parts of prompts once and decode every row once; return whether work is left."""
        with self._changed:
            self._waiting += self._added
            self._added = []
            cancels, self._cancels = self._cancels, False
        if cancels:
            self._drop_cancelled()
        while self._waiting and len(self._prompts.requests) < 2 * self.rows:
            self._begin(self._waiting.popleft())
        if self._suspects and self._alone is None:
            self._alone = self._suspects.popleft()
            self._enter(self._alone)
        try:
            self._read()
            if self._alone is None:
                self._seat()
                self._continue()
        except Exception as error:  # any error of a framework
            self._recover(error)
        self._prompts.forget()
        return bool(self._waiting or self._running())

    def _begin(self, request: Request) -> None:
        self.counts.prompt_tokens += len(request.tokens)
        request.chooser = Chooser(request.sampling, *request.seed)
        if request.top is not None:
            request.top = min(request.top, MAX_TOP, self._runner.config.vocab_size)
        self._enter(request)

    def _enter(self, request: Request) -> None:
        try:
            self._prompts.enter(request)
        except Exception as error:  # out of memory for a state from disk
            self._finish(request, "error", error)

    def _leave(self, request: Request) -> None:
        """Remove a request from the tree and from its row."""
        self._prompts.leave(request)
        for rows in self._rows:
            rows.leave(request)

    def _finish(self, request: Request, reason: str, error: Exception | None = None) -> None:
        self._leave(request)
        if request in self._suspects:
            self._suspects.remove(request)
        if request is self._alone:
            self._alone = None
        with self._changed:
            self._unfinished.discard(request)
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

    def _read(self) -> None:
        """Read prompts, and answer requests whose prompts are done. Decoding waits for one step, or
        for longer if more prompts wait than requests are being decoded."""
        begin, steps = time.perf_counter(), 0
        while True:
            alone = self._alone
            ready, edges = self._prompts.needs(self._prompts.requests if alone is None else [alone])
            for request in ready:
                self._ready(request)
            generating = self.generating if alone is None else 0
            pause = None
            if generating:
                pause = self._decode_seconds * min(max(1, len(edges) / generating), MAX_PAUSE)
            took = time.perf_counter() - begin
            if steps and (pause is None or took * (steps + 1) / steps > pause):
                break
            if not self._prompts.read(edges, pause):
                break
            steps += 1

    def _ready(self, request: Request) -> None:
        """Send the scores of a prompt that has been read, and choose the first new token."""
        edge = request.edge
        assert edge is not None
        if request.score_from is not None:
            scores = self._prompts.scores_of(request)
            if not np.isfinite(scores.logprobs).all():
                self._not_finite(request)
                return
            request.score_from = None
            if not self._notify(request, lambda: request.listener.prompt(scores)):
                return
        if not request.max_new_tokens:
            self._finish(request, "length")
        elif not request.drawn:
            if edge.logits is None:  # `reset` dropped them for a non-finite result
                return
            if np.isnan(edge.logits).any():
                self._not_finite(request)
                return
            assert request.chooser is not None
            request.drawn = True
            if request is self._alone:
                self._alone = None
            token = request.chooser(edge.logits)
            result = (
                (None, _NONE, _NONE)
                if request.top is None
                else self._prompts.normalised(edge.logits, token, request.top)
            )
            self._give(request, token, *result)

    def _seat(self) -> None:
        """Give rows to requests whose first token has been chosen."""
        pool, waiting = self._prompts.pool, self._prompts.requests
        ready = [each for each in waiting if each.drawn and each.edge in pool]
        alone = not self.generating and len(ready) == 1
        for rows in self._rows if alone else self._rows[::-1][:1]:
            free = len(rows.free)
            taken, ready = ready[:free], ready[free:]
            if taken:
                documents = [Row(r, r.new[-1], r.chooser) for r in taken if r.chooser]
                rows.put(pool, [pool.slot_of(each.edge) for each in taken], documents)
                for request in taken:
                    waiting.remove(request)

    def _continue(self) -> None:
        """Read the last token of every row and choose the next."""
        begin = time.perf_counter()
        if not self.generating:
            return
        for rows in self._rows:
            if rows.taken:
                self._continue_rows(rows)
        self._decode_seconds = lately(self._decode_seconds, time.perf_counter() - begin)

    def _continue_rows(self, rows: Rows) -> None:
        taken = {number: row.owner for number, row in rows.taken.items()}
        hidden, chosen = rows.step()
        self.counts.steps += 1
        found: dict[int, Any] = {}
        asked = [(n, taken[n].top) for n in chosen if taken[n].top is not None and chosen[n] >= 0]
        if asked:
            results = self._runner.score(
                hidden,
                np.array([number for number, _ in asked]),
                np.array([chosen[number] for number, _ in asked]),
                np.arange(len(asked)),
                self._softmax_dtype,
                top=max(1, *(top for _, top in asked)),
            )
            for (number, top), logprob, tokens, logprobs in zip(asked, *results, strict=True):
                found[number] = float(logprob), tokens[:top], logprobs[:top]
        for number, token in chosen.items():
            if token < 0:
                self._not_finite(taken[number])
            else:
                self._give(taken[number], token, *found.get(number, (None, _NONE, _NONE)))

    def _give(
        self,
        request: Request,
        token: int,
        logprob: float | None,
        top_tokens: np.ndarray,
        top_logprobs: np.ndarray,
    ) -> None:
        """Send a new token to the listener, and end the request after its last one."""
        ends = token in self._eos_ids
        new = NewToken(token, ends, logprob, top_tokens, top_logprobs)
        request.new.append(token)
        self.counts.tokens_generated += 1
        stopped: list[bool] = []
        if not self._notify(request, lambda: stopped.append(request.listener.token(new))):
            return
        if ends or stopped[0]:
            self._finish(request, "stop")
        elif len(request.new) >= request.max_new_tokens:
            self._finish(request, "length")

    def _notify(self, request: Request, tell: Callable[[], object]) -> bool:
        """Call a listener; if it fails, end its request only."""
        try:
            tell()
        except Exception as error:
            self._finish(request, "error", error)
            return False
        return True

    def _not_finite(self, request: Request) -> None:
        """Read a request again alone, since the NaN may come from another one in the same step; end
        it with an error if it was alone already."""
        if request is self._alone:
            reason = f"the answer is not finite: {cause_of_not_finite(self._runner.dtype)}"
            self._finish(request, "error", ArithmeticError(reason))
            return
        self._prompts.reset(request)
        self._leave(request)
        self._suspects.append(request)

    def _recover(self, error: Exception) -> None:
        """Continue after a failed step. All states are lost, so unfinished requests are read again,
        in smaller steps if memory ran out; if steps cannot get smaller, one request fails."""
        short, running = is_out_of_memory(error), self._running()
        if not short:
            logger.error("a step failed: %s", error, exc_info=error)
            failed = running
        elif self._prompts.shrink():
            failed = []
            logger.warning("out of memory: going on with %s", self._prompts.limits)
        else:
            failed = (self._prompts.at_work() or running)[:1]
        kept = [each for each in running if each not in failed]
        for request in failed:
            reason = "not enough memory for this request" if short else str(error)
            self._finish(request, "error", MemoryError(reason) if short else error)
        for request in kept:
            self._leave(request)
        self._rows = []  # free the memory before the next pool is allocated
        release(error)
        self._prompts.open()
        self._open_rows()
        for request in kept:
            if request not in self._suspects:
                self._enter(request)


_NONE = np.empty(0)
