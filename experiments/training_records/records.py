"""What is kept of training runs when their folders are gone: ``docs/runs.jsonl`` has a line for
each, with its settings, curves and last metrics, from which the figures are drawn.

    python -m experiments.training_records.records [QUEUE ...]

prints how far the runs of queue files are, adds those that are finished to the records, and draws
the figures of all records anew.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.training_records.record_figures import draw_all
from griffin_eval.errors import BadInput
from griffin_eval.training.orders import Order, command, read_queue
from griffin_eval.training.run_folder import METRICS_FILE, read_metrics
from griffin_eval.training.trainer import is_finished

RECORDS, FIGURES = Path("docs", "runs.jsonl"), Path("docs", "figures")
CURVES = ("step", "test_loss", "accuracy", "in_view", "out_of_view", "stage_accuracy")
DIGITS = 4  # of the numbers of a curve, behind the point


def record(order: Order) -> dict[str, Any]:
    """The record of a run.

    Returns:
        ``name``, of the run's folder and the one above; ``command`` that makes it again;
        ``settings`` as in its ``run.json``, ``from`` by such a name; ``until``, the accuracy that
        was to end it; ``curves``, lists with an element for each test; and ``last``, the whole
        last line of metrics.
    """
    lines = read_metrics(order.folder / METRICS_FILE)
    settings = order.run.settings()
    if "from" in settings:
        settings["from"] = _name(Path(settings["from"]))
    curves = {
        name: [round(line[name], DIGITS) for line in lines] for name in CURVES if name in lines[-1]
    }
    return {
        "name": _name(order.folder),
        "command": command(settings, lines[-1]["step"], order.until),
        "settings": settings,
        "until": order.until,
        "curves": curves,
        "last": lines[-1],
    }


def _name(folder: Path) -> str:
    return "/".join(folder.parts[-2:])


def state(order: Order) -> tuple[str, bool]:
    """A line about how far a run is, and whether it is finished."""
    file = order.folder / METRICS_FILE
    lines = read_metrics(file) if file.is_file() else []
    steps = order.run.recipe.steps
    if not lines:
        return f"{order.folder}: not begun", False
    finished, last = is_finished(lines, steps, order.until), lines[-1]
    shown = {
        name: last[name]
        for name in ("accuracy", "in_view", "out_of_view", "sequences")
        if name in last
    }
    numbers = ", ".join(f"{name.replace('_', ' ')} {value:.1%}" for name, value in shown.items())
    word = "finished" if finished else f"of {steps}"
    return (
        f"{order.folder}: step {last['step']} ({word}), length {last['length']}, {numbers}, "
        f"{last['seconds'] / 60:.0f} minutes"
    ), finished


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, in its order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(queues: Sequence[str]) -> int:
    records = {each["name"]: each for each in read_records(RECORDS)} if RECORDS.is_file() else {}
    try:
        orders = [order for queue in queues for order in read_queue(Path(queue))]
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    for order in orders:
        line, finished = state(order)
        print(line)
        if finished:
            made = record(order)
            records[made["name"]] = made
    if records:
        lines = [json.dumps(records[name]) + "\n" for name in sorted(records)]
        RECORDS.write_text("".join(lines), encoding="utf-8")
        for path in draw_all([records[name] for name in sorted(records)], FIGURES):
            print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
