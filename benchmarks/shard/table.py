"""The runs of the table in docs/scale.md, one after the other, whose results are kept."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.timing import START
from griffin_eval.errors import ArgumentError
from griffin_eval.json_files import read_json

# Options of the runs, each of two to ten minutes.
RUNS = (
    *(f"--preset recurrentgemma-2b --target v5e-{count}" for count in (2, 5, 8, 10)),
    *(f"--preset recurrentgemma-9b --target v5e-{count}" for count in (4, 8, 16)),
    "--preset griffin-14b --target v5e-8",
    "--preset recurrentgemma-9b --target v5e-64 --replicas 8 --training --batch 32",
    "--preset griffin-7b --target v5e-256 --replicas 16 --training --batch 128",
    "--preset recurrentgemma-2b --target v5e-16 --split time --tokens 32768",
    "--preset recurrentgemma-2b --target v5e-16 --split time --tokens 131072",
)


def complete(
    file: Path, runs: Iterable[str] = RUNS, begins: Callable[[str], Any] = lambda run: None
) -> dict[str, Any]:
    """Compile the runs that a file does not hold yet, each in a process of its own.

    Args:
        file: JSON file with results by options, written anew after every run.
        runs: Options of each run.
        begins: Called with the options of each run that is compiled.

    Returns:
        Results by options; ``problem`` for a run that was refused.

    Raises:
        ArgumentError: The file holds something else, or a run failed.
    """
    results = read_json(file) if file.exists() else {}
    if not all(isinstance(result, dict) for result in results.values()):
        raise ArgumentError(f"{file} holds no results of --table: name another file")
    for run in runs:
        if run in results:
            continue
        begins(run)
        command = [sys.executable, "-P", START, "benchmarks.shard", *run.split(), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        if done.returncode == 2:
            results[run] = {"problem": last}
        elif done.returncode in (0, 1) and done.stdout:
            results[run] = json.loads(done.stdout)
        else:
            raise ArgumentError(
                f"{run} ended with exit code {done.returncode}: {last}; earlier results: {file}"
            )
        beside = file.with_name(f"{file.name}.part")
        beside.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, file)
    return results
