"""A runner in NumPy alone, for tests of everything that calls a runner."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.states.saved_state import SavedState, tensors_of

KEYS = 3  # embeddings of earlier tokens in a state
CONFIG = GriffinConfig(
    vocab_size=61,
    width=8,
    mlp_width=8,
    num_heads=1,
    num_layers=2,
    lru_width=8,
    gate_blocks=1,
    visible_keys=KEYS + 1,
    conv_width=1,
    block_pattern=("recurrent", "local_attention"),
)


class FakeStates:
    """States [R, 1 + 8 + 3 * 8] in float32 of documents of up to ``capacity`` tokens: the number of
    tokens that were read, the recurrent vector, and the last embeddings. All NaN if undefined."""

    def __init__(self, rows: np.ndarray, capacity: int):
        self.capacity, self._rows = capacity, rows

    @property
    def rows(self) -> np.ndarray:
        assert self._rows is not None, "a call has consumed these states"
        return self._rows

    def consume(self) -> np.ndarray:
        """Return the rows, which cannot be used through this object any more."""
        rows, self._rows = self.rows, None
        return rows


class FakeRunner:
    """A `griffin_eval.runners.protocol.Runner` without `stage` and `adopt`, whose model adds up
    embeddings. A document gets the same bits in any step. Misuse fails: a consumed state, a row
    that an earlier document of the step writes, an unknown token. Documents beyond their capacity
    turn into NaN.

    Args:
        padded: Whether sizes are padded to powers of two, as where every shape is compiled.
    """

    framework, device, devices, dtype = "fake", "cpu", 1, "float32"
    kernel = attention_kernel = "none"
    step_tokens, step_rows, decode_rows = 512, 512, 64
    compilations = 0

    def __init__(self, vocab_size: int = CONFIG.vocab_size, *, padded: bool = False):
        self.config = replace(CONFIG, vocab_size=vocab_size)
        self._padded, self._saved = padded, None
        rng = np.random.default_rng(0)
        weights = rng.standard_normal((2, vocab_size, self.config.width), np.float32)
        self._embedding, self._head = weights

    def padded_tokens(self, count: int, smallest: int = 16) -> int:
        return max(smallest, 1 << (count - 1).bit_length()) if self._padded and count > 1 else count

    def padded_batch(self, count: int) -> int:
        return 1 << (count - 1).bit_length() if self._padded else count

    def state_bytes(self, capacity: int) -> int:
        return self._start.nbytes

    step_bytes = state_bytes

    def free_memory(self) -> int:
        return 1 << 30

    def peak_memory(self) -> int:
        return 1 << 20

    def open_pool(self, rows: int, capacity: int) -> FakeStates:
        return FakeStates(np.full((rows, self._start.size), np.nan, np.float32), capacity)

    def grow_pool(self, pool: FakeStates, rows: int, capacity: int) -> FakeStates:
        assert capacity == pool.capacity and rows >= len(pool.rows)
        larger, old = self.open_pool(rows, capacity), pool.consume()
        larger.rows[: len(old)] = old
        return larger

    def start_from(self, saved: SavedState) -> None:
        self._saved = saved

    def state_tensors(self, pool: FakeStates, row: int, read: int) -> dict[str, np.ndarray]:
        pos, h, keys = self._parts(pool.rows[row])
        assert pos == read
        recurrent = {"h": h.copy(), "conv": np.zeros((0, len(h)), np.float32)}
        return tensors_of([recurrent, {"k": keys.copy(), "v": keys.copy()}], read)

    def write_state(
        self,
        pool: FakeStates,
        row: int,
        tensors: dict[str, np.ndarray],
        read: int,
        capacity: int,
    ) -> FakeStates:
        assert capacity == pool.capacity
        rows = pool.consume()
        rows[row] = self._row_of(tensors, read)
        return FakeStates(rows, capacity)

    def read(
        self,
        pool: FakeStates,
        tokens: np.ndarray,
        lengths: np.ndarray,
        sources: np.ndarray,
        targets: np.ndarray,
        ablations: np.ndarray | None = None,
    ) -> tuple[np.ndarray, FakeStates]:
        assert lengths.sum() == len(tokens) and len(lengths) == len(sources) == len(targets)
        for at, target in enumerate(targets):
            assert target < 0 or target not in (*sources[at + 1 :], *targets[at + 1 :])
        rows, capacity = pool.consume(), pool.capacity
        states = np.where(sources[:, None] < 0, self._start, rows[sources])
        if ablations is not None:
            _, h, keys = self._parts(states)
            h[ablations & 1 > 0] = 0
            keys[ablations & 2 > 0] = 0
        hidden = np.empty((len(tokens), self.config.width), np.float32)
        first = np.cumsum(lengths) - lengths
        for step in range(max(lengths, default=0)):
            going = np.flatnonzero(lengths > step)
            at = first[going] + step
            hidden[at], states[going] = self._step(states[going], tokens[at], capacity)
        rows[targets[targets >= 0]] = states[targets >= 0]
        return hidden, FakeStates(rows, capacity)

    def start_decoding(self, batch: int, capacity: int) -> FakeStates:
        return FakeStates(np.tile(self._start, (batch, 1)), capacity)

    def insert_rows(
        self, state: FakeStates, rows: np.ndarray, pool: FakeStates, sources: np.ndarray
    ) -> FakeStates:
        assert state.capacity == pool.capacity
        batch = state.consume()
        batch[rows] = np.where(sources[:, None] < 0, self._start, pool.rows[sources])
        return FakeStates(batch, state.capacity)

    def decode_step(
        self, state: FakeStates, tokens: np.ndarray, active: np.ndarray
    ) -> tuple[np.ndarray, FakeStates]:
        rows, on = state.consume(), active > 0
        hidden = np.full((len(rows), self.config.width), np.nan, np.float32)
        hidden[on], rows[on] = self._step(rows[on], tokens[on], state.capacity)
        return hidden, FakeStates(rows, state.capacity)

    def score(
        self,
        hidden: np.ndarray,
        positions: np.ndarray,
        targets: np.ndarray,
        position_of: np.ndarray,
        softmax_dtype: str,
        *,
        details: bool = False,
        top: int = 0,
    ) -> tuple[np.ndarray, ...]:
        assert not (details and top) and (np.diff(positions) > 0).all()
        dtype = np.dtype(getattr(ml_dtypes, softmax_dtype, softmax_dtype))
        logits = self.logits(hidden, positions).astype(dtype)
        with np.errstate(invalid="ignore"):
            logprobs = logits - logits.max(1, keepdims=True)
            logprobs = logprobs - np.log(np.exp(logprobs).sum(1, keepdims=True))
        logprobs, row = logprobs.astype(np.float64), position_of
        scores = logprobs[row, targets]
        if top:
            best = np.argsort(-logprobs, 1, kind="stable")[:, :top]
            return scores, best[row], np.take_along_axis(logprobs, best, 1)[row]
        greedy = logprobs.argmax(1)[row] == targets
        if not details:
            return scores, greedy
        entropies = -(np.exp(logprobs) * logprobs).sum(1)
        return scores, greedy, 1 + (logprobs[row] > scores[:, None]).sum(1), entropies[row]

    def logits(self, hidden: np.ndarray, positions: np.ndarray) -> np.ndarray:
        # One channel at a time: a matrix product rounds as the number of rows says.
        logits = np.zeros((len(positions), len(self._head)), np.float32)
        with np.errstate(invalid="ignore"):
            for channel, weight in zip(hidden[positions].T, self._head.T, strict=True):
                logits += channel[:, None] * weight
        return logits

    def greedy(self, hidden: np.ndarray, positions: np.ndarray) -> np.ndarray:
        logits = self.logits(hidden, positions)
        return np.where(np.isnan(logits).any(1), -1, logits.argmax(1))

    @property
    def _start(self) -> np.ndarray:
        """State at the start of a document."""
        if self._saved is None:
            return np.zeros(1 + (1 + KEYS) * self.config.width, np.float32)
        return self._row_of(self._saved.tensors, self._saved.read)

    def _row_of(self, tensors: dict[str, np.ndarray], read: int) -> np.ndarray:
        saved, width = tensors["layers.1.k"], self.config.width
        keys = np.pad(saved, ((KEYS - len(saved), 0), (0, 0))).ravel()
        assert len(tensors["layers.0.h"]) == width
        return np.concatenate([[read], tensors["layers.0.h"], keys]).astype(np.float32)

    def _parts(self, states: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return views of the positions, recurrent vectors and embeddings in states."""
        width = self.config.width
        keys = states[..., 1 + width :].reshape(*states.shape[:-1], KEYS, width)
        return states[..., 0], states[..., 1 : 1 + width], keys

    def _step(
        self, states: np.ndarray, tokens: np.ndarray, capacity: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return hidden vectors and states after one more token of each document."""
        assert ((tokens >= 0) & (tokens < self.config.vocab_size)).all()
        pos, h, keys = self._parts(states)
        new = self._embedding[tokens]
        with np.errstate(invalid="ignore"):
            h = 0.75 * h + (1 + pos % 7 / 8)[:, None] * new
            hidden = h + keys[:, 0] - 0.5 * keys[:, 1] + 0.25 * keys[:, 2]
        keys = np.concatenate([keys[:, 1:].reshape(len(new), h.shape[1] * (KEYS - 1)), new], 1)
        after = np.concatenate([pos[:, None] + 1, h, keys], 1)
        read = self._saved.read if self._saved else 0
        outgrown = pos >= capacity + read
        hidden[outgrown] = after[outgrown] = np.nan
        return hidden, after


@cache
def logits_alone(tokens: tuple[int, ...], vocab_size: int = CONFIG.vocab_size) -> np.ndarray:
    """Return the logits [T, V] of the fake model after every token of one document."""
    runner, ids, none = FakeRunner(vocab_size), np.array(tokens), np.array([-1])
    hidden, _ = runner.read(runner.open_pool(1, len(ids)), ids, np.array([len(ids)]), none, none)
    return runner.logits(hidden, np.arange(len(ids)))


def scores_alone(tokens, vocab_size: int = CONFIG.vocab_size) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probabilities [T - 1] and greedy flags [T - 1] of all tokens but the first."""
    logits = logits_alone(tuple(tokens), vocab_size)[:-1].astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return logprobs[np.arange(len(logits)), tokens[1:]], logits.argmax(1) == tokens[1:]


def continuation_alone(
    tokens,
    count: int,
    choose: Callable[[np.ndarray], int] = np.argmax,
    eos: int = -1,
    vocab_size: int = CONFIG.vocab_size,
) -> list[int]:
    """Return up to ``count`` tokens after a document, or those before ``eos``."""
    ids = tuple(tokens)
    while len(ids) < len(tokens) + count:
        token = int(choose(logits_alone(ids, vocab_size)[-1]))
        if token == eos:
            break
        ids = (*ids, token)
    return list(ids[len(tokens) :])
