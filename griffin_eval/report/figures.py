"""All figures of a report."""

from pathlib import Path

import matplotlib

from griffin_eval.report.charts import Chart
from griffin_eval.report.curves import Marks, draw_controls, draw_curves, draw_over_steps
from griffin_eval.report.heatmaps import draw_heatmaps
from griffin_eval.report.results import Run


def draw_all(runs: list[Run], folder: Path, train_length: int | None) -> list[Chart]:
    """Draws every curve that the runs have: over its own axis, and over training steps.

    Args:
        folder: for a PNG and an SVG of each; created if it does not exist.
        train_length: tokens of the models' training sequences, marked by a line; None if unknown.
    """
    known = {run.label: run.config.get("model_visible_keys") for run in runs}
    with_window = [label for label, keys in known.items() if keys]
    sizes = {known[label] for label in with_window}
    alone = len(with_window) == 1 < len(runs)
    window = f"{with_window[0]}'s window" if alone else "window"
    marks = Marks(sizes.pop() if len(sizes) == 1 else None, train_length, window)
    with matplotlib.rc_context({"text.parse_math": False}):  # names may hold a $
        return [
            *draw_controls(runs, folder),
            *draw_heatmaps(runs, folder),
            *draw_curves(runs, folder, marks),
            *draw_over_steps(runs, folder),
        ]
