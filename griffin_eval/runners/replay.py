"""A model that several processes share: one calls it, the others repeat its calls.

The *leader* process runs the engine. *Followers* repeat the leader's calls of the runner on their
parts of the weights and of the states, and meet it in collective sums. (The engine cannot run in
every process, since it decides by the clock and by free memory.)
"""

import contextlib
import functools
import itertools
import os
import pickle
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import numpy as np

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.runners.protocol import Runner

RESULTS = 4  # maximum number of results of a call
# Methods of a runner that every process calls on its own part.
REPEATED = frozenset(
    "open_pool grow_pool start_from state_tensors write_state read start_decoding insert_rows "
    "decode_step score logits greedy".split()
)
# Methods and attributes that only the leader evaluates.
OF_THE_LEADER = frozenset(
    "framework config dtype step_tokens step_rows decode_rows kernel attention_kernel compilations "
    "padded_tokens padded_batch state_bytes step_bytes peak_memory".split()
)


class Channel(Protocol):
    """A way for the leader to send to its followers."""

    processes: int  # number of processes that share the model, including the leader

    def send(self, message: bytes) -> None:
        """Send a message to every follower; OSError or RuntimeError means that one has ended."""
        ...

    def recover(self, error: Exception) -> Exception:
        """Tell all followers that a call failed, before anyone tries again.

        Returns the exception to raise: the error, a `MemoryError` if memory ran out in a follower,
        or a `ProcessLost` if the processes cannot continue together.
        """
        ...

    def close(self) -> None:
        """End the followers."""
        ...


class Shared:
    """A value of which every process has a part: a pool, a state or hidden vectors. Followers keep
    their parts by its number."""

    def __init__(self, value: Any, number: int):
        self.value, self.number = value, number


class Reference(int):
    """The number of a shared value, as an argument of a call that is sent to followers."""


class Call(NamedTuple):
    """A call that followers repeat. Shared values are represented by numbers."""

    method: str
    arguments: list[Any]  # with references in place of shared values
    options: dict[str, Any]  # keyword arguments, without shared values
    numbers: list[int]  # numbers for the shared values that the call returns
    dropped: list[int]  # numbers of shared values that are no longer needed


class LeadingRunner:
    """The runner of the leader. See `griffin_eval.runners.protocol.Runner`."""

    def __init__(self, mine: Runner, channel: Channel):
        self._mine, self._channel = mine, channel
        self._numbers, self._dropped = itertools.count(), list[int]()
        # In JAX every process knows all devices, in PyTorch only its own.
        known = mine.devices > 1
        self.devices = mine.devices if known else channel.processes
        self.device = mine.device if known else f"{channel.processes} x {mine.device}"
        weakref.finalize(self, channel.close)  # runs when this process ends, or earlier

    def __getattr__(self, name: str) -> Any:
        if name in REPEATED:
            return functools.partial(self._call, name)
        if name in OF_THE_LEADER:
            return getattr(self._mine, name)
        raise AttributeError(f"a runner has no {name!r}")

    def free_memory(self) -> int:
        # Processes on a CPU share the host's memory.
        cpu = self._mine.device.startswith("cpu")
        return self._mine.free_memory() // (self._channel.processes if cpu else 1)

    def stage(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint  # every process reads its part when it is adopted

    def adopt(self, staged: Checkpoint) -> None:
        self._call("replace_weights", staged.path, staged.overrides)

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the runner in every process; return the leader's result."""
        dropped = self._dropped[:]
        del self._dropped[: len(dropped)]  # in place: finalizers append to this list
        sent = [Reference(a.number) if isinstance(a, Shared) else a for a in arguments]
        numbers = [next(self._numbers) for _ in range(RESULTS)]
        message = pickle.dumps(Call(method, sent, options, numbers, dropped))
        own = [a.value if isinstance(a, Shared) else a for a in arguments]
        try:
            with _interrupted_afterwards():  # followers must not stay in this call
                self._channel.send(message)
                result = getattr(self._mine, method)(*own, **options)
        except (MemoryError, RuntimeError, OSError) as error:
            self._dropped += numbers  # a follower may have stored its results
            raise self._channel.recover(error) from error
        return _shared(result, numbers, self._shared)

    def _shared(self, value: Any, number: int) -> Shared:
        shared = Shared(value, number)
        weakref.finalize(shared, self._dropped.append, number)
        return shared


@contextlib.contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Let a Ctrl-C during a block of the main thread take effect at its end."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *arguments: arrived.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if arrived:
            previous(*arrived[0])


def lead(mine: Runner, channel: Channel) -> Runner:
    """Return the runner of the leader, which has the protocol's methods by two tables of names."""
    return cast(Runner, LeadingRunner(mine, channel))


def _shared(result: Any, numbers: list[int], make: Any) -> Any:
    """Replace the opaque values in a result by shared values."""
    alike = np.ndarray, dict, type(None)  # equal in all processes
    # A state is an instance of a subclass of tuple.
    if type(result) is not tuple:
        return result if isinstance(result, alike) else make(result, numbers[0])
    return tuple(
        value if isinstance(value, alike) else make(value, number)
        for value, number in zip(result, numbers, strict=False)
    )


class Regroup(NamedTuple):
    """The message to continue after a call has failed in one of the processes."""

    names: int  # number of process groups to have before the next one is made


def repeat(
    runner: Runner,
    receive: Callable[[], bytes],
    failed: Callable[[Exception], object] | None = None,
    regroup: Callable[[int], object] = lambda names: None,
) -> None:
    """Repeat the leader's calls until there are no more.

    Args:
        runner: This process's part of the model.
        receive: Function that returns the leader's next message, or an empty one at the end.
        failed: Function that tells the leader of a failed call; None raises the error instead.
        regroup: Function that makes the process group again.
    """
    values: dict[int, Any] = {}
    failure: Exception | None = None
    while message := receive():
        call: Call | Regroup = pickle.loads(message)
        if isinstance(call, Regroup):
            failure = None
            regroup(call.names)
            continue
        for number in call.dropped:
            values.pop(number, None)
        if failure is not None:  # skip calls until the leader regroups
            continue
        arguments = [values[a] if isinstance(a, Reference) else a for a in call.arguments]
        try:
            result = getattr(runner, call.method)(*arguments, **call.options)
        except (MemoryError, RuntimeError) as error:
            if failed is None:
                raise
            traceback.clear_frames(error.__traceback__)
            failure = error.with_traceback(None)
            failed(error)
            continue
        finally:
            del arguments
        _shared(result, call.numbers, lambda value, number: values.__setitem__(number, value))
        del result
    if failure is not None:
        raise failure


def follow(
    runner: Runner,
    receive: Callable[[], bytes],
    leave: Callable[[], None] = lambda: None,
    **recovery: Any,
) -> NoReturn:
    """Run `repeat`, then end this process: with exit code 0 after ``leave`` when the leader has
    ended, or with 1 and a message when this process cannot continue."""
    try:
        repeat(runner, receive, **recovery)
        leave()
    except Exception as error:
        end(error)
    sys.stderr.flush()
    os._exit(0)  # do not wait for threads


def end(error: Exception) -> NoReturn:
    """End a follower that cannot continue."""
    said = (str(error).splitlines() or [type(error).__name__])[0]
    print(f"griffin-eval, a process that shares the model: {said}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)  # do not wait for threads
