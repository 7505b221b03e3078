"""The time between tokens of streams, while `griffin-eval serve` reads a very long prompt.

Streams are clients that have texts continued, one answer after the other. They are timed for a
while, and then for as long as it takes to answer another client, whose prompt is long. The server
is a process of its own on this machine.
"""

import http.client
import json
import threading
import time
from pydoc_data.topics import topics
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.serving.clients import Body, own_server, served
from benchmarks.serving.requests import make_texts
from benchmarks.timing import Failed

STREAMS = 16
_TIMEOUT = 7 * 24 * 3600  # seconds that the long prompt may take


class Streams:
    """Clients of a server, from the first token of each until the end of the ``with`` block.

    Args:
        port: of the server.
        texts: that are continued, one a client.

    Raises:
        Failed: one was not answered with status 200.
    """

    def __init__(self, port: int, texts: list[str]):
        self._port, self._stopped = port, threading.Event()
        self._times: list[list[list[float]]] = [[] for _ in texts]  # of tokens, by answer
        self._failures: list[str] = []
        self._begun = [threading.Event() for _ in texts]
        self._threads = [
            threading.Thread(target=self._run, args=pair, daemon=True) for pair in enumerate(texts)
        ]

    def __enter__(self) -> "Streams":
        for thread in self._threads:
            thread.start()
        for begun in self._begun:
            begun.wait()
        self._check()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        if error is None:
            self._check()

    def between(self, begin: float, end: float) -> np.ndarray:
        """float64 [N], seconds between the tokens of an answer, of those that came in a time.

        Args:
            begin, end: the time, as of `time.perf_counter`.
        """
        self._check()
        gaps = []
        for answers in self._times:
            for times in list(answers):
                came = np.array(times[:])
                gaps.append(np.diff(came)[(came[1:] >= begin) & (came[1:] <= end)])
        return np.concatenate(gaps)

    def _check(self) -> None:
        if self._failures:
            raise Failed(self._failures[0])

    def _run(self, number: int, text: str) -> None:
        body = {"prompt": text, "max_tokens": 1 << 20, "temperature": 1, "stream": True}
        try:
            seed = 0
            while not self._stopped.is_set():
                self._times[number].append([])
                self._stream(number, body | {"seed": seed})
                seed += 1
        except (Failed, OSError, http.client.HTTPException) as error:
            self._failures.append(str(error) or type(error).__name__)
        self._begun[number].set()

    def _stream(self, number: int, body: Body) -> None:
        """One answer, until it ends or the clients do."""
        connection, answer = _ask(self._port, body)
        try:
            while not self._stopped.is_set() and (line := answer.readline()):
                if line.startswith(b"data: {"):
                    self._times[number][-1].append(time.perf_counter())
                    self._begun[number].set()
        finally:
            connection.close()


def _ask(
    port: int, body: Body, path: str = "/v1/completions"
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A connection, and the answer that comes.

    Raises:
        Failed: its status is not 200.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise Failed(f"{path}: status {answer.status}: {answer.read()[:300].decode()}")
    return connection, answer


def run(
    console: Console,
    checkpoint: str,
    framework: str,
    dtype: str,
    tokens: int,
    seconds: float,
    rounds: int,
) -> None:
    """Measures and prints.

    Args:
        console: to print on.
        checkpoint: path or hub id.
        framework, dtype: as of `griffin-eval serve`.
        tokens: of the long prompt.
        seconds: for which streams are timed without it.
        rounds: of both measurements, each with another prompt.

    Raises:
        Failed: the server ended, or did not answer.
    """
    texts = [f"{number}. {text}" for number, text in enumerate(make_texts(STREAMS))]
    without, during, reading = list[np.ndarray](), list[np.ndarray](), list[float]()
    command = own_server(checkpoint, framework, dtype, "--timeout", str(_TIMEOUT))
    with served(command) as port:
        ids = _text_ids(port)
        for number in range(rounds):
            # Its beginning is its own, since a server remembers what it has read.
            prompt = np.resize(np.roll(ids, -1000 * number - 1), tokens).tolist()
            with Streams(port, texts) as streams:
                begin = time.perf_counter()
                time.sleep(seconds)
                middle = time.perf_counter()
                _wait_for(port, {"prompt": prompt, "max_tokens": 1, "temperature": 0})
                end = time.perf_counter()
                without.append(streams.between(begin, middle))
                during.append(streams.between(middle, end))
                reading.append(end - middle)
    _print(console, tokens, np.concatenate(without), np.concatenate(during), reading)


def _wait_for(port: int, body: Body, path: str = "/v1/completions") -> Any:
    connection, answer = _ask(port, body, path)
    found = json.loads(answer.read())
    connection.close()
    return found


def _text_ids(port: int) -> np.ndarray:
    """Ids of a text, to be repeated."""
    text = "".join(topics[name] for name in sorted(topics))
    return np.array(_wait_for(port, {"prompt": text}, "/tokenize")["tokens"])


def _print(
    console: Console, tokens: int, without: np.ndarray, during: np.ndarray, reading: list[float]
) -> None:
    if not (len(without) and len(during)):
        raise Failed("no stream had two tokens in the time: take more --seconds, or more --tokens")
    table = Table(title=f"seconds between tokens of {STREAMS} streams")
    for heading in ("", "median", "99th percentile", "largest", "tokens"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, gaps in (("alone", without), (f"beside {tokens:,} tokens", during)):
        half, most = np.percentile(gaps, (50, 99))
        table.add_row(name, f"{half:.3g}", f"{most:.3g}", f"{gaps.max():.3g}", f"{len(gaps):,}")
    console.print(table)
    step, before = np.percentile(without, (50, 99))
    after, limit = np.percentile(during, 99), 2 * before + step
    console.print(
        f"99th percentile beside the prompt: {after:.3g} s, {after / before:.2f} times that alone; "
        f"the limit, twice that alone and one step (the median alone), is {limit:.3g} s: "
        f"{'held' if after <= limit else 'exceeded'}"
    )
    console.print(
        f"the prompt was answered in {' '.join(f'{each:.3g}' for each in reading)} s, "
        f"{tokens * len(reading) / sum(reading):,.0f} tokens/s"
    )
