"""Worker processes, interleaved rounds, and a worker's measurements of memory and time.

A worker may run in an environment with another version of the package, so the parts that it imports
from here need only the standard library.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks import ROOT
from benchmarks.peers import Absent

START = ROOT / "benchmarks" / "start.py"
# Settings of JAX's cache of compiled programs, whose folder the first variable names.
JAX_CACHE = "JAX_COMPILATION_CACHE_DIR"
JAX_KEEPS_ALL = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

Key = TypeVar("Key")
Result = TypeVar("Result")


class Failed(Exception):
    """A measured process ended early; the message is the last line of its stderr."""


def module_command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this checkout in an environment."""
    return [python, "-P", str(START), module, *arguments]


class Job:
    """A worker process that answers one request after the other."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self._module = module
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            module_command(python, module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | dict(environment or {}),
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        """Return the result of the module's function ``do``; JSON must be able to hold arguments.

        Raises:
            Absent: A required library is missing or broken.
            ArgumentError: The function raised `BadInput`.
            Failed: The process has ended.
        """
        from griffin_eval.errors import ArgumentError

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
        """End the process."""
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
        return how_it_ended(self._module, code, self._errors.read())


def how_it_ended(name: str, code: int, stderr: str) -> str:
    """Return one line on a process that failed."""
    last = stderr.strip().rpartition("\n")[2]
    if code < 0:
        return f"{name} was killed by signal {-code}: {last}".removesuffix(": ")
    return last or f"{name} ended with exit code {code}"


def serve(functions: Any) -> None:
    """Answer the requests of a `Job` by the functions of a module, or an object's methods."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # stdout is for answers, but libraries print to it
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(functions, request.pop("do"))(**request)}
        except Absent as error:
            answer = {"absent": str(error)}
        except (ImportError, ValueError) as error:
            if not type(error).__module__.startswith("griffin_eval"):
                raise
            # The package raises subclasses for missing extras and for bad input.
            kind = "absent" if isinstance(error, ImportError) else "bad_input"
            answer = {kind: str(error)}
        print(json.dumps(answer), file=answers, flush=True)


def interleave(
    rounds: int,
    measurements: Mapping[Key, Callable[[], Result]],
    say: Callable[[str], None] = lambda text: None,
) -> dict[Key, list[Result]]:
    """Take every measurement once a round, every second round in the opposite order."""
    results: dict[Key, list[Result]] = {key: [] for key in measurements}
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for key in list(measurements)[:: 1 if number % 2 == 0 else -1]:
            results[key].append(measurements[key]())
    return results


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Return the quotient of every round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def number(value: float) -> str:
    """Format three significant digits, or all digits of a large number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Format the median and, for several values, the range."""
    if len(values) == 1:
        return number(values[0])
    return f"{number(median(values))} ({number(min(values))}-{number(max(values))})"


@contextmanager
def busy_process() -> Iterator[None]:
    """Keep one core busy with a process of another session, like another user's."""
    with subprocess.Popen(
        [sys.executable, "-c", "while True: pass"], start_new_session=True
    ) as process:
        try:
            yield
        finally:
            process.kill()


def best_seconds(work: Callable[[], Any], seconds: float = 0.5) -> float:
    """Return the seconds of the fastest call after a first one, which may compile."""
    work()
    best, end = float("inf"), time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        work()
        best = min(best, time.perf_counter() - begin)
    return best


@contextmanager
def watch_memory(interval: float = 0.005) -> Iterator[list[int]]:
    """Yield a list that fills with this process's bytes of anonymous memory."""
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


def tune_process() -> None:
    """Tune this process like the commands, if the installed package has a function for it.

    Commit 53c0389 has none; it tunes the process while loading a model.
    """
    import griffin_eval

    getattr(griffin_eval, "tune_process", lambda: None)()


def anonymous_memory(process: int | str = "self") -> int:
    """Return the anonymous resident bytes of a process (RssAnon), none if it has ended.

    Pages of mapped files are not counted, since the system can reclaim them.
    """
    match = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    return int(match[1]) * 1024 if match else 0
