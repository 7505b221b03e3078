"""Many compilations of `griffin-eval bench shard`, one after the other, whose results are kept."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from griffin_eval.errors import ArgumentError
from griffin_eval.json_files import read_json

# Options of the runs in docs/scale.md, each of two to ten minutes.
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
    """Compiles the runs that a file does not hold yet, each in a process of its own.

    Args:
        file: JSON, of results by options; written anew after every run.
        runs: options of each.
        begins: called with the options of each that is compiled.

    Returns:
        Results by options; of one that was refused, its ``problem``.

    Raises:
        ArgumentError: the file is no such file, or a run ended otherwise.
    """
    results = read_json(file) if file.exists() else {}
    if not all(isinstance(result, dict) for result in results.values()):
        raise ArgumentError(f"{file} holds no results of bench shard --table: name another file")
    for run in runs:
        if run in results:
            continue
        begins(run)
        program = str(Path(sys.executable).with_name("griffin-eval"))
        command = [program, "bench", "shard", *run.split(), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode in (0, 1) and done.stdout:
            results[run] = json.loads(done.stdout)
        elif done.returncode == 2:
            results[run] = {"problem": done.stderr.strip().splitlines()[-1]}
        else:
            last = (done.stderr.strip() or "nothing").splitlines()[-1]
            raise ArgumentError(
                f"bench shard {run} ended with code {done.returncode}, its last words: {last}; the "
                f"results before it are in {file}"
            )
        beside = file.with_name(f"{file.name}.part")
        beside.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, file)
    return results


def print_table(console: Console, results: dict[str, Any]) -> None:
    """Prints a line of each step of each run."""
    table = Table()
    for heading in ("options", "step", "operations", "weights, MB", "temporaries, MB", "fit"):
        table.add_column(heading, justify="right" if "MB" in heading else "left")
    for run, result in results.items():
        for step in result.get("steps", [result]):
            if "problem" in step:
                table.add_row(run, "-", step["problem"], "-", "-", "-")
                continue
            name = step.get("step") or f"reading, {step['devices']} devices"
            said = ", ".join(f"{f['count']} {kind}" for kind, f in step["collectives"].items())
            bytes_of = (f"{step[part] / 1e6:,.0f}" for part in ("weights", "temporaries"))
            table.add_row(
                run, name, said or "none", *bytes_of, str(step.get("states_that_fit", "-"))
            )
            run = ""
    console.print(table)
