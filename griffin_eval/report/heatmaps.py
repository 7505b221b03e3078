"""Heat maps of quantities over depth and length, one for each run."""

import re
from collections.abc import Iterable

from matplotlib.axes import Axes

from griffin_eval.drawing import SMALL_SIZE, Files, panels
from griffin_eval.report.charts import Chart, curves_of, over_x, points_of, save_chart
from griffin_eval.report.labels import interval_note, short_number, task_words, x_label, y_label
from griffin_eval.report.results import Point, Run

AT_A_DEPTH = re.compile(r"(.+)_depth_(\d+)")  # such as accuracy_depth_50


def draw_heatmaps(runs: list[Run], files: Files) -> Iterable[Chart]:
    """Draw a chart for each quantity at depths, with a panel for each run that has it."""
    depths_of: dict[tuple[str, str], dict[int, str]] = {}
    for task, quantity in curves_of(runs):
        if match := AT_A_DEPTH.fullmatch(quantity):
            depths_of.setdefault((task, match[1]), {})[int(match[2])] = quantity
    for (task, name), quantities in depths_of.items():
        quantities = dict(sorted(quantities.items()))
        shown = [run for run in runs if any(points_of(run, task, q) for q in quantities.values())]
        figure, drawn = panels(len(shown), height=2.8, share_y=True)
        lengths = sorted(
            {x for run in shown for q in quantities.values() for x, _ in _at(run, task, q)}
        )
        for run, axes in zip(shown, drawn, strict=True):
            _draw_map(axes, run, task, quantities, lengths)
            if len(runs) > 1:
                axes.set_title(run.label, fontsize=SMALL_SIZE)
        drawn[0].set_ylabel("depth")
        figure.colorbar(drawn[0].images[0], ax=drawn, label=y_label(name))
        measured = [p for run in shown for q in quantities.values() for _, p in _at(run, task, q)]
        counts = interval_note((point._replace(low=None) for point in measured), "")
        title = f"{task_words(task)}: {y_label(name)} by depth and length"
        yield save_chart(figure, files, f"{task}_{name}_by_depth", title, counts)


def _at(run: Run, task: str, quantity: str) -> list[tuple[float, Point]]:
    return over_x(points_of(run, task, quantity))


def _draw_map(
    axes: Axes, run: Run, task: str, quantities: dict[int, str], lengths: list[float]
) -> None:
    """Draw a row for each depth and a column for each length; unmeasured cells stay empty."""
    grid = [[float("nan")] * len(lengths) for _ in quantities]
    for row, quantity in enumerate(quantities.values()):
        for x, point in _at(run, task, quantity):
            grid[row][lengths.index(x)] = float(point.value)
    axes.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            color = "white" if value < 0.6 else "black"
            text = "" if value != value else f"{value:.2g}"
            axes.text(column, row, text, ha="center", va="center", fontsize=SMALL_SIZE, color=color)
    axes.grid(False)
    axes.set_xticks(range(len(lengths)), [short_number(x) for x in lengths])
    axes.set_yticks(range(len(quantities)), [f"{depth}%" for depth in quantities])
    axes.set_xlabel(x_label([run], task, ""))
