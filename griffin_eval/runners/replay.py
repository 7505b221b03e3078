"""A model that several processes share: one calls it, the others repeat its calls.

One process, the *leader*, runs the engine. The others are *followers*: they repeat the leader's
calls of the runner on their parts of the weights and of the states, and meet it in the sums. (The
engine itself decides by the clock and by free memory, so that it cannot run twice alike.)
"""

import functools
import itertools
import os
import pickle
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import numpy as np

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.runners.protocol import Runner

RESULTS = 4  # of a call at most
# Methods of a runner that every process calls on its own parts.
REPEATED = frozenset(
    "open_pool grow_pool start_from state_tensors write_state read start_decoding insert_rows "
    "decode_step score logits greedy".split()
)
# Methods and attributes in which the leader speaks for all processes.
OF_THE_LEADER = frozenset(
    "framework config dtype step_tokens step_rows decode_rows kernel attention_kernel compilations "
    "padded_tokens padded_batch state_bytes step_bytes peak_memory".split()
)


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

    def recover(self, error: Exception) -> Exception:
        """Answer a failed call to all followers, before anyone tries again.

        Returns:
            What to raise: the error, a `MemoryError` if memory ran out in a follower, or a
            `ProcessLost` if the processes cannot go on together.
        """
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
        options: Keyword arguments, none of which is a shared value.
        numbers: of the shared values that it returns.
        dropped: numbers of values that are not needed any more.
    """

    method: str
    arguments: list[Any]
    options: dict[str, Any]
    numbers: list[int]
    dropped: list[int]


class LeadingRunner:
    """The leader of processes that share a model. See `griffin_eval.runners.protocol.Runner`.

    Args:
        mine: the leader's own part.
    """

    def __init__(self, mine: Runner, channel: Channel):
        self._mine, self._channel = mine, channel
        self._numbers, self._dropped = itertools.count(), list[int]()
        # With JAX every process knows all devices, with PyTorch its own.
        known = mine.devices > 1
        self.devices = mine.devices if known else channel.processes
        self.device = mine.device if known else f"{channel.processes} x {mine.device}"
        weakref.finalize(self, channel.close)  # at the latest when this process ends

    def __getattr__(self, name: str) -> Any:
        if name in REPEATED:
            return functools.partial(self._call, name)
        if name in OF_THE_LEADER:
            return getattr(self._mine, name)
        raise AttributeError(f"a runner has no {name!r}")

    def free_memory(self) -> int:
        # Processes on a CPU share its memory.
        cpu = self._mine.device.startswith("cpu")
        return self._mine.free_memory() // (self._channel.processes if cpu else 1)

    def stage(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoint  # every process reads its part when it is adopted

    def adopt(self, staged: Checkpoint) -> None:
        self._call("replace_weights", staged.path, staged.overrides)

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Calls a method of the runner in every process; gives the leader's result."""
        dropped = self._dropped[:]
        del self._dropped[: len(dropped)]  # of the list that shared values know
        sent = [Reference(a.number) if isinstance(a, Shared) else a for a in arguments]
        numbers = [next(self._numbers) for _ in range(RESULTS)]
        message = pickle.dumps(Call(method, sent, options, numbers, dropped))
        own = [a.value if isinstance(a, Shared) else a for a in arguments]
        try:
            self._channel.send(message)
            result = getattr(self._mine, method)(*own, **options)
        except (MemoryError, RuntimeError, OSError) as error:
            raise self._channel.recover(error) from error
        return _shared(result, numbers, self._shared)

    def _shared(self, value: Any, number: int) -> Shared:
        shared = Shared(value, number)
        weakref.finalize(shared, self._dropped.append, number)
        return shared


def lead(mine: Runner, channel: Channel) -> Runner:
    """Return the runner of the leader, which has the protocol's methods by two tables of names."""
    return cast(Runner, LeadingRunner(mine, channel))


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


class Regroup(NamedTuple):
    """The message that a call has failed in one of the processes, and that all go on after it.

    Attributes:
        names: Number of groups of processes that each of them has before the next one is made.
    """

    names: int


def repeat(
    runner: Runner,
    receive: Callable[[], bytes],
    failed: Callable[[Exception], object] | None = None,
    regroup: Callable[[int], object] = lambda names: None,
) -> None:
    """Repeats the leader's calls, until there are no more.

    Args:
        runner: this process's part of the model.
        receive: gives the leader's next message, an empty one at the end.
        failed: Function that tells the leader of a failed call; None if that ends this process.
        regroup: Function that makes the group again in which the processes meet.

    Raises:
        RuntimeError: A call failed, and the leader has not gone on after it.
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
        if failure is not None:  # the leader has yet to meet this process
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
    """`repeat`, and ends this process: with exit code 0 when the leader has ended, with 1 and a
    sentence when this process cannot go on.

    Args:
        runner, receive, recovery: as of `repeat`.
        leave: what to do when the leader has ended.
    """
    try:
        repeat(runner, receive, **recovery)
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
