"""``lm_eval --model griffin`` compared with ``--model hf`` and the roofline on the same requests.

Every measurement is a separate process on the CPU: the stock ``lm_eval``. Two times are taken: that
of the whole command, and that in which lm_eval waited for the model's answers. JAX stores compiled
programs in a folder, which is filled before the first round.

hf gets batches of 8, or of 1 for generation, where its padding gives wrong results; griffin gets
lm_eval's default, 1, which has no effect.

The roofline is the time of the matrix products alone: every token of the requests' prefix tree
once, at the best rate of either framework in the same round for the shapes of the model's MLP and
the tokens of a step.
"""

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.commands import Interpreter, tell
from benchmarks.evaluation.lm_eval_runs import Run, run_lm_eval
from benchmarks.peers import left_out
from benchmarks.report import Report, Row
from benchmarks.timing import JAX_CACHE, JAX_KEEPS_ALL, Job, busy_process, interleave, ratios
from griffin_eval.arguments import FRAMEWORKS
from griffin_eval.config import GriffinConfig

HF_NEEDS = ("torch", "transformers", "accelerate", "lm_eval.models.huggingface")
HF_BATCH = 8
HF_LENGTH = 1 << 20  # tokens of a context; by default hf cuts at 2048
STEP = 512  # tokens of a step on a CPU
BUSY = "a busy process"
# Largest differences of a log-likelihood, relative above 1 nat and absolute below. hf also rounds
# its logits to 16 bits.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
METRIC_TOLERANCE = 1e-6  # relative; of an accuracy, less than one document


@dataclass
class Bench:
    """A run of the benchmark."""

    checkpoint: Path
    config: GriffinConfig
    hf_absent: str | None  # reason why hf's model is left out, or None
    pythons: list[Interpreter]
    frameworks: list[str]
    dtype: str
    tasks: list[str]
    tasks_path: str | None
    limit: int  # documents of each task
    folder: Path  # temporary folder, for JAX's compiled programs

    def evaluate(self, rounds: int, report: Report) -> bool:
        """Measure all tasks, and the first one again beside a busy process; return whether all
        answers agree with hf's."""
        if self.hf_absent is None:
            tell(f"counted the tokens of {len(self._plans)} tasks")
        conditions = [(task, "") for task in self.tasks] + [(self.tasks[0], BUSY)]
        cases = [(*condition, who) for condition in conditions for who in self._models]
        measurements: dict[Any, Callable[[], Any]] = {"products": self._best_products}
        measurements |= {case: partial(self._measure, *case) for case in cases}
        for case in cases:
            if case[2].startswith("griffin jax"):
                tell(f"compiling: {case[0]}, {case[2]}")
                measurements[case]()
        results = interleave(rounds, measurements, tell)
        rates = results.pop("products")
        report.tables[f"{self.limit} documents of each task, {self.dtype}, seconds"] = [
            row for condition in conditions for row in self._rows(*condition, results, rates)
        ]
        report.notes.append(
            f"roofline: {min(rates) / 1e9:.0f} to {max(rates) / 1e9:.0f} GFLOP/s of products"
        )
        if self.hf_absent is not None:
            report.notes.append(left_out("hf", f"{self.hf_absent}; it counts the roofline's work"))
            return True
        problems = []
        for task, beside, who in cases:
            ours, theirs = (results[task, beside, model][0] for model in (who, "hf"))
            for problem in differences(ours, theirs, self.dtype):
                problems.append(f"{task}, {who}: NOT the same: {problem}")
        report.notes += problems or ["all answers agree with those of hf"]
        return not problems

    def read_documents(
        self, checkpoint: Path, lengths: list[int], rounds: int, report: Report
    ) -> None:
        """Score one document of each length in tokens; report speed and memory."""

        def read(python: str, framework: str, tokens: int) -> dict[str, float]:
            request = {"checkpoint": str(checkpoint), "framework": framework, "tokens": tokens}
            with Job("benchmarks.evaluation.document", python=python) as job:
                return job.ask("read_document", **request)

        measurements = {
            (python.named(framework), length): partial(read, python.path, framework, length)
            for framework in self.frameworks
            for python in self.pythons
            for length in sorted(lengths)
        }
        results = interleave(rounds, measurements, tell)
        rows = []
        for (name, _), found in results.items():
            shortest = results[name, min(lengths)]
            longer = found[0]["tokens"] - shortest[0]["tokens"]
            used, least = ([r["peak"] - r["before"] for r in runs] for runs in (found, shortest))
            growth = (
                [(a - b) / longer for a, b in zip(used, least, strict=True)] if longer else None
            )
            rows.append(
                {
                    "implementation": name,
                    "tokens": found[0]["tokens"],
                    "tokens/s": [r["tokens"] / r["seconds"] for r in found],
                    "MB before": [r["before"] / 1e6 for r in found],
                    "MB at most": [r["peak"] / 1e6 for r in found],
                    "bytes a token": growth,
                }
            )
        report.tables["one document, scored by a tiny model"] = rows

    @property
    def _griffins(self) -> dict[str, tuple[str, str]]:
        """The interpreter and framework of each of this package's implementations."""
        return {
            python.named(framework): (python.path, framework)
            for framework in self.frameworks
            for python in self.pythons
        }

    @property
    def _models(self) -> list[str]:
        return [*(["hf"] if self.hf_absent is None else []), *self._griffins]

    def _measure(self, task: str, beside: str, who: str) -> Run:
        options = ["--tasks", task, "--limit", str(self.limit), "--device", "cpu"]
        options += ["--include_path", self.tasks_path] if self.tasks_path else []
        arguments = {"pretrained": self.checkpoint, "dtype": self.dtype}
        if who == "hf":
            model, python, kinds = "hf", sys.executable, self._plans[task]["kinds"]
            if (
                "loglikelihood_rolling" not in kinds
            ):  # max_length is the length of hf's windows there
                arguments["max_length"] = HF_LENGTH
            options += ["--batch_size", str(1 if "generate_until" in kinds else HF_BATCH)]
        else:
            model, (python, arguments["framework"]) = "griffin", self._griffins[who]
        with busy_process() if beside else nullcontext():
            return run_lm_eval(python, model, arguments, *options, **self._environment)

    def _rows(
        self, task: str, beside: str, results: Mapping[Any, list[Run]], rates: list[float]
    ) -> Iterator[Row]:
        hf = results.get((task, beside, "hf"))
        counts = results[task, beside, next(iter(self._griffins))][0].config
        for who in self._models:
            runs, ours = results[task, beside, who], who != "hf"
            in_model, whole = [r.model_seconds for r in runs], [r.seconds for r in runs]
            row: dict[str, Any] = {"task": task, "beside": beside, "implementation": who}
            row["in the model"] = in_model
            if hf and ours:
                row["speed-up over hf"] = ratios([r.model_seconds for r in hf], in_model)
            if hf:
                row["x roofline"] = ratios(in_model, self._roofline(task, counts, rates))
            row["whole command"] = whole
            if hf and ours:
                row["whole speed-up"] = ratios([r.seconds for r in hf], whole)
            if ours:
                for kind in ("requested", "computed"):
                    row[kind] = runs[0].config[f"griffin_tokens_{kind}"]
            yield row

    def _roofline(self, task: str, counts: Mapping[str, int], rates: list[float]) -> list[float]:
        """Return the least seconds of each round, including the generated tokens."""
        plan = self._plans[task]
        computed, again, unique = (
            counts[f"griffin_tokens_{name}"] for name in ("computed", "again", "unique")
        )
        flops = plan["flops"] + (computed - again - unique) * plan["decode_flops"]
        return [flops / rate for rate in rates]

    @cached_property
    def _plans(self) -> dict[str, dict[str, Any]]:
        plans = {}
        request = {"limit": self.limit, "tasks_path": self.tasks_path}
        for task in self.tasks:
            with Job("benchmarks.evaluation.plan", environment=self._environment) as job:
                plans[task] = job.ask("plan", checkpoint=str(self.checkpoint), task=task, **request)
        return plans

    @property
    def _environment(self) -> dict[str, str]:
        compiled = str(self.folder / "compiled")
        return {"JAX_PLATFORMS": "cpu", JAX_CACHE: compiled} | JAX_KEEPS_ALL

    def _best_products(self) -> float:
        """Return the FLOP/s of the fastest method of either framework."""
        sizes = {"tokens": STEP, "width": self.config.width, "mlp_width": self.config.mlp_width}
        rates = []
        for framework in filter(find_spec, FRAMEWORKS):
            with Job("benchmarks.products", environment=self._environment) as job:
                rates += job.ask(f"products_{framework}", **sizes, dtype=self.dtype).values()
        return max(rates)


def differences(ours: Run, theirs: Run, dtype: str) -> list[str]:
    """Return the differences between griffin's and hf's answers.

    In 16 bits rounding decides metrics and texts, so only log-likelihoods are compared.
    """
    problems, tolerance = [], TOLERANCES[dtype]

    def compare(kind: str, name: str, same: Callable[[Any, Any], bool]) -> None:
        both = (run.answers.get(kind, []) for run in (ours, theirs))
        pairs = list(zip(*both, strict=True))
        if far := [pair for pair in pairs if not same(*pair)]:
            example = f"{far[0][0]!r}, not {far[0][1]!r}"
            problems.append(f"{len(far)} of {len(pairs)} {name}, such as {example}")

    compare(
        "loglikelihood",
        "log-likelihoods",
        lambda a, b: abs(a - b) <= tolerance * max(1.0, abs(b)),
    )
    if dtype == "float32":
        compare("generate_until", "texts", operator.eq)
        for name, value in theirs.metrics.items():
            metric = ours.metrics.get(name, math.nan)
            if not math.isclose(metric, value, rel_tol=METRIC_TOLERANCE):
                problems.append(f"{name} {metric!r}, not {value!r}")
    return problems
