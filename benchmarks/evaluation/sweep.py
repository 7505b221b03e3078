"""`griffin-eval sweep` over checkpoints, beside one lm_eval command.

The limit of a sweep is one command, and 1.1 times the model's time for each of the other
checkpoints. Commands and sweeps are processes of their own, and take turns.
``python -m benchmarks.evaluation.sweep CHECKPOINT``.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.commands import AsJson, Framework, Interpreter, Pythons, Rounds, interpreters, tell
from benchmarks.evaluation.lm_eval_runs import run_command_line, run_lm_eval
from benchmarks.failures import measuring
from benchmarks.report import Report, Row
from benchmarks.timing import interleave, ratios
from griffin_eval.arguments import positive_integers
from griffin_eval.cli.ending import run_command
from griffin_eval.cli.options import check_figures_folder
from griffin_eval.errors import ArgumentError

MODEL_TIMES = 1.1  # that a further checkpoint should take at most
Taken = tuple[float, list[float]]  # seconds of a process, and of the model for each checkpoint


@dataclass
class Measured:
    """Seconds of one size in one environment, one number a round."""

    limit: int  # documents of each task
    checkpoints: int
    command: list[float]
    model: list[float]  # for one checkpoint, the median of all
    sweep: list[float]
    limits: list[float] = field(init=False)  # of the sweep

    def __post_init__(self) -> None:
        others = MODEL_TIMES * (self.checkpoints - 1)
        pairs = zip(self.command, self.model, strict=True)
        self.limits = [command + others * model for command, model in pairs]

    def row(self, name: str) -> Row:
        commands = [self.checkpoints * seconds for seconds in self.command]
        return {
            "documents": self.limit,
            "implementation": name,
            "one command": self.command,
            "model, one checkpoint": self.model,
            f"sweep of {self.checkpoints}": self.sweep,
            "limit": self.limits,
            "sweep / limit": ratios(self.sweep, self.limits),
            f"{self.checkpoints} commands / sweep": ratios(commands, self.sweep),
        }


@dataclass
class Bench:
    """A run of the benchmark."""

    folders: list[Path]
    tasks: str
    framework: str

    def run(
        self, limits: list[int], pythons: list[Interpreter], rounds: int
    ) -> dict[str, list[Measured]]:
        """Measure each number of documents in each environment.

        Raises:
            ArgumentError: A command refused its arguments.
            Failed: A command ended with an error.
        """
        measurements: dict[Any, Callable[[], Taken]] = {
            (python, limit, way): partial(measure, python.path, limit)
            for python in pythons
            for limit in limits
            for way, measure in (("command", self._command), ("sweep", self._sweep))
        }
        interleave(1, measurements)  # The first runs may compile.
        results = interleave(rounds, measurements, tell)
        return {
            python.named(self.framework): [
                self._measured(
                    limit, results[python, limit, "command"], results[python, limit, "sweep"]
                )
                for limit in limits
            ]
            for python in pythons
        }

    def _measured(self, limit: int, commands: list[Taken], sweeps: list[Taken]) -> Measured:
        model = [median(one + many) for (_, one), (_, many) in zip(commands, sweeps, strict=True)]
        seconds = ([taken for taken, _ in runs] for runs in (commands, sweeps))
        command, sweep = seconds
        return Measured(limit, len(self.folders), command, model, sweep)

    def _command(self, python: str, limit: int) -> Taken:
        arguments = {"pretrained": self.folders[0], "framework": self.framework}
        options = ("--tasks", self.tasks, "--limit", str(limit))
        run = run_lm_eval(python, "griffin", arguments, *options)
        return run.seconds, [run.config["griffin_seconds"]]

    def _sweep(self, python: str, limit: int) -> Taken:
        with tempfile.TemporaryDirectory() as results:
            command = [str(Path(python).with_name("griffin-eval")), "sweep"]
            command += [*map(str, self.folders), "-o", f"{results}/sweep"]
            command += ["--model_args", f"framework={self.framework}"]
            command += ["--tasks", self.tasks, "--limit", str(limit)]
            seconds = run_command_line(command, "griffin-eval sweep", {})
            files = sorted(Path(results).rglob("results_*.json"))
            configs = [json.loads(file.read_text())["config"] for file in files]
        return seconds, [config["griffin_seconds"] for config in configs]


def draw(found: list[Measured], folder: Path) -> Path:
    """Draw what a sweep takes, beside as many commands and the limit: ``sweep_timing``."""
    from matplotlib.lines import Line2D

    from griffin_eval.drawing import BLACK, BLUE, SKY_BLUE, panels, save

    figure, drawn = panels(len(found), 4.6 * max(len(found), 1.4))
    for axes, measured in zip(drawn, found, strict=True):
        count, model = measured.checkpoints, median(measured.model)
        kinds = {
            "one command": (median(measured.command), model),
            f"{count} commands": (count * median(measured.command), count * model),
            f"a sweep of {count}": (median(measured.sweep), count * model),
        }
        for place, (name, (whole, of_model)) in enumerate(kinds.items()):
            axes.barh(place, of_model, 0.7, color=BLUE, label="" if place else "model")
            label = "" if place else "all else"
            axes.barh(place, whole - of_model, 0.7, left=of_model, color=SKY_BLUE, label=label)
            axes.annotate(f" {name}: {whole:.0f} s", (0, place - 0.42), va="bottom", fontsize=9)
        axes.hlines(2, min(measured.sweep), max(measured.sweep), color=BLACK)
        axes.vlines(median(measured.limits), 1.6, 2.4, color=BLACK, linestyles="--")
        title = f"{measured.limit} documents of each task"
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
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the figure, PNG and SVG.")
    ] = None,
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
        found = Bench(folders, tasks, framework).run(limits, interpreters(python), rounds)
    report = Report()
    report.tables[f"{tasks}, seconds"] = [
        measured.row(name) for name, sizes in found.items() for measured in sizes
    ]
    if output is not None:
        report.notes.append(str(draw(next(iter(found.values())), output)))
    report.show(as_json)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
