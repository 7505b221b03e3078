"""A model that PyTorch splits over devices, each in a process of its own.

One process, the *leader*, runs the engine. The others are *followers*: they repeat the leader's
calls of the runner on their parts of the weights and of the states, and meet it in the sums. (The
engine itself decides by the clock and by free memory, so that it cannot run twice alike.)
"""

import contextlib
import datetime
import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.overrides import Overrides
from griffin_eval.errors import ArgumentError, ProcessLost
from griffin_eval.kernels.cpu.compiled import usable_cpus
from griffin_eval.runners.torch_runner import TorchRunner, choose_device
from griffin_eval.sharding import processes_torch

# Not ``-m``, which would read this module a second time under another name.
FOLLOWER = "from griffin_eval.runners.torch_parallel import main; main()"
RESULTS = 4  # of a call at most
PATIENCE = 60  # seconds that a process waits for the others in a sum


class Job(NamedTuple):
    """What a follower is told first.

    Attributes:
        path, overrides: of the checkpoint.
        dtype: as of `TorchRunner.load`.
        kind: of the devices, ``cpu`` or ``cuda``.
        rank: of the follower, 1 or more.
        processes: how many there are.
        port: where they find each other.
    """

    path: Path
    overrides: Overrides
    dtype: str
    kind: str
    rank: int
    processes: int
    port: int


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
    """What a follower is told then, once for each call.

    Attributes:
        method: of `TorchRunner`.
        arguments: with references in the place of shared values.
        numbers: of the shared values that it returns.
        dropped: numbers of values that are not needed any more.
    """

    method: str
    arguments: list[Any]
    numbers: list[int]
    dropped: list[int]


class ParallelRunner:
    """The leader of processes that share a model. See `griffin_eval.runners.protocol.Runner`.

    Args:
        mine: the leader's own part.
        followers: the other processes, which read calls from their standard input.
    """

    framework = "torch"

    def __init__(self, mine: TorchRunner, followers: list[subprocess.Popen]):
        self._mine, self._followers = mine, followers
        self._numbers, self._dropped = itertools.count(), list[int]()
        self.config, self.dtype = mine.config, mine.dtype
        self.devices = len(followers) + 1
        self.device = f"{self.devices} x {mine.device}"
        self.step_tokens, self.step_rows = mine.step_tokens, mine.step_rows
        self.decode_rows, self.kernel = mine.decode_rows, mine.kernel
        self.attention_kernel = mine.attention_kernel
        weakref.finalize(self, _stop, followers)  # at the latest when this process ends

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
        shared = 1 if self._mine.device.startswith("cuda") else len(self._followers) + 1
        return self._mine.free_memory() // shared

    def open_pool(self, rows: int, capacity: int) -> Any:
        return self._call("open_pool", rows, capacity)

    def grow_pool(self, pool: Any, rows: int, capacity: int) -> Any:
        return self._call("grow_pool", pool, rows, capacity)

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
        return 0

    def _call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the runner in every process; gives the leader's result."""
        dropped = self._dropped[:]
        del self._dropped[: len(dropped)]  # of the list that shared values know
        sent = [Reference(a.number) if isinstance(a, Shared) else a for a in arguments]
        numbers = [next(self._numbers) for _ in range(RESULTS)]
        message = pickle.dumps(Call(method, sent, numbers, dropped))
        own = [a.value if isinstance(a, Shared) else a for a in arguments]
        try:
            for follower in self._followers:
                _send(follower, message)
            result = getattr(self._mine, method)(*own)
        except (RuntimeError, OSError) as error:
            raise _reason(self._followers, error) from error
        return _shared(result, numbers, self._shared)

    def _shared(self, value: Any, number: int) -> Shared:
        shared = Shared(value, number)
        weakref.finalize(shared, self._dropped.append, number)
        return shared


def _shared(result: Any, numbers: list[int], make: Any) -> Any:
    """The result of a call, with what is not numpy's made into a shared value."""
    # A state is a tuple as well, of a class of its own.
    if type(result) is not tuple:
        return result if isinstance(result, np.ndarray) else make(result, numbers[0])
    return tuple(
        value if isinstance(value, np.ndarray) else make(value, number)
        for value, number in zip(result, numbers, strict=False)
    )


def load(checkpoint: Checkpoint, dtype: str, device: str | None, count: int) -> ParallelRunner:
    """Starts the other processes, and loads a part of the model in each.

    Args:
        checkpoint: that is open.
        dtype, device: as of `griffin_eval.runners.load.load_runners`.
        count: number of processes, this one included, 2 or more.

    Raises:
        ArgumentError: there are fewer devices, or this process shares a model already.
        RuntimeError: a process that did not come to the end of loading.
    """
    if dist.is_initialized():
        raise ArgumentError(
            f"tensor_parallel_size={count} with PyTorch starts its own processes, for one model: "
            "start lm_eval without a launcher, and load no second such model"
        )
    kind = choose_device(device).type
    if kind == "cuda" and count > torch.cuda.device_count():
        raise ArgumentError(
            f"tensor_parallel_size={count} needs as many devices, and there are "
            f"{torch.cuda.device_count()} of cuda"
        )
    store = TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
    followers = []
    for rank in range(1, count):
        follower = subprocess.Popen([sys.executable, "-c", FOLLOWER], stdin=subprocess.PIPE)
        job = Job(checkpoint.path, checkpoint.overrides, dtype, kind, rank, count, store.port)
        _send(follower, pickle.dumps(job))
        followers.append(follower)
    try:
        mine = _load_part(checkpoint, dtype, kind, 0, count, store)
    except (RuntimeError, OSError) as error:
        reason = _reason(followers, error)
        _stop(followers)
        raise reason from error
    return ParallelRunner(mine, followers)


def _load_part(
    checkpoint: Checkpoint, dtype: str, kind: str, rank: int, count: int, store: TCPStore
) -> TorchRunner:
    """Loads a process's part of the model, and waits until all have theirs."""
    if kind == "cpu":
        torch.set_num_threads(max(usable_cpus() // count, 1))
    patience = datetime.timedelta(seconds=PATIENCE)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=patience)
    assert dist.group.WORLD is not None
    processes_torch.share(dist.group.WORLD)
    runner = TorchRunner.load(checkpoint, dtype, f"cuda:{rank}" if kind == "cuda" else "cpu")
    dist.barrier()
    return runner


def _send(follower: subprocess.Popen, message: bytes) -> None:
    assert follower.stdin is not None
    follower.stdin.write(message)
    follower.stdin.flush()


def _reason(followers: list[subprocess.Popen], error: Exception) -> Exception:
    """What to raise where a call failed: the end or the silence of a follower, if that is it."""
    time.sleep(1)  # for all of them to end that will
    codes = [(code, i) for i, f in enumerate(followers, start=1) if (code := f.poll()) is not None]
    if codes:  # one that was killed before those that its end has ended
        code, rank = min(codes)
        return ProcessLost(
            f"process {rank} of the {len(followers) + 1} that share the model ended with exit code "
            f"{code}: its message, if it left one, is above"
        )
    if "imed out" in str(error):
        return ProcessLost(
            f"one of the {len(followers) + 1} processes that share the model has not answered for "
            f"{PATIENCE} seconds"
        )
    return error


def _stop(followers: list[subprocess.Popen]) -> None:
    for follower in followers:
        with contextlib.suppress(OSError):
            assert follower.stdin is not None
            follower.stdin.close()
    for follower in followers:
        try:
            follower.wait(timeout=5)
        except subprocess.TimeoutExpired:
            follower.kill()
            follower.wait()


def follow(calls: BinaryIO) -> None:
    """Loads a part of a model, and repeats calls.

    Args:
        calls: a `Job`, then `Call` after `Call`, pickled.

    Raises:
        EOFError: there are no more calls.
    """
    job: Job = pickle.load(calls)
    store = TCPStore("127.0.0.1", job.port, job.processes)
    checkpoint = Checkpoint(job.path, job.overrides)
    runner = _load_part(checkpoint, job.dtype, job.kind, job.rank, job.processes, store)
    values: dict[int, Any] = {}
    while True:
        call: Call = pickle.load(calls)
        for number in call.dropped:
            del values[number]
        arguments = [values[a] if isinstance(a, Reference) else a for a in call.arguments]
        result = getattr(runner, call.method)(*arguments)
        del arguments
        _shared(result, call.numbers, lambda value, number: values.__setitem__(number, value))


def main() -> None:
    """Runs a follower."""
    # Ctrl-C reaches every process of a terminal: the leader ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with contextlib.suppress(EOFError):  # the leader has ended
            follow(sys.stdin.buffer)
    except Exception as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        print(f"griffin-eval, a process that shares the model: {said}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # the leader need not wait for this one's threads
