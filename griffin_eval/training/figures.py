"""The curves of training runs."""

import json
from collections.abc import Sequence
from pathlib import Path

from griffin_eval.drawing import (
    BLACK,
    BLUE,
    GREEN,
    LINE_WIDTH,
    MARKER_SIZE,
    VERMILION,
    finish,
    panels,
    save,
)
from griffin_eval.training.run_folder import METRICS_FILE, RUN_FILE, read_metrics

STYLES = {
    "griffin": (BLUE, "-"),
    "hawk": (VERMILION, "--"),
    "mqa": (GREEN, "-."),
    "local_mqa": (BLACK, ":"),
}
MODEL_NAMES = {
    "griffin": "Griffin",
    "hawk": "Hawk",
    "mqa": "MQA Transformer",
    "local_mqa": "local MQA Transformer",
}
FEW_POINTS = 12  # largest number of points that get markers


def draw(runs: Sequence[Path], stem: Path) -> Path:
    """Draw loss and accuracy on held-out batches over the training step, with a line for each run.

    ``stem`` is the path of the figure without its ending. Write a PNG and an SVG, and return the
    path of the PNG.
    """
    figure, drawn = panels(2, 8.0, height=3.4)
    quantities = {"test_loss": "held-out loss, nats per symbol", "accuracy": "held-out accuracy"}
    labelled: set[str] = set()
    for run in runs:
        model = json.loads((run / RUN_FILE).read_text())["model"]
        lines = read_metrics(run / METRICS_FILE)
        color, dashes = STYLES[model]
        label = None if model in labelled else MODEL_NAMES[model]
        labelled.add(model)
        steps = [line["step"] for line in lines]
        marker = "o" if len(lines) <= FEW_POINTS else ""
        for quantity, axes in zip(quantities, drawn, strict=True):
            axes.plot(
                steps,
                [line[quantity] for line in lines],
                dashes,
                color=color,
                label=label,
                marker=marker,
                linewidth=LINE_WIDTH,
                markersize=MARKER_SIZE,
            )
    for label, axes in zip(quantities.values(), drawn, strict=True):
        axes.set_xlabel("training step")
        axes.set_ylabel(label)
    drawn[1].set_ylim(-0.02, 1.02)
    finish(figure, drawn, stem.parent, "Loss and accuracy during training")
    return save(figure, stem.parent, stem.name)
