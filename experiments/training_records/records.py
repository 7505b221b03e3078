"""Records of training runs, which remain when the runs' folders are deleted."""

import json
from pathlib import Path
from typing import Any

from griffin_eval.training.options import TrainOptions, command
from griffin_eval.training.run_folder import METRICS_FILE, read_metrics
from griffin_eval.training.trainer import is_finished

CURVES = ("step", "test_loss", "accuracy", "in_view", "out_of_view", "stage_accuracy")
SHOWN = ("accuracy", "in_view", "out_of_view", "sequences")
DIGITS = 4  # decimal places of the numbers of a curve


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file, one JSON object a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def record(order: TrainOptions) -> dict[str, Any]:
    """Return the record of a run.

    It has ``name``, the run's folder with its parent; ``command`` that repeats the run;
    ``settings`` as in its ``run.json``, with ``from`` shortened like ``name``; ``until``, the
    accuracy that ends the run; ``curves``, lists with an element for each test; and ``last``, the
    last line of metrics.
    """
    lines = read_metrics(order.output / METRICS_FILE)
    settings = order.run.settings(order.save_every)
    if "from" in settings:
        settings["from"] = _name(Path(settings["from"]))
    curves = {
        name: [round(line[name], DIGITS) for line in lines] for name in CURVES if name in lines[-1]
    }
    return {
        "name": _name(order.output),
        "command": command(settings, lines[-1]["step"], order.until),
        "settings": settings,
        "until": order.until,
        "curves": curves,
        "last": lines[-1],
    }


def _name(folder: Path) -> str:
    return "/".join(folder.parts[-2:])


def progress(order: TrainOptions) -> tuple[str, bool]:
    """Return a line about the progress of a run, and whether the run is finished."""
    file = order.output / METRICS_FILE
    lines = read_metrics(file) if file.is_file() else []
    if not lines:
        return f"{order.output}: not begun", False
    steps, last = order.run.recipe.steps, lines[-1]
    finished = is_finished(lines, steps, order.until)
    word = "finished" if finished else f"of {steps}"
    shown = (f"{name.replace('_', ' ')} {last[name]:.1%}" for name in SHOWN if name in last)
    return (
        f"{order.output}: step {last['step']} ({word}), length {last['length']}, "
        f"{', '.join(shown)}, {last['seconds'] / 60:.0f} minutes"
    ), finished
