"""Servers of language models, each a separate process, and their clients."""

import http.client
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.timing import Failed

COMPLETIONS = "/v1/completions"
_START = 900  # seconds for a server to become ready
_PATIENCE = 60  # seconds of retries while a server refuses a connection
_TIMEOUT = 7 * 24 * 3600  # seconds for an answer

Body = dict[str, Any]


@contextmanager
def answered(port: int, path: str, body: Body) -> Iterator[http.client.HTTPResponse]:
    """Ask a server, and yield the answer to read; Failed if its status is not 200."""
    begin = time.perf_counter()
    answer, sent = None, json.dumps(body)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
    try:
        while answer is None:
            try:
                connection.request("POST", path, sent, {"Content-Type": "application/json"})
                answer = connection.getresponse()
            except ConnectionError:  # a server's queue may be short: 5 in Python's own
                connection.close()
                if time.perf_counter() - begin > _PATIENCE:
                    raise
                time.sleep(0.05)
        if answer.status != 200:
            raise Failed(f"{path}: status {answer.status}: {answer.read()[:300].decode()}")
        yield answer
    except (OSError, http.client.HTTPException) as error:
        raise Failed(f"{path}: {error or type(error).__name__}") from error
    finally:
        connection.close()


def event_times(answer: http.client.HTTPResponse) -> Iterator[float]:
    """Yield the time of each part of a stream, from `time.perf_counter`."""
    while line := answer.readline():
        if line.startswith(b"data: {"):
            yield time.perf_counter()


def ask(port: int, path: str, body: Body) -> Any:
    """Return the JSON that a server answers."""
    with answered(port, path, body) as answer:
        return json.loads(answer.read())


def run_all(clients: int, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Apply a function to every item, in as many threads as there are clients."""
    with ThreadPoolExecutor(clients) as threads:
        return list(threads.map(work, items))


def own_server(python: str, checkpoint: str, framework: str, dtype: str) -> list[str]:
    """Return the command of `griffin-eval serve` without its port."""
    program = str(Path(python).with_name("griffin-eval"))
    options = ["--framework", framework, "--dtype", dtype, "--timeout", str(_TIMEOUT)]
    return [program, "serve", checkpoint, *options]


_TRANSFORMERS = "from transformers.cli.transformers import main; main()"
# Modules of each peer, and Python's arguments before a folder in transformers' format.
PEERS = {
    "mlx_lm.server": (("mlx_lm",), ("-m", "mlx_lm", "server", "--model")),
    "transformers serve": (("fastapi", "uvicorn", "openai"), ("-c", _TRANSFORMERS, "serve")),
}


@contextmanager
def served(command: list[str]) -> Iterator[int]:
    """Run a server and yield the port at which it answers; Failed if it does not in time."""
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
