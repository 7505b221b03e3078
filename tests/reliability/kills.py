"""End evaluations at random times and continue them in a second run: `make kills COUNT=50`.

A run is `lm_eval.simple_evaluate` with ``--model griffin``, ``--use_cache`` and results files, in a
process forked from one that has imported the libraries. At a random time it gets SIGKILL, SIGTERM,
Ctrl-C, or no more memory (RLIMIT_AS). It records each answer before the cache does, and each
finished step. Afterwards:

- sqlite can read the cache, which lacks the answers of at most one step;
- results are absent or complete;
- a second run asks the model only for the missing answers, and its results equal those of an
  uninterrupted run.
"""

import argparse
import json
import os
import re
import resource
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import griffin_eval

CHECKPOINT = Path(griffin_eval.__file__).parent / "checkpoints" / "bytes_griffin"
WAYS = ("SIGKILL", "SIGTERM", "SIGINT", "memory")
SOURCE = """
import datasets
from pydoc_data.topics import topics
def docs(**_):
    names = sorted(topics)[:{count}]
    return {{"test": datasets.Dataset.from_list([{{"text": topics[n][:600]}} for n in names])}}
"""
KINDS = {
    "choice": "output_type: multiple_choice\ndoc_to_choice: [' the', ' a list', ' of them']\n"
    "doc_to_target: 0\n",
    "rolling": "output_type: loglikelihood_rolling\ndoc_to_target: '{{text}}'\n",
    "continue": "output_type: generate_until\ndoc_to_target: ''\n"
    "generation_kwargs: {max_gen_toks: 8, until: ['@']}\n",
}
METRIC = {"choice": "acc", "rolling": "bits_per_byte", "continue": "exact_match"}


class Harness:
    """Tasks of all kinds in a folder, and runs of these tasks.

    Args:
        folder: Existing folder for tasks, caches, logs and results.
        framework: ``torch`` or ``jax``.
        documents: Number of documents for each task.
    """

    def __init__(self, folder: Path, framework: str, documents: int = 4):
        self.folder, self.framework = folder, framework
        tasks = folder / "tasks"
        tasks.mkdir(exist_ok=True)
        (tasks / "kills_docs.py").write_text(SOURCE.format(count=documents))
        for kind, settings in KINDS.items():
            (tasks / f"{kind}.yaml").write_text(
                f"task: kills_{kind}\ncustom_dataset: !function kills_docs.docs\n"
                f"test_split: test\ndoc_to_text: '{'' if kind == 'rolling' else '{{text}}'}'\n"
                f"{settings}metric_list:\n  - metric: {METRIC[kind]}\nmetadata:\n  version: 1\n"
            )
        self.answers = documents * (3 + 1 + 1)

    def start(self, name: str, cache: Path) -> "Running":
        """Fork a run whose results, log and trace files have this name."""
        run = Running(self.folder / name, cache)
        run.process = os.fork()
        if run.process == 0:
            code = 1
            try:
                self._evaluate(run)
                code = 0
            except BaseException as error:
                traceback.print_exception(error)
            finally:
                sys.stderr.flush()
                os._exit(code)
        return run

    def _evaluate(self, run: "Running") -> None:
        """Evaluate the tasks in the forked process."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        trace = os.open(run.trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        import lm_eval
        from lm_eval.loggers import EvaluationTracker
        from lm_eval.tasks import TaskManager

        from griffin_eval.engine.generation import _Batch
        from griffin_eval.engine.reader import Reader
        from griffin_eval.lm.model import GriffinLM

        noting(trace, Reader, "step", after=b"s")
        noting(trace, _Batch, "_continue", after=b"s")
        make = GriffinLM.set_cache_hook

        def set_cache_hook(self: Any, hook: Any) -> None:
            make(self, hook)
            noting(trace, hook, "add_partial", before=b"a")
            os.write(trace, b"|")  # marks the start of the evaluation

        GriffinLM.set_cache_hook = set_cache_hook
        tracker = EvaluationTracker(output_path=str(run.results))
        found = lm_eval.simple_evaluate(
            model="griffin",
            model_args={
                "pretrained": str(CHECKPOINT),
                "framework": self.framework,
                "dtype": "float32",
                "device": "cpu",
                "max_batch_size": 2,
            },
            tasks=[f"kills_{kind}" for kind in KINDS],
            task_manager=TaskManager(
                include_defaults=False, include_path=str(self.folder / "tasks")
            ),
            use_cache=str(run.cache),
            evaluation_tracker=tracker,
            bootstrap_iters=0,
        )
        samples = found.pop("samples")
        tracker.save_results_aggregated(found, samples)
        for task, each in samples.items():
            tracker.save_results_samples(task, each)


class Running:
    """A run in a forked process, and its files."""

    def __init__(self, base: Path, cache: Path):
        self.log, self.trace = base.with_suffix(".log"), base.with_suffix(".trace")
        self.results, self.cache = base.with_suffix(".results"), cache
        self.process = 0

    def wait(self, seconds: float = 600) -> int:
        """Wait for the end and return the exit code, or minus the signal that ended the run."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            done, status = os.waitpid(self.process, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        raise AssertionError(f"still running after {seconds} s:\n{self.log.read_text()}")

    def has_begun(self) -> bool:
        return self.trace.exists() and b"|" in self.trace.read_bytes()

    def noted(self) -> str:
        return self.trace.read_text().partition("|")[2] if self.trace.exists() else ""

    def scores(self) -> dict[str, Any] | None:
        """Return the results, or None without a results file. Incomplete files raise errors."""
        for samples in self.results.rglob("samples_*.jsonl"):
            lines = samples.read_text().splitlines()
            assert [json.loads(line)["doc_id"] for line in lines] == list(range(len(lines)))
        files = list(self.results.rglob("results_*.json"))
        assert len(files) < 2
        return json.loads(files[0].read_text())["results"] if files else None


def noting(trace: int, owner: Any, name: str, before: bytes = b"", after: bytes = b"") -> None:
    """Make a method write to a file descriptor before and after each call."""
    original = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        os.write(trace, before)
        result = original(*args, **kwargs)
        os.write(trace, after)
        return result

    setattr(owner, name, method)


def rows(cache: Path) -> int:
    """Return the number of answers in a cache file, which has at most one table of ours."""
    file = Path(f"{cache}_rank0.db")
    if not file.exists():
        return 0
    with sqlite3.connect(file, timeout=60) as found:
        assert found.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        names = [name for (name,) in found.execute("SELECT name FROM sqlite_master")]
        ours = [name for name in names if name.startswith("griffin-")]
        assert len(ours) <= 1
        return sum(found.execute(f"SELECT count(*) FROM '{n}'").fetchone()[0] for n in ours)


class Outcome(NamedTuple):
    """The outcome of an interrupted run.

    Attributes:
        way: Signal name or "memory".
        code: Exit code, or minus the signal.
        cached: Number of answers in the cache.
        lost: Number of answers that the model gave and the cache lacks.
        said: Last line of the log.
    """

    way: str
    code: int
    cached: int
    lost: int
    said: str


def end_and_go_on(
    harness: Harness, name: str, way: str, delay: float, expected: dict[str, Any]
) -> Outcome:
    """End a run ``delay`` seconds after its evaluation began, and complete it in a second run."""
    cache = harness.folder / f"{name}-cache"
    first = harness.start(f"{name}-first", cache)
    try:
        while not first.has_begun() and os.waitpid(first.process, os.WNOHANG)[0] == 0:
            time.sleep(0.002)
        time.sleep(delay)
        if way == "memory":
            pages = int(Path(f"/proc/{first.process}/statm").read_text().split()[0])
            used = pages * os.sysconf("SC_PAGE_SIZE") + (1 << 20)
            resource.prlimit(first.process, resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
        else:
            os.kill(first.process, getattr(signal, way))
    except (ProcessLookupError, ChildProcessError):
        raise AssertionError(first.log.read_text()) from None
    code = first.wait()
    cached, noted = rows(cache), first.noted()
    answered = min(noted.count("a"), harness.answers)
    in_ended_steps = noted[: noted.rfind("s") + 1].count("a")
    assert cached >= min(in_ended_steps, harness.answers), (cached, noted)
    scores = first.scores()
    assert scores is None or same(scores, expected)
    second = harness.start(f"{name}-second", cache)
    assert second.wait() == 0, second.log.read_text()
    asked_again = second.noted().count("a")
    assert asked_again == harness.answers - cached, (asked_again, harness.answers, cached)
    actual = second.scores()
    assert actual is not None and same(actual, expected), (actual, expected)
    lines = [line for line in first.log.read_text().splitlines() if line.strip()]
    return Outcome(way, code, cached, max(answered - cached, 0), lines[-1] if lines else "")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether scores are equal up to rounding, which depends on the requests in a step."""
    assert one.keys() == other.keys()
    for task, metrics in one.items():
        for name, value in metrics.items():
            expected = other[task][name]
            if isinstance(value, float) and isinstance(expected, float):
                if not np.isclose(value, expected, rtol=1e-5, atol=1e-9):
                    return False
            elif value != expected:
                return False
    return True


def prepared(folder: Path, framework: str, **options: Any) -> tuple[Harness, dict[str, Any], float]:
    """Return a harness, and the scores and evaluation time (s) of an uninterrupted run."""
    harness = Harness(folder, framework, **options)
    run = None
    began = ended = 0.0
    for name in ("warm", "whole"):  # the first run may compile
        run = harness.start(name, folder / f"{name}-cache")
        while not run.has_begun():
            time.sleep(0.002)
        began = time.monotonic()
        assert run.wait() == 0, run.log.read_text()
        ended = time.monotonic()
    assert run is not None
    scores = run.scores()
    assert scores is not None and rows(run.cache) == harness.answers
    return harness, scores, ended - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--framework", choices=("torch", "jax"), required=True)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng, table = np.random.default_rng(given.seed), Counter[tuple[str, str]]()
    most = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        harness, expected, seconds = prepared(Path(folder), given.framework)
        for number in range(given.count):
            way = WAYS[number % len(WAYS)]
            delay = float(rng.uniform(0, seconds))
            try:
                outcome = end_and_go_on(harness, str(number), way, delay, expected)
            except AssertionError as error:
                failed += 1
                print(f"{number} {way} after {delay:.2f} s FAILED: {error}", flush=True)
                continue
            most = max(most, outcome.lost)
            table[way, str(outcome.code)] += 1
            print(
                f"{number} {way} after {delay:.2f} of {seconds:.2f} s: exit {outcome.code}, "
                f"{outcome.cached} of {harness.answers} answers kept, {outcome.lost} lost; "
                f"{re.sub(r'[^ -~]', '', outcome.said)[:110]}",
                flush=True,
            )
    counts = ", ".join(f"{count} {way} exit {code}" for (way, code), count in sorted(table.items()))
    print(f"{given.framework}: {counts}; at most {most} answers lost; {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    import lm_eval.tasks  # noqa: F401
    import torch  # noqa: F401

    sys.exit(main())
