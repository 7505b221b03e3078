"""Models that PyTorch splits over devices, one process for each device
(`griffin_eval.runners.replay`).

The leader starts its followers itself on this machine, or a launcher (torchrun, ``accelerate
launch``) has started all processes, possibly on several machines.
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
import traceback
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.overrides import Overrides
from griffin_eval.errors import ArgumentError, ProcessLost, is_out_of_memory
from griffin_eval.kernels.cpu.compiled import usable_cpus
from griffin_eval.process import SPIN_COUNT, SPIN_VARIABLE, tune_process
from griffin_eval.runners.identity import check_alike, identity
from griffin_eval.runners.protocol import Runner
from griffin_eval.runners.replay import Regroup, end, follow, lead
from griffin_eval.runners.torch_runner import TorchRunner, choose_device
from griffin_eval.sharding import processes_torch
from griffin_eval.sharding.launch import Launch

# ``-m`` would import this module a second time under another name.
FOLLOWER = "from griffin_eval.runners.torch_parallel import main; main()"
PATIENCE = 60  # seconds that a process waits for the others in a sum
LOADING = datetime.timedelta(minutes=30)  # maximum wait for other processes to load their parts
LONG = datetime.timedelta(weeks=52)  # maximum wait of a follower for a call


class Job(NamedTuple):
    """The first message to a follower that the leader has started."""

    path: Path
    overrides: Overrides
    dtype: str
    kind: str  # kind of the devices, ``cpu`` or ``cuda``
    rank: int  # rank of the follower, 1 or more
    processes: int
    port: int  # port of the store


class Meeting:
    """Recovery of processes that share a model after a call has failed in one of them.

    When one process leaves the group, those that wait in a sum get an error. Then all make a new
    group. The first of the ranks is the leader's, and all of them reach the store.
    """

    def __init__(self, ranks: list[int], backend: str, store: Any):
        self._ranks, self._backend, self._store = ranks, backend, store

    def make_group(self, names: int | None = None) -> None:
        """Make the group; all its processes have to call this.

        ``names`` is the number of groups to have before. It is part of the name of the next group,
        which has to be new, and the same in all processes.
        """
        alone: Any = {"use_local_synchronization": True, "backend": "gloo"}
        while names is not None and self.names < names:
            dist.new_group([dist.get_rank()], **alone)
        patience = datetime.timedelta(seconds=PATIENCE)
        shared: Any = alone | {"backend": self._backend}
        group: Any = dist.new_group(self._ranks, timeout=patience, **shared)
        processes_torch.share(group)

    @property
    def names(self) -> int:
        """Number of groups that this process has made."""
        c10d: Any = dist.distributed_c10d
        return len(c10d._world.pg_names)

    def report(self, error: Exception) -> None:
        """Tell the leader that a call failed here, and release processes that wait for this one."""
        kind = "memory" if is_out_of_memory(error) else "other "
        self._store.set(self._key(dist.get_rank()), f"{kind} {type(error).__name__}: {error}")
        processes_torch.leave()

    def regroup(self, names: int) -> None:
        """Make a new group after a call has failed here or elsewhere."""
        processes_torch.leave()
        self.make_group(names)

    def reported(self) -> dict[int, str]:
        """Return and clear the messages of followers about failed calls, by rank."""
        told = {}
        with contextlib.suppress(RuntimeError):  # the store has ended with its process
            for rank in self._ranks[1:]:
                if self._store.check([self._key(rank)]):
                    told[rank] = self._store.get(self._key(rank)).decode()
                    self._store.delete_key(self._key(rank))
        return told

    def _key(self, rank: int) -> str:
        return f"griffin-eval: failed {rank}"

    def recover(self, channel: "Pipes | Broadcast", error: Exception) -> Exception:
        """See `griffin_eval.runners.replay.Channel`."""
        told = self.reported()
        if not any(text.startswith("memory") for text in told.values()):
            lost = channel.reason(error)
            if not isinstance(lost, ProcessLost) and told:
                rank, text = next(iter(told.items()))
                lost = ProcessLost(f"process {rank} that shares the model failed: {text[7:]}")
            if isinstance(lost, ProcessLost) or not is_out_of_memory(error):
                return lost
        traceback.clear_frames(error.__traceback__)
        processes_torch.leave()
        names = self.names + 1
        try:
            channel.send(pickle.dumps(Regroup(names)))
            self.make_group(names)
        except (RuntimeError, OSError) as again:
            return channel.reason(again)
        self.reported()  # clear messages of processes that only waited for this one
        if is_out_of_memory(error):
            return error
        rank, text = next((r, t) for r, t in told.items() if t.startswith("memory"))
        return MemoryError(f"out of memory in process {rank}: {text[7:]}")


class Pipes:
    """The `griffin_eval.runners.replay.Channel` to followers that read from standard input."""

    def __init__(self, followers: list[subprocess.Popen], meeting: Meeting | None = None):
        self._followers, self.processes = followers, len(followers) + 1
        self._meeting = meeting

    def recover(self, error: Exception) -> Exception:
        assert self._meeting is not None
        return self._meeting.recover(self, error)

    def send(self, message: bytes) -> None:
        for follower in self._followers:
            assert follower.stdin is not None
            follower.stdin.write(struct.pack("<q", len(message)) + message)
            follower.stdin.flush()

    def reason(self, error: Exception) -> Exception:
        """Return the loss of a follower if that is why a call failed; otherwise the error."""
        time.sleep(1)  # let all processes end that will
        polled = ((follower.poll(), rank) for rank, follower in enumerate(self._followers, start=1))
        codes = [(code, rank) for code, rank in polled if code is not None]
        if codes:  # a negative code first: a killed process is the cause of the others' ends
            code, rank = min(codes)
            return ProcessLost(
                f"process {rank} of the {self.processes} that share the model ended with exit code "
                f"{code}: its message, if it left one, is above"
            )
        several = len(self._followers) > 1
        who = f"one of the processes 1 to {len(self._followers)}" if several else "process 1"
        return _silent(error, f"{who} of the {self.processes} that share the model")

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
    """The `griffin_eval.runners.replay.Channel` to followers that a launcher has started. ``calls``
    is a gloo group of these processes, and ``first`` the leader's rank among all processes."""

    def __init__(self, calls: dist.ProcessGroup, first: int, meeting: Meeting):
        self._calls, self._first, self.processes = calls, first, dist.get_world_size(calls)
        self._meeting = meeting

    def recover(self, error: Exception) -> Exception:
        return self._meeting.recover(self, error)

    def send(self, message: bytes) -> None:
        dist.broadcast_object_list([message], group=self._calls, group_src=0)

    def receive(self) -> bytes:
        """Return the leader's next message."""
        messages: list[Any] = [None]
        dist.broadcast_object_list(messages, group=self._calls, group_src=0)
        return messages[0]

    def reason(self, error: Exception) -> Exception:
        """Return the loss of a follower if that is why a call failed; otherwise the error."""
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
        # Ends the group's threads, one of which may still hold the message.
        dist.destroy_process_group(self._calls)
        del self._calls


def _silent(error: Exception, others: str) -> Exception:
    """Return a `ProcessLost` for a timeout; otherwise the error."""
    if "imed out" in str(error):
        return ProcessLost(f"{others} has not answered for {PATIENCE} seconds")
    return error


def load(checkpoint: Checkpoint, dtype: str, device: str | None, count: int) -> Runner:
    """Start the other processes, and load a part of the model in each of ``count`` >= 2 processes.

    Raises ArgumentError if there are too few devices, or this process shares a model already, and
    RuntimeError if a process fails.
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
    followers = [  # -P: import nothing from the current folder
        subprocess.Popen([sys.executable, "-P", "-c", FOLLOWER], stdin=subprocess.PIPE, env=env)
        for _ in range(1, count)
    ]
    for rank, follower in enumerate(followers, start=1):
        job = Job(checkpoint.path, checkpoint.overrides, dtype, kind, rank, count, store.port)
        Pipes([follower]).send(pickle.dumps(job))
    meeting = _meeting(list(range(count)), kind, store)
    channel = Pipes(followers, meeting)
    try:
        for rank in range(1, count):
            while not store.check([str(rank)]):
                time.sleep(0.05)
                if any(follower.poll() is not None for follower in followers):
                    raise RuntimeError("a follower has ended")
        mine = _load_part(checkpoint, dtype, kind, 0, count, store, meeting)
    except (RuntimeError, OSError) as error:
        reason = channel.reason(error)
        channel.close()
        raise reason from error
    except BaseException:  # an interrupt as well
        channel.close()
        raise
    return lead(mine, channel)


def _open_store(processes: int) -> TCPStore:
    """Open the store on which the processes find each other, for this machine only: by default it
    would listen on all networks."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    opened: Any = {"is_master": True, "wait_for_workers": False}
    return TCPStore("127.0.0.1", port, processes, **opened, master_listen_fd=listener.detach())


def _load_part(
    checkpoint: Checkpoint,
    dtype: str,
    kind: str,
    rank: int,
    count: int,
    store: TCPStore,
    meeting: Meeting,
) -> TorchRunner:
    """Load a process's part of the model, and wait for all other processes."""
    _open_group(store=store, rank=rank, world_size=count, timeout=LOADING)
    device = f"cuda:{rank}" if kind == "cuda" else "cpu"
    return _part(checkpoint, dtype, device, count, list(range(count)), meeting)


def _meeting(ranks: list[int], kind: str, store: Any) -> Meeting:
    return Meeting(ranks, "gloo" if kind == "cpu" else "nccl", store)


def _part(
    checkpoint: Checkpoint,
    dtype: str,
    device: str,
    neighbours: int,
    ranks: list[int],
    meeting: Meeting,
) -> TorchRunner:
    """Load a part of the model on a device, and wait for all processes that share the model. The
    CPUs are divided among ``neighbours`` processes on this machine."""
    alone: Any = {"ranks": ranks, "use_local_synchronization": True}
    loading: Any = dist.new_group(backend="gloo", timeout=LOADING, **alone)
    meeting.make_group()
    if device == "cpu":
        torch.set_num_threads(max(usable_cpus() // neighbours, 1))
    else:
        torch.cuda.set_device(device)
    runner = TorchRunner.load(checkpoint, dtype, device)
    dist.barrier(loading)
    return runner


def join(checkpoint: Checkpoint, dtype: str, device: str | None, launch: Launch) -> Runner:
    """Load this process's part of a model among processes that a launcher has started.

    Neighbouring ranks share a model. The first of them returns and leads. The others follow it and
    end with it; they do not return. Raises ArgumentError if the processes do not find each other,
    or checkpoint, versions or arguments differ between them.
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
    c10d: Any = dist.distributed_c10d
    meeting = _meeting(ranks, kind, c10d._get_default_store())
    channel = Broadcast(calls, first, meeting)
    try:
        mine = _part(checkpoint, dtype, where, launch.local_world_size, ranks, meeting)
    except (RuntimeError, OSError) as error:
        if launch.part:
            end(error)
        raise channel.reason(error) from error
    if launch.part:
        # Ctrl-C reaches all processes of a terminal, but only the leader may end the others.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        follow(mine, channel.receive, failed=meeting.report, regroup=meeting.regroup)
    return lead(mine, channel)


def open_group(launch: Launch) -> None:
    """Join all processes that a launcher has started, once, or raise ArgumentError."""
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
    # `init_process_group` sets an excepthook that prints nothing if the previous one exits.
    hook = sys.excepthook
    dist.init_process_group("gloo", **arguments)
    sys.excepthook = hook


def receive(pipe: BinaryIO) -> bytes:
    """Return the next message of `Pipes`, or an empty one if the leader has ended."""
    length = pipe.read(8)
    return pipe.read(*struct.unpack("<q", length)) if len(length) == 8 else b""


def main() -> None:
    """Run a follower that the leader has started."""
    # Ctrl-C reaches all processes of a terminal, but only the leader may end the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tune_process()  # this process belongs to the package
    pipe = sys.stdin.buffer
    try:
        job: Job = pickle.loads(receive(pipe))
        store = TCPStore("127.0.0.1", job.port, job.processes)
        store.set(str(job.rank), "")  # signal that this process has started
        checkpoint = Checkpoint(job.path, job.overrides)
        meeting = _meeting(list(range(job.processes)), job.kind, store)
        runner = _load_part(
            checkpoint, job.dtype, job.kind, job.rank, job.processes, store, meeting
        )
    except Exception as error:
        end(error)
    follow(runner, lambda: receive(pipe), failed=meeting.report, regroup=meeting.regroup)
