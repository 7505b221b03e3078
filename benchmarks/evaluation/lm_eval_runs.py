"""One run of ``lm_eval`` as a process: its times and its answers."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.timing import Failed, how_it_ended, module_command
from griffin_eval.errors import ArgumentError

BAD_INPUT = 2  # exit code of lm_eval and griffin-eval for bad arguments and files


class Run(NamedTuple):
    """One run of the command.

    Attributes:
        seconds: Time from its start to its exit.
        model_seconds: Time for which lm_eval waited for answers, tokenizing included.
        answers: Log-likelihoods and texts, by kind of request.
        metrics: Metrics that any model should give, by task and name.
        config: Entry ``config`` of the results file.
    """

    seconds: float
    model_seconds: float
    answers: dict[str, list[Any]]
    metrics: dict[str, float]
    config: dict[str, Any]


def run_lm_eval(
    python: str, model: str, model_args: Mapping[str, Any], *options: str, **environment: str
) -> Run:
    """Run ``lm_eval`` of an environment (errors: see `run_command_line`)."""
    with tempfile.TemporaryDirectory() as folder:
        record, output = Path(folder, "record.json"), Path(folder, "results")
        arguments = ["--model", model, "--output_path", str(output)]
        arguments += ["--model_args", ",".join(f"{k}={v}" for k, v in model_args.items())]
        module = "benchmarks.evaluation.timed_lm_eval"
        command = module_command(python, module, str(record), *arguments, *options)
        seconds = run_command_line(command, "lm_eval", environment)
        watched = json.loads(record.read_text())
        (file,) = output.rglob("results_*.json")
        results = json.loads(file.read_text())
    metrics = comparable_metrics(results)
    return Run(seconds, watched["seconds"], watched["answers"], metrics, results["config"])


def run_command_line(command: list[str], name: str, environment: Mapping[str, str]) -> float:
    """Return the seconds that a command takes."""
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    seconds = time.perf_counter() - begin
    if done.returncode:
        reason = how_it_ended(name, done.returncode, done.stderr)
        raise (ArgumentError if done.returncode == BAD_INPUT else Failed)(reason)
    return seconds


def comparable_metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that should equal those of hf's model.

    Rolling log-likelihoods are left out, since hf cuts documents into windows.
    """
    return {
        f"{task} {metric.removesuffix(',none')}": float(value)
        for task, metrics in results["results"].items()
        if results["configs"].get(task, {}).get("output_type") != "loglikelihood_rolling"
        for metric, value in metrics.items()
        if isinstance(value, float) and "stderr" not in metric
    }
