"""What the kinds of figures share: the chosen points, and a chart as files and as a picture."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from griffin_eval.drawing import save
from griffin_eval.report.results import Point, Run

PANEL_WIDTH, LEAST_WIDTH = 3.6, 6.4  # inches
VALUE = "value: "  # begins the name of what shows a value when the pointer is over it


class Chart(NamedTuple):
    """A figure of a report.

    Attributes:
        name: of its two files, without the endings .png and .svg.
        title: one line that says what it shows.
        svg: the ``<svg>`` element, for an HTML page.
    """

    name: str
    title: str
    svg: str


def save_chart(figure: Figure, folder: Path, name: str, title: str) -> Chart:
    """Writes a figure as PNG and SVG under a name that any file system takes."""
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    figure.suptitle(title, fontsize=10)
    file = save(figure, folder, name, outlined_text=True).with_suffix(".svg")
    svg = re.sub(f'<g id="{VALUE}([^"]*)">', r"<g><title>\1</title>", file.read_text("utf-8"))
    return Chart(name, title, svg[svg.index("<svg") :])


def show_value(axes: Axes, x: float, y: float, text: str) -> None:
    """Lets an HTML page show a text when the pointer is over a point."""
    axes.plot([x], [y], marker="o", markersize=12, alpha=0, linestyle="", gid=VALUE + text)


def width_of(panels: int) -> float:
    """Width of a figure with one panel for each run, in inches."""
    return max(LEAST_WIDTH, PANEL_WIDTH * panels)


def curves_of(runs: Iterable[Run]) -> list[tuple[str, str]]:
    """Tasks and quantities of which some run has points of a curve, in their order."""
    points = (point for run in runs for point in run.points if point.x is not None)
    return list(dict.fromkeys((point.task, point.quantity) for point in points))


def points_of(run: Run, task: str, quantity: str) -> list[Point]:
    """The points of one quantity whose value is a number, not a bound such as ``>200``."""
    return [
        point
        for point in run.points
        if (point.task, point.quantity) == (task, quantity) and isinstance(point.value, int | float)
    ]


def over_x(points: Iterable[Point]) -> list[tuple[float, Point]]:
    """The points at a number, each with that number."""
    return [(point.x, point) for point in points if isinstance(point.x, float)]
