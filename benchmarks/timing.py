"""How the benchmarks measure: processes of their own, their time and memory, how they fail."""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.peers import Absent
from griffin_eval.errors import ArgumentError, BadInput, MissingExtraError

START = ROOT / "benchmarks" / "start.py"


class Failed(Exception):
    """How a measured process ended, and the last line of what it said on stderr."""


class Job:
    """A process that measures what it is asked to, one request after the other.

    Args:
        module: a module of this package that calls `serve` when it is run.
        arguments: its command line.
        environment: variables beside those of this process.
    """

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._module = module
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(START), module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | dict(environment or {}),
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        """What the function ``do`` of the module returns for arguments that JSON can hold.

        Raises:
            Absent: a library that it needs is missing or broken.
            ArgumentError: the function raised `BadInput`.
            Failed: the process has ended.
        """
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        if not (line := self._process.stdout.readline()):
            raise Failed(self._end())
        answer = json.loads(line)
        if "absent" in answer:
            raise Absent(answer["absent"])
        if "bad_input" in answer:
            raise ArgumentError(answer["bad_input"])
        return answer["result"]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin and self._process.stdout
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            try:
                file.close()
            except BrokenPipeError:
                pass

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _end(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().rpartition("\n")[2]
        if code < 0:
            return f"{self._module} was killed by signal {-code}: {last}".removesuffix(": ")
        return last or f"{self._module} ended with exit code {code}"


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Answers the requests of a `Job` until there are no more.

    Args:
        functions: what can be asked for, by name; they return what JSON can hold.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": functions[request.pop("do")](**request)}
        except (Absent, MissingExtraError) as error:
            answer = {"absent": str(error)}
        except BadInput as error:
            answer = {"bad_input": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


def best_seconds(work: Callable[[], Any], seconds: float = 0.5) -> float:
    """Seconds of the fastest of the calls that fit into a time; a first, which may compile, aside.

    Args:
        work: what is timed.
        seconds: how long it is called again.
    """
    work()
    best, end = float("inf"), time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        work()
        best = min(best, time.perf_counter() - begin)
    return best


@contextmanager
def watch_memory(interval: float = 0.005) -> Iterator[list[int]]:
    """A list that fills with the bytes of anonymous memory this process has.

    Args:
        interval: seconds between two readings.
    """
    readings, stop = [anonymous_memory()], threading.Event()

    def watch() -> None:
        while not stop.wait(interval):
            readings.append(anonymous_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield readings
    finally:
        stop.set()
        thread.join()


def anonymous_memory() -> int:
    """Anonymous resident bytes of this process (RssAnon): pages of mapped files are not counted,
    since the system takes them back at will."""
    match = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024
