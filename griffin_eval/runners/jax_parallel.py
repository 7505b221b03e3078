"""A model that JAX splits over the devices of several processes, maybe on several machines
(`griffin_eval.runners.replay`, `jax.distributed`).

XLA runs a program on devices of several processes once all of them have started it. What to start
the leader tells its followers over connections of its own, which also show who has ended.
"""

import atexit
import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from multiprocessing import AuthenticationError, connection
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError, ProcessLost
from griffin_eval.runners.identity import check_alike, identity
from griffin_eval.runners.jax_runner import JaxRunner, choose_device
from griffin_eval.runners.replay import LeadingRunner, end, follow

COORDINATOR = "JAX_COORDINATOR_ADDRESS"  # as JAX reads it, HOST:PORT of process 0
PULSE = 5  # seconds between two signs of life of a follower
PATIENCE = 40  # seconds without one
GRACE = 10  # seconds in which a call that waits for a lost follower may fail by itself
KEY = 32  # bytes of the key that connections are opened with


def initialize() -> bool:
    """Joins the other processes of `jax.distributed` if the environment says that there are some.
    To be called before JAX computes anything.

    Returns:
        Whether this process leads: the first one, or the only one.

    Raises:
        ArgumentError: the environment is incomplete, or the others do not answer.
    """
    if COORDINATOR in os.environ and not jax.distributed.is_initialized():
        # Where these are not set, JAX asks the cluster's own manager, such as SLURM.
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
    return jax.process_index() == 0


def several() -> bool:
    """Whether several processes share the model."""
    return jax.process_count() > 1


class Connections:
    """To followers on this machine or others. See `griffin_eval.runners.replay.Channel`.

    Args:
        followers: a connection to each, in their order.
    """

    def __init__(self, followers: list[connection.Connection]):
        self._followers, self.processes = followers, len(followers) + 1
        self._closed = self._told = False
        self._lost: ProcessLost | None = None
        for rank, follower in enumerate(followers, start=1):
            threading.Thread(target=self._watch, args=(rank, follower), daemon=True).start()

    def send(self, message: bytes) -> None:
        for follower in self._followers:
            follower.send_bytes(message)

    def reason(self, error: Exception) -> Exception:
        for _ in range(50):  # the end of a process shows here a little later
            if self._lost is not None:
                self._told = True
                return self._lost
            time.sleep(0.1)
        return error

    def close(self) -> None:
        if self._lost is not None:
            sys.stderr.flush()
            os._exit(1)  # JAX would wait for it
        self._closed = True
        with contextlib.suppress(OSError):
            self.send(b"")

    def _watch(self, rank: int, follower: connection.Connection) -> None:
        """Waits for the end of a follower. What it ends cannot be relied on to end by itself: XLA
        may wait for ever."""
        who = f"process {rank} of the {self.processes} that share the model"
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
        if not self._told:
            print(f"griffin: {sentence}", file=sys.stderr)
        sys.stderr.flush()
        time.sleep(GRACE * self._told)  # in which this process may end by itself
        os._exit(1)


def load(
    checkpoint: Checkpoint,
    dtype: str,
    device: str | None,
    tensor_parallel: int,
    data_parallel: int | None,
) -> LeadingRunner:
    """Loads this process's part of a model that is split over the devices of all processes.

    The first process returns and leads. The others follow it, and end with it.

    Args:
        checkpoint, dtype, device, tensor_parallel, data_parallel: as of
            `griffin_eval.runners.load.load_runners`.

    Raises:
        ArgumentError: the model is not to be split over just these devices, or the processes have
            not got the same checkpoint, versions and arguments.
    """
    rank, processes = jax.process_index(), jax.process_count()
    devices = jax.devices(choose_device(device).platform)
    mine = identity(checkpoint, "jax", dtype, tensor_parallel)
    if rank:
        leader = _connect()
        leader.send(mine)
        threading.Thread(target=_show_life, args=(leader,), daemon=True).start()
        # Ctrl-C reaches every process of a terminal: the leader ends the others.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            if not leader.recv_bytes():  # the leader says why
                jax.distributed.shutdown()
                os._exit(2)
            runner = JaxRunner.load(checkpoint, dtype, devices)
        except Exception as error:
            end(error)
        follow(runner, lambda: _received(leader), jax.distributed.shutdown)
    followers = _listen(processes)
    try:
        check_alike([mine, *(follower.recv() for follower in followers)], rank)
        if (tensor_parallel, data_parallel or 1) != (len(devices), 1):
            raise ArgumentError(
                f"tensor_parallel_size={tensor_parallel}, but the {processes} processes of "
                f"jax.distributed share one model, over all of their {len(devices)} devices: "
                f"tensor_parallel_size={len(devices)}"
            )
    except ArgumentError:
        for follower in followers:
            follower.send_bytes(b"")
        raise
    channel = Connections(followers)
    atexit.register(channel.close)  # before JAX waits for the others to end
    channel.send(b"load")
    try:
        return LeadingRunner(JaxRunner.load(checkpoint, dtype, devices), channel)
    except (RuntimeError, OSError) as error:
        raise channel.reason(error) from error


def _listen(processes: int) -> list[connection.Connection]:
    """The leader's connections to all others, in their order."""
    key = secrets.token_bytes(KEY)
    host = os.environ.get(COORDINATOR, socket.gethostname()).rpartition(":")[0]
    with connection.Listener((host or socket.gethostname(), 0), authkey=key) as listener:
        address = f"{listener.address[0]}:{listener.address[1]}".encode()
        _broadcast(key + address.ljust(256 - KEY))
        opened: list[Any] = []
        while len(opened) < processes - 1:
            with contextlib.suppress(AuthenticationError, EOFError, ConnectionError):  # a stranger
                opened.append(listener.accept())
    ranks: dict[int, connection.Connection] = {follower.recv(): follower for follower in opened}
    return [ranks[rank] for rank in sorted(ranks)]


def _connect() -> connection.Connection:
    """A follower's connection to the leader."""
    told = _broadcast(bytes(256))
    host, _, port = told[KEY:].decode().strip().rpartition(":")
    leader: Any = connection.Client((host, int(port)), authkey=told[:KEY])
    leader.send(jax.process_index())
    return leader


def _broadcast(message: bytes) -> bytes:
    """The leader's message, in every process."""
    numbers: Any = multihost_utils.broadcast_one_to_all(np.frombuffer(message, np.uint8))
    return np.asarray(numbers).tobytes()


def _show_life(leader: connection.Connection) -> None:
    with contextlib.suppress(OSError):
        while True:
            leader.send_bytes(b".")
            time.sleep(PULSE)


def _received(leader: connection.Connection) -> bytes:
    """The leader's next message, an empty one where it has ended."""
    try:
        return leader.recv_bytes()
    except (EOFError, OSError):
        return b""
