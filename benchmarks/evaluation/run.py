"""``lm_eval --model griffin`` beside ``--model hf``, and beside the limit, on the same requests.

Every measurement is a process of its own, on the CPU, and they take turns: in each round hf, then
griffin in every framework. Two times are taken. *In the model* is what lm-eval waits for answers
(`benchmarks.evaluation.worker.evaluate`); *whole command* is the stock ``lm_eval``, from
its start to its exit. JAX keeps what it has compiled in a folder, which is filled before the first
round.

hf gets batches of 8, and of 1 where it generates, since its padding is wrong there; griffin gets
what lm_eval says where nothing is asked for, 1, which changes nothing.

The roofline is the time of the matrix products alone: of every token of the requests' prefix tree
once, at the best rate that either framework reaches in this run on the shapes of the model's MLP
with the tokens of a step. Answers are compared with hf's, but rolling log-likelihoods, which hf
cuts into windows, with one pass of transformers after one BOS.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.evaluation.compare import (
    Timing,
    compare,
    differing_flags,
    differing_metrics,
    timing_table,
    tokens_and_limit,
)
from benchmarks.evaluation.requests import comparable_metrics
from benchmarks.peers import left_out
from benchmarks.timing import Failed, Job
from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.runners.batching import step_tokens
from griffin_eval.runners.protocol import FRAMEWORKS

HF_NEEDS = ("torch", "transformers", "accelerate", "lm_eval.models.huggingface")
WORKER = "benchmarks.evaluation.worker"
BAD_INPUT = 2  # exit code of lm_eval with this package's model
GRIFFIN_BATCH, HF_BATCH = 1, 8
HF_LENGTH = 1 << 20  # hf cuts contexts at 2048 tokens unless told otherwise
IN_MODEL, WHOLE = "in the model", "whole command"


class Workload(NamedTuple):
    """A task or tag, the documents of each task in the model, and in whole commands (or 0)."""

    task: str
    documents: int
    whole: int


def parse_workloads(text: str, documents: int) -> list[Workload]:
    """Workloads in ``TASK[:DOCUMENTS[:WHOLE]],…``; whole commands have as many unless it says so.

    Args:
        text: what the user gave.
        documents: where it does not say how many.

    Raises:
        ArgumentError: not such a text, or a task twice.
    """
    workloads = []
    for part in text.split(","):
        task, *numbers = part.split(":")
        counts = [int(n) if n.isdecimal() else -1 for n in numbers] or [documents]
        if not task or len(counts) > 2 or counts[0] < 1 or counts[-1] < 0:
            raise ArgumentError(
                f"--tasks {part!r}: expected TASK, TASK:DOCUMENTS or TASK:DOCUMENTS:WHOLE, such as "
                "griffin_phonebook:8:0"
            )
        workloads.append(Workload(task, counts[0], counts[-1]))
    tasks = [workload.task for workload in workloads]
    if twice := sorted({task for task in tasks if tasks.count(task) > 1}):
        raise ArgumentError(f"--tasks names {', '.join(twice)} more than once")
    return workloads


class Bench:
    """A run of the benchmark.

    Args:
        console: for every measurement as it is taken, and the tables.
        checkpoint: folder, of Hugging Face's format if hf's model runs.
        config: its architecture.
        hf_absent: why hf's model is left out; None if it runs.
        frameworks: in which griffin runs.
        dtype: of both models.
        tasks_path: folder with more tasks.
        characters: rolling documents are cut to so many in the model; None for whole ones.
        folder: for files of this run.
    """

    def __init__(
        self,
        console: Console,
        checkpoint: Path,
        config: GriffinConfig,
        *,
        hf_absent: str | None,
        frameworks: list[str],
        dtype: str,
        tasks_path: Path | None,
        characters: int | None,
        folder: Path,
    ):
        self._console, self._checkpoint, self._config = console, checkpoint.resolve(), config
        self._frameworks, self._characters, self._folder = frameworks, characters, folder
        self._tasks_path = str(tasks_path.resolve()) if tasks_path else None
        self._hf_absent, self._dtype = hf_absent, dtype
        self._models = [*(["hf"] if hf_absent is None else []), *frameworks]
        self._files = 0
        self._plans: dict[Workload, dict[str, Any]] = {}
        self._results: dict[tuple[Workload, str, str], list[dict[str, Any]]] = {}
        self._rates: dict[str, float] = {}
        self._environment = {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def evaluate(self, workloads: list[Workload], rounds: int) -> bool:
        """Measures workloads and prints what was found; gives whether all answers agree.

        Args:
            workloads: what to evaluate.
            rounds: measurements of each.

        Raises:
            ArgumentError: there is no such task.
            Failed: a measurement did not come to its end.
        """
        if self._hf_absent is None:
            for workload in workloads:
                self._plans[workload] = self._plan(workload, doubtful=[])
        if "jax" in self._frameworks:
            for workload in workloads:
                self._measure(workload, "jax", "compiling: ")
        self._results.clear()
        for _ in range(rounds):
            self._measure_products()
            for workload in workloads:
                for who in self._models:
                    self._measure(workload, who)
        way, rate = max(self._rates.items(), key=lambda item: item[1])
        timings = [timing for w in workloads for timing in self._timings(w, rate)]
        self._console.print(timing_table(timings))
        self._line(f"roofline: {way}, {rate / 1e9:.1f} GFLOP/s")
        if self._hf_absent is not None:
            self._line(left_out("hf", f"{self._hf_absent}; it counts the tokens of the roofline"))
            return True
        agree = [self._compare(w, framework) for w in workloads for framework in self._frameworks]
        return all(agree)

    def read_documents(self, checkpoint: Path, lengths: list[int]) -> None:
        """Reads one document of each length in tokens; prints time and memory, and how many bytes
        a token take between the shortest and the longest.

        Args:
            checkpoint: of a tiny model, for which these lengths are a matter of minutes.
            lengths: in tokens.

        Raises:
            Failed: a measurement did not come to its end.
        """
        table = Table(title="one document, its rolling log-likelihood by a tiny model")
        memory = ("before", "tokenizing", "reading")
        for heading in ("griffin", "tokens", "tokens/s", *(f"MB {when}" for when in memory)):
            table.add_column(heading, justify="right" if table.columns else "left")
        slopes = []
        for framework in self._frameworks:
            read = []
            for length in sorted(lengths):
                r = self._job(
                    "read_document",
                    checkpoint=str(checkpoint.resolve()),
                    framework=framework,
                    tokens=length,
                )
                self._say(f"a document of {r['tokens']} tokens, griffin {framework}", r["seconds"])
                rate = f"{r['tokens'] / r['seconds']:.0f}"
                megabytes = (f"{r[when] / 1e6:.0f}" for when in memory)
                table.add_row(framework, str(r["tokens"]), rate, *megabytes)
                read.append(r)
            if read[-1]["tokens"] > read[0]["tokens"]:
                slopes.append((framework, read[0], read[-1]))
        self._console.print(table)
        for framework, short, long in slopes:
            tokens = f"from {short['tokens']} to {long['tokens']} tokens"
            self._line(
                f"griffin {framework}, {tokens}: {bytes_a_token(short, long):.0f} bytes a token"
            )

    def _measure(self, workload: Workload, who: str, prefix: str = "") -> None:
        for place, measure in ((IN_MODEL, self._in_model), (WHOLE, self._whole_command)):
            if place == WHOLE and not workload.whole:
                continue
            result = measure(workload, *self._model(who, workload))
            self._say(f"{prefix}{workload.task}, {place}, {_named(who)}", result["seconds"])
            self._results.setdefault((workload, place, who), []).append(result)

    def _timings(self, workload: Workload, rate: float) -> Iterator[Timing]:
        for place, documents in ((IN_MODEL, workload.documents), (WHOLE, workload.whole)):
            for framework in self._frameworks if documents else ():
                seconds = {
                    who: statistics.median(
                        r["seconds"] for r in self._results[workload, place, who]
                    )
                    for who in self._models
                }
                timing = Timing(
                    workload.task,
                    place,
                    documents,
                    framework,
                    seconds.get("hf"),
                    seconds[framework],
                )
                if place == IN_MODEL and workload in self._plans:
                    stats = self._results[workload, place, framework][0]["stats"]
                    tokens, limit = tokens_and_limit(self._plans[workload], stats, rate)
                    timing = timing._replace(tokens=tokens, limit=limit)
                yield timing

    def _compare(self, workload: Workload, framework: str) -> bool:
        """Prints what is the same as in hf's answers, and what is not; gives whether all is."""
        ours, theirs = (self._results[workload, IN_MODEL, who][0] for who in (framework, "hf"))
        doubtful = differing_flags(ours, theirs)
        unclear = self._plan(workload, doubtful)["unclear"] if doubtful else []
        same, problems = compare(
            ours, theirs, self._plans[workload], frozenset(unclear), self._dtype
        )
        if workload.whole and self._dtype == "float32":
            ours, theirs = (
                self._results[workload, WHOLE, who][0]["metrics"] for who in (framework, "hf")
            )
            problems += [f"{WHOLE}: {what}" for what in differing_metrics(ours, theirs)]
        name = f"{workload.task}, {_named(framework)}"
        self._line(f"{name}: the same are {', '.join(same)}")
        for problem in problems:
            self._line(f"{name}: NOT the same: {problem}")
        return not problems

    def _plan(self, workload: Workload, doubtful: list[int]) -> dict[str, Any]:
        return self._job(
            "plan",
            checkpoint=str(self._checkpoint),
            doubtful=doubtful,
            **self._requests(workload),
        )

    def _in_model(
        self, workload: Workload, model: str, arguments: dict[str, Any], batch_size: int
    ) -> dict[str, Any]:
        return self._job(
            "evaluate",
            model=model,
            model_args=arguments,
            batch_size=batch_size,
            **self._requests(workload),
        )

    def _whole_command(
        self, workload: Workload, model: str, arguments: dict[str, Any], batch_size: int
    ) -> dict[str, Any]:
        output = self._new_path()
        command = [str(Path(sys.executable).with_name("lm_eval")), "--model", model]
        command += ["--model_args", ",".join(f"{k}={v}" for k, v in arguments.items())]
        command += ["--tasks", workload.task, "--limit", str(workload.whole)]
        command += ["--batch_size", str(batch_size), "--device", "cpu"]
        command += ["--output_path", str(output)]
        command += ["--include_path", self._tasks_path] if self._tasks_path else []
        begin = time.perf_counter()
        self._run(command)
        seconds = time.perf_counter() - begin
        results = json.loads(next(output.rglob("results_*.json")).read_text())
        return {"seconds": seconds, "metrics": comparable_metrics(results)}

    def _model(self, who: str, workload: Workload) -> tuple[str, dict[str, Any], int]:
        """What lm_eval is to run: ``--model``, ``--model_args`` and ``--batch_size``."""
        arguments: dict[str, Any] = {"pretrained": str(self._checkpoint), "dtype": self._dtype}
        if who != "hf":
            return "griffin", arguments | {"framework": who}, GRIFFIN_BATCH
        kinds = self._plans[workload]["kinds"]
        if "loglikelihood_rolling" not in kinds:  # else it is the length of hf's windows
            arguments["max_length"] = HF_LENGTH
        return "hf", arguments, 1 if "generate_until" in kinds else HF_BATCH

    def _requests(self, workload: Workload) -> dict[str, Any]:
        return {
            "task": workload.task,
            "limit": workload.documents,
            "tasks_path": self._tasks_path,
            "characters": self._characters,
        }

    def _measure_products(self) -> None:
        c = self._config
        for framework in filter(find_spec, FRAMEWORKS):
            rates = self._job(
                f"products_{framework}",
                tokens=step_tokens("cpu"),
                width=c.width,
                mlp_width=c.mlp_width,
                dtype=self._dtype,
            )
            for way, rate in rates.items():
                self._line(f"{f'matrix products, {way}':<72}{rate / 1e9:>10.1f} GFLOP/s")
                self._rates[way] = max(rate, self._rates.get(way, 0.0))

    def _job(self, name: str, **arguments: Any) -> dict[str, Any]:
        """What a function of `benchmarks.evaluation.worker` returns, in a process of its
        own."""
        with Job(WORKER, environment=self._environment) as job:
            return job.ask(name, **arguments)

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            command, capture_output=True, text=True, env=os.environ | self._environment
        )
        said = done.stderr.strip().rpartition("\n")[2]
        if done.returncode == BAD_INPUT:
            raise ArgumentError(said)
        if done.returncode < 0:
            raise Failed(f"{Path(command[0]).name} was killed by signal {-done.returncode}: {said}")
        if done.returncode:
            raise Failed(said)

    def _new_path(self) -> Path:
        self._files += 1
        return self._folder / str(self._files)

    def _say(self, what: str, seconds: float) -> None:
        self._line(f"{what:<72}{seconds:>10.2f} s")

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def bytes_a_token(short: dict[str, float], long: dict[str, float]) -> float:
    """Bytes that a document takes for each token by which it is longer, its text included.

    Args:
        short, long: what `benchmarks.evaluation.worker.read_document` measured of two.
    """
    peaks = [max(r["tokenizing"], r["reading"]) - r["before"] for r in (short, long)]
    return (peaks[1] - peaks[0]) / (long["tokens"] - short["tokens"])


def _named(who: str) -> str:
    return who if who == "hf" else f"griffin {who}"
