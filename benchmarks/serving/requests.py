"""`griffin-eval serve` under many clients, compared with the same requests in the engine itself.

There are three kinds of requests: texts to continue, all with the same examples at the beginning;
the same as streams; and choices, four per question, with log-probabilities of the prompt as lm-eval
requests them. Every server is a separate process on this machine. In each round all of them and the
engine take turns.

`mlx_lm.server` and `transformers serve` stream the same continuations if they are installed; they
give no log-probabilities of prompts.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np

from benchmarks.commands import Interpreter, tell
from benchmarks.peers import Absent, check_peer, left_out
from benchmarks.report import Report, Row
from benchmarks.serving.clients import (
    COMPLETIONS,
    PEERS,
    Body,
    answered,
    ask,
    event_times,
    own_server,
    run_all,
    served,
)
from benchmarks.timing import Failed, Job, interleave, ratios
from griffin_eval.api import convert

CHOICES = (" yes", " no", " it depends", " nobody knows")
CONTINUED, STREAMED, CHOSEN, TRANSPORTED = "continuations", "streams", "choices", "transport"
_EXAMPLES, _OWN = 2000, 400  # characters that all texts share, and further ones of each text


@dataclass
class Bench:
    """A run of the benchmark."""

    checkpoint: str
    framework: str
    dtype: str
    clients: int  # requests at a time
    requests: int  # requests of each kind
    new_tokens: int
    pythons: list[Interpreter]
    _calls: count = field(default_factory=count)
    _dropped: dict[str, str] = field(default_factory=dict)

    def run(self, rounds: int, report: Report) -> None:
        """Measure; Failed if a server of this package ended, or did not answer."""
        measurements: dict[tuple[str, str], Callable[[], Any]] = {}
        with ExitStack() as stack:
            for python in self.pythons:
                arguments = (self.checkpoint, self.framework, self.dtype)
                job = Job("benchmarks.serving.engine", *arguments, python=python.path)
                engine = stack.enter_context(job)
                engine.ask("load")
                port = stack.enter_context(served(own_server(python.path, *arguments)))
                server, direct = python.named("serve"), python.named("engine")
                for kind in (CONTINUED, CHOSEN):
                    measurements[kind, direct] = partial(self._ask_engine, engine, kind)
                    measurements[kind, server] = partial(self._ask_server, port, kind)
                measurements[TRANSPORTED, server] = partial(self._ask_server, port, TRANSPORTED)
                measurements[STREAMED, server] = partial(self._stream, port, {})
            for name, (port, named) in self._start_peers(stack).items():
                measurements[STREAMED, name] = partial(self._stream_peer, name, port, named)
            interleave(1, measurements)  # The first requests may compile.
            results = interleave(rounds, measurements, tell)
        title = f"{self.requests} requests of each kind, {self.clients} clients, seconds"
        report.tables[title] = [
            self._row(kind, python, results)
            for python in self.pythons
            for kind in (CONTINUED, CHOSEN)
        ]
        report.tables[f"streams of {self.new_tokens} new tokens, seconds"] = [
            self._stream_row(name, results)
            for kind, name in results
            if kind == STREAMED and name not in self._dropped
        ]
        report.notes += [left_out(name, reason) for name, reason in self._dropped.items()]

    def _fresh_texts(self) -> list[str]:
        """Return other texts in each call, since a server remembers the texts it has read."""
        number = next(self._calls)
        return [f"{number}. {text}" for text in make_texts(self.requests)]

    def _choices(self) -> list[str]:
        texts = self._fresh_texts()
        return [texts[i // len(CHOICES)] + CHOICES[i % len(CHOICES)] for i in range(self.requests)]

    def _ask_engine(self, engine: Job, kind: str) -> float:
        if kind == CHOSEN:
            return engine.ask("score", texts=self._choices())
        return engine.ask("continue_texts", texts=self._fresh_texts(), new_tokens=self.new_tokens)

    def _ask_server(self, port: int, kind: str) -> float:
        path = "/tokenize" if kind == TRANSPORTED else COMPLETIONS
        options: Body = {
            TRANSPORTED: {},
            CONTINUED: {"max_tokens": self.new_tokens, "temperature": 0},
            CHOSEN: {"max_tokens": 0, "echo": True, "logprobs": 1},
        }[kind]
        texts = self._choices() if kind == CHOSEN else self._fresh_texts()
        bodies = [{"prompt": text} | options for text in texts]
        begin = time.perf_counter()
        run_all(self.clients, partial(ask, port, path), bodies)
        return time.perf_counter() - begin

    def _stream(self, port: int, named: Body) -> tuple[float, list[list[float]]]:
        """Return the seconds of all streams, and the seconds until each part of each stream."""
        options = {"max_tokens": self.new_tokens, "temperature": 0, "stream": True}
        bodies = [{"prompt": text} | options | named for text in self._fresh_texts()]

        def read(body: Body) -> list[float]:
            start = time.perf_counter()
            with answered(port, COMPLETIONS, body) as answer:
                return [moment - start for moment in event_times(answer)]

        begin = time.perf_counter()
        parts = run_all(self.clients, read, bodies)
        return time.perf_counter() - begin, parts

    def _stream_peer(self, name: str, port: int, named: Body) -> Any:
        if name not in self._dropped:
            try:
                return self._stream(port, named)
            except Failed as reason:
                self._dropped[name] = str(reason)
        return None

    def _start_peers(self, stack: ExitStack) -> dict[str, tuple[int, Body]]:
        """Return the port of each peer, and the part of a request that names its model."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()), "hf")
        peers: dict[str, tuple[int, Body]] = {}
        for name, (modules, words) in PEERS.items():
            try:
                check_peer(*modules)
                if not folder.exists():
                    dtype = None if self.dtype == "auto" else self.dtype
                    convert(self.checkpoint, folder, to="hf", dtype=dtype)
                command = [sys.executable, "-P", *words, str(folder)]
                port = stack.enter_context(served(command))
            except (Absent, Failed) as reason:
                self._dropped[name] = str(reason)
                continue
            # MLX's server loads any model that a request names.
            peers[name] = port, {} if name == "mlx_lm.server" else {"model": str(folder)}
        return peers

    def _row(self, kind: str, python: Interpreter, results: dict[tuple[str, str], list]) -> Row:
        server, engine = python.named("serve"), python.named("engine")
        return {
            "requests": kind,
            "implementation": server,
            "engine": results[kind, engine],
            "server": results[kind, server],
            "engine / server": ratios(results[kind, engine], results[kind, server]),
            "transport alone": results[TRANSPORTED, server],
        }

    def _stream_row(self, name: str, results: dict[tuple[str, str], list]) -> Row:
        ours = results[STREAMED, self.pythons[0].named("serve")]
        rounds = results[STREAMED, name]
        seconds = [taken for taken, _ in rounds]
        first = [[times[0] for times in parts if times] for _, parts in rounds]
        gaps = [[g for times in parts for g in np.diff(times).tolist()] for _, parts in rounds]

        def percentiles(values: list[list[float]], percent: int) -> list[float]:
            return [float(np.percentile(v, percent)) if v else float("nan") for v in values]

        return {
            "server": name,
            "all": seconds,
            "over the first": ratios(seconds, [taken for taken, _ in ours]),
            "first token: median": percentiles(first, 50),
            "99th": percentiles(first, 99),
            "between parts: median": percentiles(gaps, 50),
            "99th ": percentiles(gaps, 99),
        }


def make_texts(number: int) -> list[str]:
    """Return texts with the same examples at the beginning and different ends."""
    names = sorted(topics)
    examples = "".join(topics[name] for name in names)[:_EXAMPLES]
    rest = "".join(topics[name] for name in names[::-1])
    starts = np.linspace(0, len(rest) - _OWN, number).astype(int)
    return [f"{examples}\n\n{rest[at : at + _OWN]}" for at in starts]
