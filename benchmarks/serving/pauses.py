"""The time between tokens of streams while `griffin-eval serve` reads a very long prompt.

Streams are clients that request one continuation after the other. They are timed for a while alone,
and then while the server answers another client with a long prompt. The server is a separate
process on this machine. ``python -m benchmarks.serving.pauses CHECKPOINT``.
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
    measuring,
    tell,
)
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


@contextmanager
def streams(port: int, texts: list[str]) -> Iterator[list[tuple[float, float]]]:
    """Request continuations again and again, with one client for each text.

    Once every client has a token, yield a list that fills with the time of each token (as of
    `time.perf_counter`) and the seconds since the one before it in its answer.
    """
    gaps: list[tuple[float, float]] = []
    failures: list[Failed] = []
    stopped, begun = threading.Event(), [threading.Event() for _ in texts]

    def run(text: str, has_begun: threading.Event) -> None:
        body = {"prompt": text, "max_tokens": 1 << 20, "temperature": 1, "stream": True}
        try:
            for seed in count():
                before = None
                with answered(port, COMPLETIONS, body | {"seed": seed}) as answer:
                    for moment in event_times(answer):
                        has_begun.set()
                        if before is not None:
                            gaps.append((moment, moment - before))
                        before = moment
                        if stopped.is_set():
                            return
        except Failed as failure:
            failures.append(failure)
            has_begun.set()

    threads = [threading.Thread(target=run, args=pair) for pair in zip(texts, begun, strict=True)]
    for thread in threads:
        thread.start()
    try:
        for event in begun:
            event.wait()
        yield gaps
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


class Pauses(NamedTuple):
    """Seconds between tokens without the prompt and while it is read, and until its answer."""

    alone: np.ndarray
    beside: np.ndarray
    reading: float


def measure(port: int, tokens: int, seconds: float, calls: count) -> Pauses:
    """Time streams alone for a while, and then beside a prompt.

    Every call has a new prompt, since a server caches what it has read.
    """
    page = "".join(topics[name] for name in sorted(topics))
    ids = np.array(ask(port, "/tokenize", {"prompt": page})["tokens"])
    prompt = np.resize(np.roll(ids, -1000 * next(calls) - 1), tokens).tolist()
    texts = [f"{number}. {text}" for number, text in enumerate(make_texts(STREAMS))]
    with streams(port, texts) as gaps:
        begin = time.perf_counter()
        time.sleep(seconds)
        middle = time.perf_counter()
        ask(port, COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "temperature": 0})
        end = time.perf_counter()
    alone = np.array([gap for moment, gap in gaps if begin <= moment <= middle])
    beside = np.array([gap for moment, gap in gaps if middle < moment <= end])
    if not (len(alone) and len(beside)):
        raise Failed("no stream had two tokens in the time: take more --seconds, or more --tokens")
    return Pauses(alone, beside, end - middle)


def row(name: str, tokens: int, rounds: list[Pauses]) -> Row:
    """Return the row of a server: 99th percentiles, and the limit of the one beside the prompt."""
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
