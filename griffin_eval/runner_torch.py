"""The PyTorch runner."""

import contextlib
import ctypes
import logging
from typing import NamedTuple

import numpy as np
import torch

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError
from griffin_eval.kernels.rglru.api import choose
from griffin_eval.kernels.rglru.reference import Gates
from griffin_eval.model_torch.griffin import Griffin
from griffin_eval.model_torch.loading import load
from griffin_eval.model_torch.state import (
    State,
    empty,
    enter,
    gather,
    nbytes,
    rewind,
    store,
)
from griffin_eval.model_torch.state import forget as forget_in
from griffin_eval.runners import (
    ROOM,
    attention_tile,
    host_memory,
    in_blocks,
    peak_host_memory,
    step_tokens,
)

logger = logging.getLogger(__name__)


class Decoding(NamedTuple):
    """States of documents that are continued, with `ROOM`, and how far their windows moved."""

    rows: State
    moved: int


class TorchRunner:
    """`Runner` over `griffin_eval.model_torch`."""

    framework = "torch"

    def __init__(self, model: Griffin):
        weight = model.model.embed_tokens.weight
        self.model = model.requires_grad_(False).eval()
        self.config = model.config
        self.device = str(weight.device)
        self.dtype = str(weight.dtype).removeprefix("torch.")
        self.step_tokens = step_tokens(self.device)
        one = weight.new_empty(1, 1, 1)
        gates = Gates(*[one] * 6) if self.config.complex_gates else None
        self.kernel = choose(one, gates, starts=one)

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: str, device: str | None):
        """See `griffin_eval.runners.load_runner`."""
        chosen, where = None if dtype == "auto" else getattr(torch, dtype), choose_device(device)
        if where.type == "cpu":
            keep_freed_memory()
        return cls(load(checkpoint, chosen, where))

    def bucket(self, count: int, smallest: int = 16) -> int:
        return count

    def row_bucket(self, count: int) -> int:
        return count

    def state_bytes(self, capacity: int) -> int:
        return nbytes(self.model.init_state(1, capacity))

    def free_memory(self) -> int:
        device = torch.device(self.device)
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()

    def open_pool(self, rows: int, capacity: int) -> State:
        start = self.model.init_state(1, capacity)
        pool = empty(start, rows + 1)  # one more, which stays at the start
        return store(pool, self._put(np.array([rows])), start)

    def grow_pool(self, pool: State, rows: int, capacity: int) -> State:
        old = torch.arange(len(pool.pos) - 1, device=self.device)
        return store(self.open_pool(rows, capacity), old, gather(pool, old))

    @torch.inference_mode()
    def read(
        self,
        pool: State,
        tokens: np.ndarray,
        lengths: np.ndarray,
        sources: np.ndarray,
        targets: np.ndarray,
        forget: np.ndarray | None = None,
    ) -> tuple[torch.Tensor, State]:
        state = self._take(pool, sources)
        if forget is not None:
            what = self._put(forget)
            state = forget_in(state, recurrent=what & 1 > 0, attention=what & 2 > 0)
        tile = attention_tile(len(tokens), len(lengths))
        hidden, after = self.model.step_packed(self._put(tokens), self._put(lengths), state, tile)
        wanted = np.flatnonzero(targets >= 0)
        if len(wanted):
            store(pool, self._put(targets[wanted]), gather(after, self._put(wanted)))
        return hidden[0], pool

    def init_state(self, batch: int, capacity: int) -> "Decoding":
        return Decoding(self.model.init_state(batch, capacity, ROOM), 0)

    @torch.inference_mode()
    def decode(
        self, tokens: np.ndarray, active: np.ndarray, state: "Decoding"
    ) -> tuple[torch.Tensor, "Decoding"]:
        rows, moved = state
        if moved == ROOM:
            rows, moved = rewind(rows, ROOM), 0
        hidden, rows = self.model.step_one(self._put(tokens), self._put(active), rows, ROOM, moved)
        return hidden, Decoding(rows, moved + 1)

    @torch.inference_mode()
    def enter(
        self, state: "Decoding", rows: np.ndarray, pool: State, sources: np.ndarray
    ) -> "Decoding":
        enter(state.rows, self._put(rows), self._take(pool, sources), state.moved)
        return state

    @torch.inference_mode()
    def score(
        self,
        hidden: torch.Tensor,
        at: np.ndarray,
        targets: np.ndarray,
        which: np.ndarray,
        softmax_dtype: str,
    ) -> tuple[np.ndarray, np.ndarray]:
        logprobs = np.empty(len(targets), np.float64)
        greedy = np.empty(len(targets), bool)
        first = 0
        for positions, mine in in_blocks(at, which, self.config.vocab_size):
            logits = self._logits(hidden, positions).to(getattr(torch, softmax_dtype))
            row, target = self._put(which[mine] - first), self._put(targets[mine])
            best, chosen = logits.argmax(1), logits[row, target]
            largest = logits.gather(1, best[:, None])
            # logits.logsumexp(1), in the place of the logits
            total = logits.sub_(largest).exp_().sum(1).log_().add_(largest[:, 0])
            logprobs[mine] = (chosen - total[row]).double().cpu().numpy()
            greedy[mine] = (best[row] == target).cpu().numpy()
            first += len(positions)
        return logprobs, greedy

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, at: np.ndarray) -> np.ndarray:
        return self._logits(hidden, at).cpu().numpy()

    @torch.inference_mode()
    def greedy(self, hidden: torch.Tensor, at: np.ndarray) -> np.ndarray:
        best, token = self._logits(hidden, at).max(1)
        return torch.where(best.isnan(), -1, token).cpu().numpy()

    def _take(self, pool: State, sources: np.ndarray) -> State:
        return gather(pool, self._put(np.where(sources < 0, len(pool.pos) - 1, sources)))

    def peak_memory(self) -> int:
        device = torch.device(self.device)
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return peak_host_memory()

    @property
    def compilations(self) -> int:
        return 0

    def _logits(self, hidden: torch.Tensor, at: np.ndarray) -> torch.Tensor:
        return self.model.logits(hidden[self._put(at)])

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, torch.int64)


def keep_freed_memory() -> None:
    """Lets this process keep what it frees for the next large tensor, where the C library is glibc.
    That would give each one back, and a new page costs more than what is computed on it."""
    mmap_threshold, trim_threshold, most = -3, -1, 1 << 30
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_threshold, most)
        libc.mallopt(trim_threshold, most)


def choose_device(device: str | None) -> torch.device:
    """The device asked for; lm_eval asks for cuda:0 unless told otherwise, so where there is none
    (or None is given) it is the accelerator there is, or the CPU, and the log says so.

    Raises:
        ArgumentError: not the name of a device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    best = accelerator or torch.device("cpu")
    if device is None:
        logger.info("running on %s", best)
        return best
    try:
        asked = torch.device(device)
    except RuntimeError:
        raise ArgumentError(
            f"unknown device {device!r}: expected one that torch names, such as cpu or cuda:0"
        ) from None
    if asked.type != "cpu" and (
        accelerator is None
        or asked.type != accelerator.type
        or (asked.index or 0) >= torch.accelerator.device_count()
    ):
        logger.info("there is no device %s here: running on %s", asked, best)
        return best
    return asked
