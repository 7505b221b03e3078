"""The time between tokens of streams, while `griffin-eval serve` reads a very long prompt.

Streams are clients that have texts continued, one answer after the other. They are timed for a
while, and then for as long as it takes to answer another client, whose prompt is long. The server
is a process of its own on this machine. ``python -m benchmarks.serving.pauses CHECKPOINT``.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pydoc_data.topics import topics
from typing import Annotated, NamedTuple

import numpy as np
import typer

from benchmarks.commands import (
    AnyDtype,
    AsJson,
    Framework,
    Model,
    Pythons,
    Rounds,
    interpreters,
    tell,
)
from benchmarks.failures import measuring
from benchmarks.report import Report, Row
from benchmarks.serving.clients import (
    COMPLETIONS,
    answered,
    ask,
    event_times,
    own_server,
    served,
)
from benchmarks.serving.requests import make_texts
from benchmarks.timing import Failed, interleave, ratios
from griffin_eval.cli.ending import run_command

STREAMS = 16


class Streams:
    """Clients of a server, each of which has a text continued again and again.

    Args:
        port: Port of the server.
        texts: Texts to continue, one a client.
    """

    def __init__(self, port: int, texts: list[str]):
        self._port, self._stopped = port, threading.Event()
        self._times: list[list[list[float]]] = [[] for _ in texts]  # of tokens, by answer
        self._failures: list[Failed] = []
        self._begun = [threading.Event() for _ in texts]
        self._threads = [
            threading.Thread(target=self._run, args=pair, daemon=True) for pair in enumerate(texts)
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the clients, from the first token of each on.

        Raises:
            Failed: One was not answered with status 200.
        """
        for thread in self._threads:
            thread.start()
        for begun in self._begun:
            begun.wait()
        try:
            self._check()
            yield
        finally:
            self._stopped.set()
            for thread in self._threads:
                thread.join()
        self._check()

    def between(self, begin: float, end: float) -> np.ndarray:
        """Return the seconds between tokens of an answer, float64 [N].

        Args:
            begin: Time of the first token that counts, as of `time.perf_counter`.
            end: Time of the last one.
        """
        gaps = [np.empty(0)]
        for answers in self._times:
            for times in list(answers):
                came = np.array(times[:])
                gaps.append(np.diff(came)[(came[1:] >= begin) & (came[1:] <= end)])
        return np.concatenate(gaps)

    def _check(self) -> None:
        if self._failures:
            raise self._failures[0]

    def _run(self, number: int, text: str) -> None:
        body = {"prompt": text, "max_tokens": 1 << 20, "temperature": 1, "stream": True}
        seeds = count()
        try:
            while not self._stopped.is_set():
                self._stream(number, body | {"seed": next(seeds)})
        except Failed as failure:
            self._failures.append(failure)
        self._begun[number].set()

    def _stream(self, number: int, body: dict) -> None:
        """Read one answer, until it ends or the clients do."""
        times: list[float] = []
        self._times[number].append(times)
        with answered(self._port, COMPLETIONS, body) as answer:
            for moment in event_times(answer):
                times.append(moment)
                self._begun[number].set()
                if self._stopped.is_set():
                    return


class Pauses(NamedTuple):
    """One measurement.

    Attributes:
        alone: Seconds between tokens without the prompt, float64 [N].
        beside: Seconds between tokens while the prompt is read.
        reading: Seconds until the prompt was answered.
    """

    alone: np.ndarray
    beside: np.ndarray
    reading: float


def measure(port: int, tokens: int, seconds: float, calls: count) -> Pauses:
    """Time streams for a while, and then beside a prompt.

    Args:
        port: Port of the server.
        tokens: Length of the prompt.
        seconds: Time without the prompt.
        calls: Counter of the prompts, each of which begins with tokens of its own, since a server
            remembers what it has read.
    """
    page = "".join(topics[name] for name in sorted(topics))
    ids = np.array(ask(port, "/tokenize", {"prompt": page})["tokens"])
    prompt = np.resize(np.roll(ids, -1000 * next(calls) - 1), tokens).tolist()
    texts = [f"{number}. {text}" for number, text in enumerate(make_texts(STREAMS))]
    streams = Streams(port, texts)
    with streams.running():
        begin = time.perf_counter()
        time.sleep(seconds)
        middle = time.perf_counter()
        ask(port, COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "temperature": 0})
        end = time.perf_counter()
        found = Pauses(streams.between(begin, middle), streams.between(middle, end), end - middle)
    if not (len(found.alone) and len(found.beside)):
        raise Failed("no stream had two tokens in the time: take more --seconds, or more --tokens")
    return found


def row(name: str, tokens: int, rounds: list[Pauses]) -> Row:
    """Return the row of a server: 99th percentiles, and the limit of that beside the prompt."""
    alone = [float(np.percentile(found.alone, 99)) for found in rounds]
    steps = [float(np.median(found.alone)) for found in rounds]
    beside = [float(np.percentile(found.beside, 99)) for found in rounds]
    limits = [2 * before + step for before, step in zip(alone, steps, strict=True)]
    return {
        "implementation": name,
        "alone: median": steps,
        "99th": alone,
        "beside: 99th": beside,
        "beside / alone": ratios(beside, alone),
        "limit": limits,
        "beside / limit": ratios(beside, limits),
        "largest": [float(found.beside.max()) for found in rounds],
        "prompt, tokens/s": [tokens / found.reading for found in rounds],
    }


def main(
    checkpoint: Model,
    tokens: Annotated[
        int, typer.Option(help="Number of tokens of the long prompt.", min=1, max=1_000_000)
    ] = 1_000_000,
    framework: Framework = "torch",
    dtype: AnyDtype = "auto",
    seconds: Annotated[
        float, typer.Option(help="Seconds of the measurement without the prompt.", min=0.1)
    ] = 30.0,
    rounds: Rounds = 5,
    python: Pythons = None,
    as_json: AsJson = False,
) -> None:
    """Time tokens of 16 streams of a server, alone and while it reads a very long prompt.

    The limit of the 99th percentile beside the prompt is twice that alone and one step.
    """
    report, calls = Report(), count()
    with measuring(), ExitStack() as stack:
        measurements = {}
        for one in interpreters(python):
            port = stack.enter_context(served(own_server(one.path, checkpoint, framework, dtype)))
            measurements[one.named("serve")] = partial(measure, port, tokens, seconds, calls)
        results = interleave(rounds, measurements, tell)
    title = f"seconds between tokens of {STREAMS} streams, alone and beside {tokens:,} tokens"
    report.tables[title] = [row(name, tokens, found) for name, found in results.items()]
    report.show(as_json)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
