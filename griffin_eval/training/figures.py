"""The curves of training runs."""

import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from griffin_eval.drawing import BLACK, BLUE, GREEN, VERMILION, save
from griffin_eval.training.run_folder import METRICS_FILE, RUN_FILE, read_metrics

STYLES = {
    "griffin": (BLUE, "-"),
    "hawk": (VERMILION, "--"),
    "mqa": (GREEN, "-."),
    "local_mqa": (BLACK, ":"),
}


def draw(runs: Sequence[Path], stem: Path) -> Path:
    """Loss and accuracy on the held-out batches over the training step, one line for each run.

    Args:
        runs: folders of runs.
        stem: path of the figure without its ending; a PNG and an SVG are written.

    Returns:
        The path of the PNG.
    """
    figure = Figure(figsize=(8, 3), layout="constrained")
    quantities = {"test_loss": "held-out loss, nats", "accuracy": "held-out accuracy"}
    panels = dict(zip(quantities, figure.subplots(1, 2), strict=True))
    labelled = set()
    for run in runs:
        model = json.loads((run / RUN_FILE).read_text())["model"]
        lines = read_metrics(run / METRICS_FILE)
        color, dashes = STYLES[model]
        label = None if model in labelled else model
        labelled.add(model)
        steps = [line["step"] for line in lines]
        for quantity, axes in panels.items():
            values = [line[quantity] for line in lines]
            axes.plot(steps, values, dashes, color=color, label=label)
    for quantity, axes in panels.items():
        axes.set_xlabel("step")
        axes.set_ylabel(quantities[quantity])
        axes.legend(frameon=False)
    panels["accuracy"].set_ylim(-0.02, 1.02)
    return save(figure, stem.parent, stem.name)
