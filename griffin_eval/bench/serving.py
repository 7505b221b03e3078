"""`griffin-eval serve` under many clients, beside the same requests in the engine itself.

Two kinds of requests: texts to continue, with examples that all of them begin with; and choices,
four to a question, of which a client asks the log-probabilities with the prompt, as lm-eval's does.
The server is a process of its own on this machine. Rounds alternate with those of the engine.
"""

import http.client
import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from griffin_eval.bench.timing import Failed

CHOICES = (" yes", " no", " it depends", " nobody knows")
_EXAMPLES, _OWN = 2000, 400  # characters that all texts begin with, and that each has of its own
_START = 900  # seconds that a server may take until it is ready

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
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise Failed(f"{path}: status {answer.status}: {answer.read()[:300].decode()}")
        if not body.get("stream"):
            answer.read()
            return [time.perf_counter() - begin]
        while line := answer.readline():
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - begin)
        return times


@contextmanager
def served(checkpoint: str, framework: str, dtype: str, *options: str) -> Iterator[int]:
    """A server of a checkpoint, ready at the port that this gives.

    Args:
        checkpoint: path or hub id.
        framework, dtype, options: of `griffin-eval serve`.

    Raises:
        Failed: it has ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    main = "from griffin_eval.cli.main import main; main()"
    command = [sys.executable, "-P", "-c", main, "serve", checkpoint]
    command += ["--port", str(port), "--framework", framework, "--dtype", dtype, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        lines: list[str] = []
        ready = threading.Event()

        def listen() -> None:
            for line in process.stderr or ():
                lines.append(line.strip())
                if "listening at" in line:
                    ready.set()
            ready.set()

        threading.Thread(target=listen, daemon=True).start()
        try:
            ready.wait(_START)
            if process.poll() is not None or not ready.is_set():
                raise Failed(lines[-1] if lines else "the server ended, or is not ready")
            yield port
        finally:
            process.kill()


def run(
    console: Console,
    checkpoint: str,
    framework: str,
    dtype: str,
    clients: int,
    requests: int,
    new_tokens: int,
    rounds: int,
) -> None:
    """Measures and prints.

    Args:
        console: to print on.
        checkpoint: path or hub id.
        framework, dtype: as of `griffin-eval serve`.
        clients: requests at a time.
        requests: of each kind.
        new_tokens: that are generated for each text.
        rounds: of each measurement.

    Raises:
        BadInput: the checkpoint cannot be used.
        Failed: the server ended, or did not answer.
    """
    from lm_eval.api.instance import Instance

    from griffin_eval.lm.model import GriffinLM

    lm = GriffinLM(checkpoint, framework, dtype=dtype)
    texts = make_texts(requests)
    pairs = [(texts[i // len(CHOICES)], CHOICES[i % len(CHOICES)]) for i in range(requests)]
    how = {"until": [], "max_gen_toks": new_tokens}
    asked = {
        "continuations": [
            Instance("generate_until", {}, (text, how), i) for i, text in enumerate(texts)
        ],
        "choices": [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)],
    }
    bodies: dict[str, list[Body]] = {
        "continuations": [
            {"prompt": text, "max_tokens": new_tokens, "temperature": 0, "stream": True}
            for text in texts
        ],
        "choices": [
            {"prompt": context + choice, "max_tokens": 0, "echo": True, "logprobs": 1}
            for context, choice in pairs
        ],
    }
    direct: dict[str, Callable[[], Any]] = {
        "continuations": lambda: lm.generate_until(asked["continuations"], disable_tqdm=True),
        "choices": lambda: lm.loglikelihood(asked["choices"], disable_tqdm=True),
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    parts: list[list[float]] = []
    with served(checkpoint, framework, dtype) as port:
        client = Client(port, clients)
        # Each round has texts of its own, since a server remembers what it has read.
        for number in track(
            range(rounds + 1), "rounds", console=console, disable=not console.is_terminal
        ):
            for kind, mine in bodies.items():
                fresh = [body | {"prompt": f"{number}. {body['prompt']}"} for body in mine]
                begin = time.perf_counter()
                direct[kind]()
                took = {"engine": time.perf_counter() - begin}
                took["server"], times = client.all("/v1/completions", fresh)
                plain = [{"prompt": body["prompt"]} for body in fresh]
                took["transport"], _ = client.all("/tokenize", plain)
                if number == 0:  # which may compile
                    continue
                for who, value in took.items():
                    seconds.setdefault((kind, who), []).append(value)
                if kind == "continuations":
                    parts += times
    _print(console, clients, requests, new_tokens, seconds, parts)


def make_texts(count: int) -> list[str]:
    """Texts with the same examples before each, and something of its own after them."""
    names = sorted(topics)
    examples = "".join(topics[name] for name in names)[:_EXAMPLES]
    rest = "".join(topics[name] for name in names[::-1])
    starts = np.linspace(0, len(rest) - _OWN, count).astype(int)
    return [f"{examples}\n\n{rest[at : at + _OWN]}" for at in starts]


def _print(
    console: Console,
    clients: int,
    requests: int,
    new_tokens: int,
    seconds: dict[tuple[str, str], list[float]],
    parts: list[list[float]],
) -> None:
    table = Table(
        title=f"{requests} requests of each kind, {clients} clients, {new_tokens} new tokens"
    )
    for heading in (
        "requests",
        "engine, s",
        "server, s",
        "range",
        "engine / server",
        "transport, s",
    ):
        table.add_column(heading, justify="left" if heading == "requests" else "right")
    for kind in dict.fromkeys(kind for kind, _ in seconds):
        engine, server, transport = (
            seconds[kind, who] for who in ("engine", "server", "transport")
        )
        table.add_row(
            kind,
            f"{median(engine):.3g}",
            f"{median(server):.3g}",
            f"{min(server):.3g}-{max(server):.3g}",
            f"{median(engine) / median(server):.2f}",
            f"{median(transport):.3g}",
        )
    console.print(table)
    first = [times[0] for times in parts if times]
    between = np.concatenate([np.diff(times) for times in parts if len(times) > 1] or [np.zeros(1)])
    for what, values in (("to the first token", first), ("between tokens", between)):
        half, most = np.percentile(values, (50, 99))
        console.print(
            f"seconds {what}: {half:.3g} at the median, {most:.3g} at the 99th percentile"
        )
