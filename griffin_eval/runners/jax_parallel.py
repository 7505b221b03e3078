"""Models that JAX splits over the devices of several processes, possibly on several machines
(`griffin_eval.runners.replay`, `jax.distributed`).

XLA runs a program on devices of several processes once all of them have started it. The leader
tells its followers what to start over connections whose end shows that a process has ended. Leaders
of several replicas are connected too (`griffin_eval.runners.jax_leaders`).
"""

import atexit
import contextlib
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
from multiprocessing import AuthenticationError, connection
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError, ProcessLost, is_out_of_memory
from griffin_eval.runners.identity import check_alike, identity
from griffin_eval.runners.jax_leaders import Leaders
from griffin_eval.runners.jax_runner import JaxRunner, choose_device, devices_of_runners
from griffin_eval.runners.protocol import Runner
from griffin_eval.runners.replay import end, follow, lead
from griffin_eval.sharding.launch import COORDINATOR, Launch

PULSE = 5  # seconds between two signs of life of a follower
PATIENCE = 40  # seconds without a sign of life after which a follower counts as lost
GRACE = 10  # seconds for a call that waits for a lost follower to fail by itself
KEY = 32  # bytes of a connection's authentication key


def initialize() -> None:
    """Join the other processes of `jax.distributed` if the environment names any. Call this before
    JAX computes anything. Raises ArgumentError if they do not find each other."""
    if COORDINATOR in os.environ and not jax.distributed.is_initialized():
        # JAX asks the cluster manager, such as SLURM, for variables that are not set.
        names = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
        try:
            numbers: dict[str, Any] = {
                key: int(os.environ[n]) for key, n in names.items() if n in os.environ
            }
            jax.distributed.initialize(shutdown_timeout_seconds=GRACE, **numbers)
        except (ValueError, RuntimeError) as error:
            raise ArgumentError(
                f"{COORDINATOR}={os.environ[COORDINATOR]}, but its processes do not find each "
                f"other ({str(error).splitlines()[0]}): set JAX_NUM_PROCESSES, and in each process "
                "JAX_PROCESS_ID from 0 on"
            ) from error


def launched(device: str | None, tensor_parallel: int, data_parallel: int | None) -> Launch:
    """Return this process's place among those of `jax.distributed`, after `initialize`.

    If the devices do not fit the arguments of `griffin_eval.runners.load.load_runners`, process 0
    raises ArgumentError, and the others raise SystemExit.
    """
    processes, rank = jax.process_count(), jax.process_index()
    if processes == 1:
        return Launch()
    everywhere = len(jax.devices(choose_device(device).platform))
    per_process = everywhere // processes
    fits = _fits(tensor_parallel, per_process, processes)
    if not fits or data_parallel not in (None, everywhere // tensor_parallel):
        if rank:
            raise SystemExit(2)
        arguments = f"tensor_parallel_size={tensor_parallel}"
        if data_parallel is not None:
            arguments += f" and data_parallel_size={data_parallel}"
        sizes = [n for n in range(1, everywhere + 1) if _fits(n, per_process, processes)]
        raise ArgumentError(
            f"{arguments} with {processes} processes of {per_process} devices each: the replicas "
            f"use all of them, so tensor_parallel_size is one of {', '.join(map(str, sizes))}, and "
            f"data_parallel_size {everywhere} divided by it"
        )
    return Launch(rank, 0, processes, 1, max(tensor_parallel // per_process, 1))


def _fits(tensor_parallel: int, per_process: int, processes: int) -> bool:
    """Return whether replicas of this many devices use all devices of all processes."""
    if tensor_parallel <= per_process:
        return per_process % tensor_parallel == 0
    return tensor_parallel % per_process == 0 and processes % (tensor_parallel // per_process) == 0


class Connections:
    """The `griffin_eval.runners.replay.Channel` of connections to followers. ``first`` is the index
    of the leader among all processes."""

    def __init__(self, followers: list[connection.Connection], first: int):
        self._followers, self.processes, self._first = followers, len(followers) + 1, first
        self._closed = self._failure_reported = False
        self._lost: ProcessLost | None = None
        for rank, follower in enumerate(followers, start=1):
            threading.Thread(target=self._watch, args=(rank, follower), daemon=True).start()

    def send(self, message: bytes) -> None:
        for follower in self._followers:
            follower.send_bytes(message)

    def recover(self, error: Exception) -> Exception:
        reason = self.reason(error)
        if reason is not error or not is_out_of_memory(error):
            return reason
        return ProcessLost(
            f"memory ran out in the first of the {self.processes} processes that share the model, "
            "and JAX lets the others not go on: set max_batch_size= or state_budget="
        )

    def reason(self, error: Exception) -> Exception:
        """Return the loss of a follower if that is why a call failed; otherwise the error."""
        for _ in range(50):  # the watching thread notices the end of a process with a delay
            if self._lost is not None:
                self._failure_reported = True
                return self._lost
            time.sleep(0.1)
        return error

    def close(self) -> None:
        if self._lost is not None:
            sys.stderr.flush()
            os._exit(1)  # JAX would wait for the lost process
        self._closed = True
        with contextlib.suppress(OSError):
            self.send(b"")

    def _watch(self, rank: int, follower: connection.Connection) -> None:
        """Wait for the end of a follower, then end this process, since XLA may wait for ever."""
        who = f"process {rank} of the {self.processes} that share the model"
        if self._first:
            who += f" of process {self._first}"
        try:
            while follower.poll(PATIENCE):
                follower.recv_bytes()
            sentence = f"{who} has not answered for {PATIENCE} seconds"
        except (EOFError, OSError):
            sentence = f"{who} has ended: its message, if it left one, is with its own output"
        if self._closed:
            return
        self._lost = ProcessLost(sentence)
        time.sleep(GRACE)
        if not self._failure_reported:
            print(f"griffin: {sentence}", file=sys.stderr)
        sys.stderr.flush()
        time.sleep(GRACE * self._failure_reported)  # let this process exit by itself
        os._exit(1)


class Party(NamedTuple):
    """The message of each process to all others before it loads."""

    identity: dict[str, str]  # from `griffin_eval.runners.identity.identity`
    address: Any  # host and port of the listener, if this process leads
    key: bytes  # authentication key of the listener


def load(
    checkpoint: Checkpoint, dtype: str, device: str | None, tensor_parallel: int, launch: Launch
) -> list[Runner]:
    """Load this process's part of a model that is split over several processes, or as many replicas
    as its own devices make.

    The first process of those that share a model returns and leads. The others follow it and end
    with it. Raises ArgumentError if checkpoint, versions or arguments differ between processes.
    """
    first, key = launch.rank - launch.part, secrets.token_bytes(KEY)
    mine = identity(checkpoint, "jax", dtype, tensor_parallel)
    with _listener(key) if first == launch.rank else contextlib.nullcontext() as listener:
        address = None if listener is None else listener.address
        parties = _exchange(Party(mine, address, key))
        check_alike([party.identity for party in parties], launch.rank)
        if listener is None:
            _follow(_connect(parties[first]), checkpoint, dtype, _devices(device, launch))
        following = range(first + 1, first + launch.sharing)
        leading = range(launch.sharing, launch.world_size, launch.sharing)
        opened = _accepted(listener, [*following, *(leading if first == 0 else [])])
    # Exit handlers run in reverse order, before JAX's own handler waits for the other processes.
    channel = Connections([opened[rank] for rank in following], first)
    atexit.register(channel.close)
    if launch.replicas > 1:
        others = [opened[r] for r in leading] if first == 0 else [_connect(parties[0])]
        names = [f"process {r}" for r in (leading if first == 0 else [0])]
        _leaders.append(Leaders(launch.replica, others, names))
        atexit.register(_leaders[0].close)
    if launch.sharing == 1:
        each = jax.local_device_count(choose_device(device).platform) // tensor_parallel
        groups = devices_of_runners(device, tensor_parallel, each)
        return [JaxRunner.load(checkpoint, dtype, group) for group in groups]
    try:
        mine = JaxRunner.load(checkpoint, dtype, _devices(device, launch))
    except (RuntimeError, OSError) as error:
        raise channel.reason(error) from error
    return [lead(mine, channel)]


_leaders: list[Leaders] = []  # set by `load` if there are several replicas


def leaders() -> Leaders:
    """Return the connections between the replicas' leaders, after `load`."""
    return _leaders[0]


def _devices(device: str | None, launch: Launch) -> list[Any]:
    """Return the devices of the processes that share this process's model."""
    first = launch.rank - launch.part
    mine = range(first, first + launch.sharing)
    platform = choose_device(device).platform
    return [each for each in jax.devices(platform) if each.process_index in mine]


def _follow(
    leader: connection.Connection, checkpoint: Checkpoint, dtype: str, devices: list[Any]
) -> NoReturn:
    threading.Thread(target=_show_life, args=(leader,), daemon=True).start()
    # Ctrl-C reaches all processes of a terminal, but only the leader may end the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        runner = JaxRunner.load(checkpoint, dtype, devices)
    except Exception as error:
        end(error)
    follow(runner, lambda: _received(leader), jax.distributed.shutdown)


def _listener(key: bytes) -> connection.Listener:
    """Listen at the address from which this process reaches the coordinator."""
    host = os.environ.get(COORDINATOR, "").rpartition(":")[0] or socket.gethostname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outwards:  # UDP: nothing is sent
        outwards.connect((host, 1))
        return connection.Listener((outwards.getsockname()[0], 0), authkey=key)


def _accepted(listener: Any, ranks: list[int]) -> dict[int, connection.Connection]:
    """Accept and return connections to the processes of these ranks."""
    opened: dict[int, connection.Connection] = {}
    while len(opened) < len(ranks):
        with contextlib.suppress(AuthenticationError, EOFError, ConnectionError):  # not a process
            accepted = listener.accept()
            opened[accepted.recv()] = accepted
    return opened


def _connect(leader: Party) -> connection.Connection:
    """Connect this process to a leader."""
    opened: Any = connection.Client(leader.address, authkey=leader.key)
    opened.send(jax.process_index())
    return opened


def _exchange(mine: Party) -> list[Party]:
    """Exchange the `Party` of every process."""
    message = np.frombuffer(pickle.dumps(mine), np.uint8)
    lengths: Any = multihost_utils.process_allgather(np.int32(len(message)))
    padded = np.pad(message, (0, int(np.max(lengths)) - len(message)))
    told: Any = multihost_utils.process_allgather(padded)
    return [pickle.loads(row.tobytes()) for row in np.asarray(told)]


def _show_life(leader: connection.Connection) -> None:
    with contextlib.suppress(OSError):
        while True:
            leader.send_bytes(b".")
            time.sleep(PULSE)


def _received(leader: connection.Connection) -> bytes:
    """Return the leader's next message, or an empty one if the leader has ended."""
    try:
        return leader.recv_bytes()
    except (EOFError, OSError):
        return b""
