"""Quantities that are measured at depths and lengths, as a map for each run."""

import re
from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes

from griffin_eval.drawing import panels
from griffin_eval.report.charts import Chart, curves_of, over_x, points_of, save_chart, width_of
from griffin_eval.report.labels import X_LABELS, short_number, y_label
from griffin_eval.report.results import Point, Run

AT_A_DEPTH = re.compile(r"(.+)_depth_(\d+)")  # such as accuracy_depth_50


def draw_heatmaps(runs: list[Run], folder: Path) -> Iterable[Chart]:
    """One chart for each quantity at depths, with a panel for each run that has it.

    Args:
        folder: for the files of the charts.
    """
    depths_of: dict[tuple[str, str], dict[int, str]] = {}
    for task, quantity in curves_of(runs):
        if match := AT_A_DEPTH.fullmatch(quantity):
            depths_of.setdefault((task, match[1]), {})[int(match[2])] = quantity
    for (task, name), quantities in depths_of.items():
        quantities = dict(sorted(quantities.items()))
        shallowest = next(iter(quantities.values()))
        shown = [run for run in runs if points_of(run, task, shallowest)]
        figure, drawn = panels(len(shown), width_of(len(shown)), share_y=True)
        lengths = sorted(
            {x for run in shown for q in quantities.values() for x, _ in _at(run, task, q)}
        )
        for run, axes in zip(shown, drawn, strict=True):
            _draw_map(axes, run, task, quantities, lengths)
        drawn[0].set_ylabel("depth")
        figure.colorbar(drawn[0].images[0], ax=drawn, label=y_label(name))
        yield save_chart(figure, folder, f"{task}_{name}_by_depth", f"{task}: {name}, by depth")


def _at(run: Run, task: str, quantity: str) -> list[tuple[float, Point]]:
    return over_x(points_of(run, task, quantity))


def _draw_map(
    axes: Axes, run: Run, task: str, quantities: dict[int, str], lengths: list[float]
) -> None:
    """A row for each depth, a column for each length; what was not measured stays empty."""
    grid = [[float("nan")] * len(lengths) for _ in quantities]
    for row, quantity in enumerate(quantities.values()):
        for x, point in _at(run, task, quantity):
            grid[row][lengths.index(x)] = float(point.value)
    axes.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            color = "white" if value < 0.6 else "black"
            text = "" if value != value else f"{value:.2g}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
    axes.grid(False)
    axes.set_xticks(range(len(lengths)), [short_number(x) for x in lengths])
    axes.set_yticks(range(len(quantities)), [f"{depth}%" for depth in quantities])
    axes.set_xlabel(X_LABELS.get(task, "length"))
    axes.set_title(run.label, fontsize=9)
