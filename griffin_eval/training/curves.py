"""Figures of training runs."""

import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from griffin_eval.memory_figures import BLUE, GREEN, ORANGE
from griffin_eval.training.trainer import read_metrics

STYLES = {"griffin": (BLUE, "-"), "hawk": (ORANGE, "--"), "mqa": (GREEN, "-.")}


def draw(runs: Sequence[Path], stem: Path) -> Path:
    """Loss and accuracy on held-out rows against steps, a line a run.

    Args:
        runs: folders of runs.
        stem: path of the figure without its ending; a PNG and an SVG are written.

    Returns:
        The path of the PNG.
    """
    figure = Figure(figsize=(8, 3), layout="constrained")
    quantities = {"test_loss": "held-out loss, nats", "accuracy": "held-out accuracy"}
    labelled = set()
    for run in runs:
        model = json.loads((run / "run.json").read_text())["model"]
        lines = read_metrics(run / "metrics.jsonl")
        color, dashes = STYLES[model]
        label = None if model in labelled else model
        labelled.add(model)
        for number, quantity in enumerate(quantities):
            axes = (
                figure.axes[number]
                if len(figure.axes) > number
                else figure.add_subplot(1, 2, number + 1)
            )
            axes.plot(
                [line["step"] for line in lines],
                [line[quantity] for line in lines],
                dashes,
                color=color,
                label=label,
            )
    for axes, (quantity, title) in zip(figure.axes, quantities.items(), strict=True):
        axes.set_xlabel("step")
        axes.set_ylabel(title)
        if quantity == "accuracy":
            axes.set_ylim(-0.02, 1.02)
        axes.legend(frameon=False)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "griffin-eval"}):
        figure.savefig(f"{stem}.svg", metadata={"Date": None})
        figure.savefig(f"{stem}.png", dpi=160)
    return Path(f"{stem}.png")
