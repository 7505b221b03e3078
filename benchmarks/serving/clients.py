"""Servers of language models, each a process of its own, and clients that ask them."""

import http.client
import json
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.timing import Failed

_START = 900  # seconds that a server may take until it is ready
_PATIENCE = 60  # seconds for which a connection that a server refuses is tried again

Body = dict[str, Any]


class Client:
    """Asks a server at a port; every thread has a connection of its own."""

    def __init__(self, port: int, clients: int):
        self._port, self._clients = port, clients

    def all(self, path: str, bodies: Sequence[Body]) -> tuple[float, list[list[float]]]:
        """Sends requests, so many at a time as there are clients.

        Returns:
            Seconds for all of them; of each, the seconds at which parts of its answer came.

        Raises:
            Failed: one was not answered with status 200.
        """
        waiting: queue.SimpleQueue[tuple[int, Body]] = queue.SimpleQueue()
        for pair in enumerate(bodies):
            waiting.put(pair)
        times: list[list[float]] = [[] for _ in bodies]
        failures: list[str] = []

        def work() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=3600)
            while not failures:
                try:
                    number, body = waiting.get_nowait()
                except queue.Empty:
                    break
                try:
                    times[number] = self._ask(connection, path, body)
                except (Failed, OSError, http.client.HTTPException) as error:
                    failures.append(str(error) or type(error).__name__)
            connection.close()

        threads = [threading.Thread(target=work) for _ in range(min(self._clients, len(bodies)))]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
        if failures:
            raise Failed(failures[0])
        return seconds, times

    def _ask(self, connection: http.client.HTTPConnection, path: str, body: Body) -> list[float]:
        begin, times = time.perf_counter(), list[float]()
        answer = None
        while answer is None:
            try:
                sent = json.dumps(body)
                connection.request("POST", path, sent, {"Content-Type": "application/json"})
                answer = connection.getresponse()
            except ConnectionError:  # a server may let few wait: Python's own, 5
                connection.close()
                if time.perf_counter() - begin > _PATIENCE:
                    raise
                time.sleep(0.05)
        if answer.status != 200:
            raise Failed(f"{path}: status {answer.status}: {answer.read()[:300].decode()}")
        if not body.get("stream"):
            answer.read()
            return [time.perf_counter() - begin]
        while line := answer.readline():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - begin)
        return times


def own_server(checkpoint: str, framework: str, dtype: str, *options: str) -> list[str]:
    """The command of `griffin-eval serve`, but for its port."""
    main = "from griffin_eval.cli.main import main; main()"
    command = [sys.executable, "-P", "-c", main, "serve", checkpoint]
    return [*command, "--framework", framework, "--dtype", dtype, *options]


def mlx_server(folder: str) -> list[str]:
    """The command of MLX's server, but for its port."""
    return [sys.executable, "-P", "-m", "mlx_lm", "server", "--model", folder]


def transformers_server(folder: str) -> list[str]:
    """The command of transformers' server, but for its port."""
    main = "from transformers.cli.transformers import main; main()"
    return [sys.executable, "-P", "-c", main, "serve", folder]


PEERS = {  # the modules that they need, and their commands for a folder as transformers has it
    "mlx_lm.server": (("mlx_lm",), mlx_server),
    "transformers serve": (("fastapi", "uvicorn", "openai"), transformers_server),
}


@contextmanager
def served(command: list[str]) -> Iterator[int]:
    """A server, which answers at the port that this gives.

    Args:
        command: that starts it, but for ``--port``.

    Raises:
        Failed: it has ended, or does not answer in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [*command, "--port", str(port)], stdout=log, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        try:
            end = time.monotonic() + _START
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    lines = log.read().strip().splitlines()
                    raise Failed(lines[-1] if lines else "the server ended, or is not ready")
                time.sleep(0.1)
            yield port
        finally:
            process.kill()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
