"""`griffin-eval sweep` over checkpoints, compared with one lm_eval command.

The limit of a sweep is one command, plus 1.1 times the model's time for each further checkpoint.
Commands and sweeps are separate processes, and take turns.
``python -m benchmarks.evaluation.sweep CHECKPOINT``.
"""

import json
import shutil
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import typer

from benchmarks.commands import (
    AsJson,
    Figures,
    Framework,
    Pythons,
    Rounds,
    interpreters,
    measuring,
    tell,
)
from benchmarks.evaluation.lm_eval_runs import run_command_line, run_lm_eval
from benchmarks.report import Report, Row
from benchmarks.timing import interleave, ratios
from griffin_eval.arguments import positive_integers
from griffin_eval.cli.ending import run_command
from griffin_eval.cli.options import check_figures_folder
from griffin_eval.errors import ArgumentError

MODEL_TIMES = 1.1  # largest ratio of a further checkpoint's seconds to the model's


class Taken(NamedTuple):
    """Seconds of one round: one command, the model for a checkpoint (median), and a sweep."""

    command: float
    model: float
    sweep: float


def row_of(name: str, limit: int, count: int, rounds: list[Taken]) -> Row:
    """Return the row of an implementation, a number of documents and ``count`` checkpoints."""
    command, model, sweep = (list(seconds) for seconds in zip(*rounds, strict=True))
    limits = [taken.command + MODEL_TIMES * (count - 1) * taken.model for taken in rounds]
    return {
        "documents": limit,
        "implementation": name,
        "one command": command,
        "model, one checkpoint": model,
        f"sweep of {count}": sweep,
        "limit": limits,
        "sweep / limit": ratios(sweep, limits),
        f"{count} commands / sweep": ratios([count * seconds for seconds in command], sweep),
    }


def measure(folders: list[Path], tasks: str, framework: str, python: str, limit: int) -> Taken:
    """Time one command and a sweep over all folders (errors: see `run_command_line`)."""
    asked = ("--tasks", tasks, "--limit", str(limit))
    arguments = {"pretrained": folders[0], "framework": framework}
    one = run_lm_eval(python, "griffin", arguments, *asked)
    with tempfile.TemporaryDirectory() as results:
        command = [str(Path(python).with_name("griffin-eval")), "sweep", *map(str, folders)]
        command += ["-o", f"{results}/sweep", "--model_args", f"framework={framework}", *asked]
        sweep = run_command_line(command, "griffin-eval sweep", {})
        files = sorted(Path(results).rglob("results_*.json"))
        configs = [one.config, *(json.loads(file.read_text())["config"] for file in files)]
    return Taken(one.seconds, median(config["griffin_seconds"] for config in configs), sweep)


def draw(rows: list[Row], count: int, folder: Path) -> Path:
    """Draw the seconds of sweeps beside as many commands and the limit: ``sweep_timing``."""
    from matplotlib.lines import Line2D

    from griffin_eval.drawing import BLACK, BLUE, SKY_BLUE, panels, save

    figure, drawn = panels(len(rows), 4.6 * max(len(rows), 1.4))
    for axes, row in zip(drawn, rows, strict=True):
        command, model = median(row["one command"]), median(row["model, one checkpoint"])
        sweeps = row[f"sweep of {count}"]
        kinds = {
            "one command": (command, model),
            f"{count} commands": (count * command, count * model),
            f"a sweep of {count}": (median(sweeps), count * model),
        }
        for place, (name, (whole, of_model)) in enumerate(kinds.items()):
            axes.barh(place, of_model, 0.7, color=BLUE, label="" if place else "model")
            label = "" if place else "all else"
            axes.barh(place, whole - of_model, 0.7, left=of_model, color=SKY_BLUE, label=label)
            axes.annotate(f" {name}: {whole:.0f} s", (0, place - 0.42), va="bottom", fontsize=9)
        axes.hlines(2, min(sweeps), max(sweeps), color=BLACK)
        axes.vlines(median(row["limit"]), 1.6, 2.4, color=BLACK, linestyles="--")
        title = f"{row['documents']} documents of each task"
        axes.set(xlabel="seconds", yticks=[], ylim=(2.6, -0.8), title=title)
    handles, labels = drawn[0].get_legend_handles_labels()
    handles.append(Line2D([], [], color=BLACK, linestyle="--"))
    labels.append(f"one command and {MODEL_TIMES} times the model's time for the others")
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return save(figure, folder, "sweep_timing")


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint.")],
    tasks: Annotated[
        str, typer.Option(help="Tasks, as lm_eval takes them: A,B,….")
    ] = "griffin_pydoc_choice,griffin_phonebook",
    limit: Annotated[
        str, typer.Option(help="Numbers of documents of each task, each measured by itself: A,B,….")
    ] = "20,100",
    framework: Framework = "torch",
    checkpoints: Annotated[int, typer.Option(help="Number of copies to evaluate.", min=2)] = 10,
    rounds: Rounds = 5,
    output: Figures = None,
    python: Pythons = None,
    as_json: AsJson = False,
) -> None:
    """Time a sweep over copies of a checkpoint beside one lm_eval command.

    The figure is of the first `--python`.
    """
    if not checkpoint.is_dir():
        raise ArgumentError(f"{checkpoint} is no folder: expected that of a checkpoint")
    limits = positive_integers("--limit", limit, "numbers of documents such as 20,100")
    check_figures_folder(output)
    with tempfile.TemporaryDirectory() as root, measuring():
        folders = [Path(root) / f"step{number}" for number in range(checkpoints)]
        for folder in folders:
            shutil.copytree(checkpoint, folder)
        measurements = {
            (environment.named(framework), size): partial(
                measure, folders, tasks, framework, environment.path, size
            )
            for environment in interpreters(python)
            for size in limits
        }
        interleave(1, measurements)  # The first runs may compile.
        results = interleave(rounds, measurements, tell)
    rows = [row_of(name, size, checkpoints, taken) for (name, size), taken in results.items()]
    report = Report({f"{tasks}, seconds": rows})
    if output is not None:
        report.notes.append(str(draw(rows[: len(limits)], checkpoints, output)))
    report.show(as_json)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
