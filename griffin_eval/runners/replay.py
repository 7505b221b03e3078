"""A model that several processes share: one calls it, the others repeat its calls.

One process, the *leader*, runs the engine. The others are *followers*: they repeat the leader's
calls of the runner on their parts of the weights and of the states, and meet it in the sums. (The
engine itself decides by the clock and by free memory, so that it cannot run twice alike.)
"""

import itertools
import os
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.runners.protocol import Runner
from griffin_eval.states.saved_state import SavedState

RESULTS = 4  # of a call at most


class Channel(Protocol):
    """How the leader speaks to its followers.

    Attributes:
        processes: how many share the model, the leader included.
    """

    processes: int

    def send(self, message: bytes) -> None:
        """Sends a message to every follower.

        Raises:
            OSError, RuntimeError: one of them has ended.
        """
        ...

    def reason(self, error: Exception) -> Exception:
        """What to raise where a call failed: the end or the silence of a follower, if that is
        it."""
        ...

    def close(self) -> None:
        """Ends the followers."""
        ...


class Shared:
    """A value that every process has its own part of: a pool, a state or hidden vectors.

    Attributes:
        value: the leader's part.
        number: by which the followers know theirs.
    """

    def __init__(self, value: Any, number: int):
        self.value, self.number = value, number


class Reference(int):
    """The number of a shared value, in a call that is sent to followers."""


class Call(NamedTuple):
    """What a follower is told, once for each call.

    Attributes:
        method: of the runner.
        arguments: with references in the place of shared values.
        numbers: of the shared values that it returns.
        dropped: numbers of values that are not needed any more.
    """

    method: str
    arguments: list[Any]
    numbers: list[int]
    dropped: list[int]


class LeadingRunner:
    """The leader of processes that share a model. See `griffin_eval.runners.protocol.Runner`.

    Args:
        mine: the leader's own part.
        channel: to the followers.
    """

    def __init__(self, mine: Runner, channel: Channel):
        self._mine, self._channel = mine, channel
        self._numbers, self._dropped = itertools.count(), list[int]()
        self.framework, self.config, self.dtype = mine.framework, mine.config, mine.dtype
        # With JAX every process knows all devices, with PyTorch its own.
        known = mine.devices > 1
        self.devices = mine.devices if known else channel.processes
        self.device = mine.device if known else f"{channel.processes} x {mine.device}"
        self.step_tokens, self.step_rows = mine.step_tokens, mine.step_rows
        self.decode_rows, self.kernel = mine.decode_rows, mine.kernel
        self.attention_kernel = mine.attention_kernel
        weakref.finalize(self, channel.close)  # at the latest when this process ends

    def padded_tokens(self, count: int, smallest: int = 16) -> int:
        return self._mine.padded_tokens(count, smallest)

    def padded_batch(self, count: int) -> int:
        return self._mine.padded_batch(count)

    def state_bytes(self, capacity: int) -> int:
        return self._mine.state_bytes(capacity)

    def step_bytes(self, capacity: int) -> int:
        return self._mine.step_bytes(capacity)

    def free_memory(self) -> int:
        # Processes on a CPU share its memory.
        cpu = self._mine.device.startswith("cpu")
        return self._mine.free_memory() // (self._channel.processes if cpu else 1)

    def open_pool(self, rows: int, capacity: int) -> Any:
        return self._call("open_pool", rows, capacity)

    def grow_pool(self, pool: Any, rows: int, capacity: int) -> Any:
        return self._call("grow_pool", pool, rows, capacity)

    def start_from(self, saved: SavedState) -> None:
        self._call("start_from", saved)

    def state_tensors(self, pool: Any, row: int, read: int) -> dict[str, np.ndarray]:
        return self._call("state_tensors", pool, row, read)

    def write_state(
        self, pool: Any, row: int, tensors: dict[str, np.ndarray], read: int, capacity: int
    ) -> Any:
        return self._call("write_state", pool, row, tensors, read, capacity)

    def read(
        self,
        pool: Any,
        tokens: np.ndarray,
        lengths: np.ndarray,
        sources: np.ndarray,
        targets: np.ndarray,
        ablations: np.ndarray | None = None,
    ) -> tuple[Any, Any]:
        return self._call("read", pool, tokens, lengths, sources, targets, ablations)

    def start_decoding(self, batch: int, capacity: int) -> Any:
        return self._call("start_decoding", batch, capacity)

    def insert_rows(self, state: Any, rows: np.ndarray, pool: Any, sources: np.ndarray) -> Any:
        return self._call("insert_rows", state, rows, pool, sources)

    def decode_step(self, state: Any, tokens: np.ndarray, active: np.ndarray) -> tuple[Any, Any]:
        return self._call("decode_step", state, tokens, active)

    def score(
        self,
        hidden: Any,
        positions: np.ndarray,
        targets: np.ndarray,
        position_of: np.ndarray,
        softmax_dtype: str,
    ) -> tuple[np.ndarray, np.ndarray]:
        return self._call("score", hidden, positions, targets, position_of, softmax_dtype)

    def score_details(
        self,
        hidden: Any,
        positions: np.ndarray,
        targets: np.ndarray,
        position_of: np.ndarray,
        softmax_dtype: str,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        return self._call("score_details", hidden, positions, targets, position_of, softmax_dtype)

    def score_top(
        self,
        hidden: Any,
        positions: np.ndarray,
        targets: np.ndarray,
        position_of: np.ndarray,
        softmax_dtype: str,
        top: int,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        arguments = hidden, positions, targets, position_of, softmax_dtype, top
        return self._call("score_top", *arguments)

    def logits(self, hidden: Any, positions: np.ndarray) -> np.ndarray:
        return self._call("logits", hidden, positions)

    def greedy(self, hidden: Any, positions: np.ndarray) -> np.ndarray:
        return self._call("greedy", hidden, positions)

    def stage(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint  # every process reads its part when it is adopted

    def adopt(self, staged: Checkpoint) -> None:
        self._call("replace_weights", staged.path, staged.overrides)

    def peak_memory(self) -> int:
        return self._mine.peak_memory()

    @property
    def compilations(self) -> int:
        return self._mine.compilations

    def _call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the runner in every process; gives the leader's result."""
        dropped = self._dropped[:]
        del self._dropped[: len(dropped)]  # of the list that shared values know
        sent = [Reference(a.number) if isinstance(a, Shared) else a for a in arguments]
        numbers = [next(self._numbers) for _ in range(RESULTS)]
        message = pickle.dumps(Call(method, sent, numbers, dropped))
        own = [a.value if isinstance(a, Shared) else a for a in arguments]
        try:
            self._channel.send(message)
            result = getattr(self._mine, method)(*own)
        except (RuntimeError, OSError) as error:
            raise self._channel.reason(error) from error
        return _shared(result, numbers, self._shared)

    def _shared(self, value: Any, number: int) -> Shared:
        shared = Shared(value, number)
        weakref.finalize(shared, self._dropped.append, number)
        return shared


def _shared(result: Any, numbers: list[int], make: Any) -> Any:
    """The result of a call, with what is not numpy's made into a shared value."""
    alike = np.ndarray, dict, type(None)  # in all processes, a dict of arrays
    # A state is a tuple as well, of a class of its own.
    if type(result) is not tuple:
        return result if isinstance(result, alike) else make(result, numbers[0])
    return tuple(
        value if isinstance(value, alike) else make(value, number)
        for value, number in zip(result, numbers, strict=False)
    )


def repeat(runner: Runner, receive: Callable[[], bytes]) -> None:
    """Repeats the leader's calls, until there are no more.

    Args:
        runner: this process's part of the model.
        receive: gives the leader's next message, an empty one at the end.
    """
    values: dict[int, Any] = {}
    while message := receive():
        call: Call = pickle.loads(message)
        for number in call.dropped:
            del values[number]
        arguments = [values[a] if isinstance(a, Reference) else a for a in call.arguments]
        result = getattr(runner, call.method)(*arguments)
        del arguments
        _shared(result, call.numbers, lambda value, number: values.__setitem__(number, value))


def follow(
    runner: Runner, receive: Callable[[], bytes], leave: Callable[[], None] = lambda: None
) -> NoReturn:
    """`repeat`, and ends this process: with exit code 0 when the leader has ended, with 1 and a
    sentence when this process cannot go on.

    Args:
        runner, receive: as of `repeat`.
        leave: what to do when the leader has ended.
    """
    try:
        repeat(runner, receive)
        leave()
    except Exception as error:
        end(error)
    sys.stderr.flush()
    os._exit(0)  # nobody waits for this process's threads


def end(error: Exception) -> NoReturn:
    """Ends a follower that cannot go on."""
    said = (str(error).splitlines() or [type(error).__name__])[0]
    print(f"griffin-eval, a process that shares the model: {said}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)  # the leader need not wait for this one's threads
