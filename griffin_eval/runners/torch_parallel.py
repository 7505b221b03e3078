"""A model that PyTorch splits over devices, each in a process of its own
(`griffin_eval.runners.replay`).

The leader starts its followers itself, on this machine, or a launcher (torchrun, ``accelerate
launch``) has started all of them, maybe on several machines.
"""

import contextlib
import datetime
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.overrides import Overrides
from griffin_eval.errors import ArgumentError, CheckpointError, ProcessLost
from griffin_eval.kernels.cpu.compiled import usable_cpus
from griffin_eval.process import SPIN_COUNT, SPIN_VARIABLE, tune_process
from griffin_eval.runners.identity import check_alike, identity
from griffin_eval.runners.protocol import Runner
from griffin_eval.runners.replay import end, follow, lead
from griffin_eval.runners.torch_runner import TorchRunner, choose_device
from griffin_eval.sharding import processes_torch
from griffin_eval.sharding.launch import Launch

# Not ``-m``, which would read this module a second time under another name.
FOLLOWER = "from griffin_eval.runners.torch_parallel import main; main()"
PATIENCE = 60  # seconds that a process waits for the others in a sum
LOADING = datetime.timedelta(minutes=30)  # that one waits for the others to load their parts
LONG = datetime.timedelta(weeks=52)  # that a follower waits for a call, and documents for others


class Job(NamedTuple):
    """What a follower that the leader has started is told first.

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


class Pipes:
    """To followers that read calls from their standard input. See
    `griffin_eval.runners.replay.Channel`."""

    def __init__(self, followers: list[subprocess.Popen]):
        self._followers, self.processes = followers, len(followers) + 1

    def send(self, message: bytes) -> None:
        for follower in self._followers:
            assert follower.stdin is not None
            follower.stdin.write(struct.pack("<q", len(message)) + message)
            follower.stdin.flush()

    def reason(self, error: Exception) -> Exception:
        time.sleep(1)  # for all of them to end that will
        polled = ((follower.poll(), rank) for rank, follower in enumerate(self._followers, start=1))
        codes = [(code, rank) for code, rank in polled if code is not None]
        if codes:  # one that was killed before those that its end has ended
            code, rank = min(codes)
            return ProcessLost(
                f"process {rank} of the {self.processes} that share the model ended with exit code "
                f"{code}: its message, if it left one, is above"
            )
        return _silent(error, f"one of the {self.processes} processes that share the model")

    def close(self) -> None:
        processes_torch.leave()
        for follower in self._followers:
            with contextlib.suppress(OSError):
                assert follower.stdin is not None
                follower.stdin.close()
        for follower in self._followers:
            try:
                follower.wait(timeout=5)
            except subprocess.TimeoutExpired:
                follower.kill()
                follower.wait()


class Broadcast:
    """To followers that a launcher has started. See `griffin_eval.runners.replay.Channel`.

    Args:
        calls: group of the processes that share the model, of gloo.
        first: rank of the leader among all processes.
    """

    def __init__(self, calls: dist.ProcessGroup, first: int):
        self._calls, self._first, self.processes = calls, first, dist.get_world_size(calls)

    def send(self, message: bytes) -> None:
        dist.broadcast_object_list([message], group=self._calls, group_src=0)

    def receive(self) -> bytes:
        """The leader's next message."""
        messages: list[Any] = [None]
        dist.broadcast_object_list(messages, group=self._calls, group_src=0)
        return messages[0]

    def reason(self, error: Exception) -> Exception:
        last = self._first + self.processes - 1
        others = f"one of the processes {self._first + 1} to {last} that share the model"
        said = str(error)
        if "onnection" in said or "peer" in said:
            return ProcessLost(f"{others} has ended: its message, if it left one, is above")
        return _silent(error, others)

    def close(self) -> None:
        processes_torch.leave()
        with contextlib.suppress(RuntimeError):  # they have ended already
            self.send(b"")
        # Which ends its threads, as `processes_torch.leave` does: one may still hold the message.
        dist.destroy_process_group(self._calls)
        del self._calls


def _silent(error: Exception, others: str) -> Exception:
    """The error, or a sentence about others that do not answer."""
    if "imed out" in str(error):
        return ProcessLost(f"{others} has not answered for {PATIENCE} seconds")
    return error


def load(checkpoint: Checkpoint, dtype: str, device: str | None, count: int) -> Runner:
    """Starts the other processes, and loads a part of the model in each.

    Args:
        dtype, device: as of `griffin_eval.runners.load.load_runners`.
        count: number of processes, this one included, 2 or more.

    Raises:
        ArgumentError: there are fewer devices, or this process shares a model already.
        RuntimeError: a process that did not come to the end of loading.
    """
    if dist.is_initialized():
        raise ArgumentError(
            f"tensor_parallel_size={count} with PyTorch starts its own processes, for one model: "
            "load no second such model in one process"
        )
    kind = choose_device(device).type
    if kind == "cuda" and count > torch.cuda.device_count():
        raise ArgumentError(
            f"tensor_parallel_size={count} needs as many devices, and there are "
            f"{torch.cuda.device_count()} of cuda"
        )
    store = _open_store(count)
    env = {SPIN_VARIABLE: SPIN_COUNT} | os.environ
    followers = [  # -P: nothing is imported from the folder that the user is in
        subprocess.Popen([sys.executable, "-P", "-c", FOLLOWER], stdin=subprocess.PIPE, env=env)
        for _ in range(1, count)
    ]
    for rank, follower in enumerate(followers, start=1):
        job = Job(checkpoint.path, checkpoint.overrides, dtype, kind, rank, count, store.port)
        Pipes([follower]).send(pickle.dumps(job))
    channel = Pipes(followers)
    try:
        for rank in range(1, count):
            while not store.check([str(rank)]):
                time.sleep(0.05)
                if any(follower.poll() is not None for follower in followers):
                    raise RuntimeError("a follower has ended")
        mine = _load_part(checkpoint, dtype, kind, 0, count, store)
    except (RuntimeError, OSError) as error:
        reason = channel.reason(error)
        channel.close()
        raise reason from error
    except CheckpointError:
        channel.close()
        raise
    return lead(mine, channel)


def _open_store(processes: int) -> TCPStore:
    """Where the processes find each other. Only this machine can reach it: a store that opens its
    port by itself listens to all networks."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    opened: Any = {"is_master": True, "wait_for_workers": False}
    return TCPStore("127.0.0.1", port, processes, **opened, master_listen_fd=listener.detach())


def _load_part(
    checkpoint: Checkpoint, dtype: str, kind: str, rank: int, count: int, store: TCPStore
) -> TorchRunner:
    """Loads a process's part of the model, and waits until all have theirs."""
    _open_group(store=store, rank=rank, world_size=count, timeout=LOADING)
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    return _part(checkpoint, dtype, device, count, list(range(count)))


def _part(
    checkpoint: Checkpoint, dtype: str, device: str, neighbours: int, ranks: list[int]
) -> TorchRunner:
    """A part of the model, when all processes that share it have theirs.

    Args:
        checkpoint, dtype, device: as of `TorchRunner.load`.
        neighbours: processes of this machine, which divide its processor.
        ranks: the processes that share the model.
    """
    alone: Any = {"ranks": ranks, "use_local_synchronization": True}
    loading: Any = dist.new_group(backend="gloo", timeout=LOADING, **alone)
    backend = "gloo" if device == "cpu" else "nccl"
    patience = datetime.timedelta(seconds=PATIENCE)
    group: Any = dist.new_group(backend=backend, timeout=patience, **alone)
    if device == "cpu":
        torch.set_num_threads(max(usable_cpus() // neighbours, 1))
    else:
        torch.cuda.set_device(device)
    processes_torch.share(group)
    runner = TorchRunner.load(checkpoint, dtype, device)
    dist.barrier(loading)
    return runner


def join(checkpoint: Checkpoint, dtype: str, device: str | None, launch: Launch) -> Runner:
    """Loads this process's part of a model among processes that a launcher has started.

    Neighbouring ranks share a model. The first of them returns and leads. The others follow it, and
    end with it: they do not return.

    Args:
        dtype: as of `griffin_eval.runners.load.load_runners`.
        device: as of `Launch.device`.

    Raises:
        ArgumentError: the processes do not find each other, or have not got the same checkpoint,
            versions and arguments.
    """
    kind = choose_device(device).type
    open_group(launch)
    alike: list[Any] = [None] * launch.world_size
    dist.all_gather_object(alike, identity(checkpoint, "torch", dtype, launch.sharing))
    check_alike(alike, launch.rank)
    if launch.sharing == 1:
        return TorchRunner.load(checkpoint, dtype, device)
    first = launch.rank - launch.part
    ranks = list(range(first, first + launch.sharing))
    calls: Any = dist.new_group(ranks, LONG, "gloo", use_local_synchronization=True)
    where = "cpu" if kind == "cpu" else f"cuda:{launch.local_rank}"
    channel = Broadcast(calls, first)
    try:
        mine = _part(checkpoint, dtype, where, launch.local_world_size, ranks)
    except (RuntimeError, OSError) as error:
        if launch.part:
            end(error)
        raise channel.reason(error) from error
    if launch.part:
        # Ctrl-C reaches every process of a terminal: the leader ends the others.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        follow(mine, channel.receive)
    return lead(mine, channel)


def open_group(launch: Launch) -> None:
    """Joins all processes that a launcher has started, once.

    Raises:
        ArgumentError: the environment is not as launchers leave it, or the others do not answer.
    """
    if dist.is_initialized():
        return
    try:
        _open_group(timeout=LONG)
    except (ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"WORLD_SIZE={launch.world_size}, but its processes do not find each other "
            f"({str(error).splitlines()[0]}): start lm_eval with torchrun or accelerate "
            "launch, or unset WORLD_SIZE"
        ) from error


def _open_group(**arguments: Any) -> None:
    # It sets an excepthook which prints nothing where the one before ends the process.
    hook = sys.excepthook
    dist.init_process_group("gloo", **arguments)
    sys.excepthook = hook


def receive(pipe: BinaryIO) -> bytes:
    """The next message of `Pipes`, an empty one where the leader has ended."""
    length = pipe.read(8)
    return pipe.read(*struct.unpack("<q", length)) if len(length) == 8 else b""


def main() -> None:
    """Runs a follower that the leader has started."""
    # Ctrl-C reaches every process of a terminal: the leader ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tune_process()  # which is its own
    pipe = sys.stdin.buffer
    try:
        job: Job = pickle.loads(receive(pipe))
        store = TCPStore("127.0.0.1", job.port, job.processes)
        store.set(str(job.rank), "")  # this process has started
        checkpoint = Checkpoint(job.path, job.overrides)
        runner = _load_part(checkpoint, job.dtype, job.kind, job.rank, job.processes, store)
    except Exception as error:
        end(error)
    follow(runner, lambda: receive(pipe))
