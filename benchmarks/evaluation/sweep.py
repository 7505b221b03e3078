"""`griffin-eval sweep` over checkpoints, beside one lm_eval command for each of them.

What a sweep should take at most is what one command takes, and 1.1 times the model's time for each
of the other checkpoints. Commands and sweeps are processes of their own, and take turns.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.timing import Failed

MODEL_TIMES = 1.1  # that a further checkpoint should take at most


class Measured(NamedTuple):
    """Seconds of one size, a number for each round.

    Attributes:
        limit: documents of each task.
        checkpoints: that the sweep evaluates.
        command: of one lm_eval command.
        model: of the model for one checkpoint; the median of all.
        sweep: of the sweep.
    """

    limit: int
    checkpoints: int
    command: list[float]
    model: list[float]
    sweep: list[float]

    @property
    def most(self) -> float:
        """Seconds that the sweep should take at most."""
        others = MODEL_TIMES * (self.checkpoints - 1) * median(self.model)
        return median(self.command) + others


def run(
    console: Console,
    checkpoint: Path,
    tasks: str,
    limits: Sequence[int],
    framework: str,
    checkpoints: int,
    rounds: int,
) -> list[Measured]:
    """Measures and prints.

    Args:
        console: to print on.
        checkpoint: a folder, of which there will be copies.
        tasks: as lm_eval takes them.
        limits: numbers of documents of each task, each measured by itself.
        framework: ``torch`` or ``jax``.
        checkpoints: how many copies the sweep evaluates.
        rounds: of both measurements.

    Returns:
        What was measured, for each of the limits.

    Raises:
        Failed: a command ended with an error.
    """
    found = [Measured(limit, checkpoints, [], [], []) for limit in limits]
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / f"step{number}" for number in range(checkpoints)]
        for folder in folders:
            shutil.copytree(checkpoint, folder)
        turns = [(number, measured) for number in range(rounds + 1) for measured in found]
        for number, measured in track(
            turns, "rounds", console=console, disable=not console.is_terminal
        ):
            results = Path(root) / f"{measured.limit}-{number}"
            taken = _measure(folders, tasks, measured.limit, framework, results)
            if number == 0:  # which may compile
                continue
            for values, value in zip(measured[2:], taken, strict=True):
                values.append(value)
    for measured in found:
        _show(console, measured, tasks)
    return found


def _measure(
    folders: Sequence[Path], tasks: str, limit: int, framework: str, results: Path
) -> tuple[float, float, float]:
    """Seconds of one command, of the model for one checkpoint, and of a sweep."""
    asked = ["--tasks", tasks, "--limit", str(limit)]
    own = f"pretrained={folders[0]},framework={framework}"
    once, many = results / "command", results / "sweep"
    command = _seconds(
        *("-m", "lm_eval", "--model", "griffin", "--model_args", own),
        *(*asked, "--output_path", str(once)),
    )
    main = "from griffin_eval.cli.main import main; main()"
    sweep = _seconds(
        *("-c", main, "sweep", *map(str, folders), "-o", str(many)),
        *("--model_args", f"framework={framework}", *asked),
    )
    return command, median(_model_seconds(once) + _model_seconds(many)), sweep


def _show(console: Console, measured: Measured, tasks: str) -> None:
    title = f"{measured.checkpoints} checkpoints, {measured.limit} documents of each of {tasks}"
    table = Table(title=title)
    for heading in ("seconds", "median", "range"):
        table.add_column(heading, justify="left" if heading == "seconds" else "right")
    for name, values in (
        ("one command", measured.command),
        ("model's time for one checkpoint", measured.model),
        ("sweep", measured.sweep),
    ):
        table.add_row(name, f"{median(values):.3g}", f"{min(values):.3g}-{max(values):.3g}")
    console.print(table)
    took, most, count = median(measured.sweep), measured.most, measured.checkpoints
    console.print(
        f"sweep: {took:.3g} s; one command and {MODEL_TIMES} times the model's time for "
        f"{count - 1} more: {most:.3g} s, {took / most:.2f} of it: "
        f"{'held' if took <= most else 'exceeded'}; {count} commands take "
        f"{count * median(measured.command) / took:.1f} times as long"
    )


def draw(found: Sequence[Measured], folder: Path) -> Path:
    """Bars of what a sweep takes, beside as many commands and the limit: ``sweep_timing``."""
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
        low, high = min(measured.sweep), max(measured.sweep)
        axes.hlines(2, low, high, color=BLACK)
        axes.vlines(measured.most, 1.6, 2.4, color=BLACK, linestyles="--")
        axes.set(
            xlabel="seconds",
            yticks=[],
            ylim=(2.6, -0.8),
            title=f"{measured.limit} documents of each task",
        )
    handles, labels = drawn[0].get_legend_handles_labels()
    handles.append(Line2D([], [], color=BLACK, linestyle="--"))
    labels.append(f"one command and {MODEL_TIMES} times the model's time for the others")
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return save(figure, folder, "sweep_timing")


def _seconds(*arguments: str) -> float:
    """Seconds of a command of this Python."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-P", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise Failed(done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}")
    return time.perf_counter() - begin


def _model_seconds(folder: Path) -> list[float]:
    """Of the model, in each of the results in a folder."""
    results = [json.loads(path.read_text()) for path in sorted(folder.rglob("results_*.json"))]
    return [result["config"]["griffin_seconds"] for result in results]
