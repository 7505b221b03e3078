"""Functions shared by all figures: selected points, and a chart as files and as SVG."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from griffin_eval.drawing import Files, finish, rendered, save
from griffin_eval.report.results import Point, Run

VALUE = "value: "  # prefix of the SVG id of a point's value, shown under the pointer


class Chart(NamedTuple):
    """A figure of a report.

    Attributes:
        name: Name of its files, without their endings.
        title: One line that says what it shows.
        svg: The ``<svg>`` element, for an HTML page.
        files: Comma-separated names of its files.
    """

    name: str
    title: str
    svg: str
    files: str = ""


def save_chart(figure: Figure, files: Files, name: str, title: str, note: str = "") -> Chart:
    """Write a figure with its title, legend and note under a portable file name."""
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    finish(figure, figure.axes, files, title, note)
    save(figure, files, name)
    text = rendered(figure, "svg", name).decode()
    svg = re.sub(f'<g id="{VALUE}([^"]*)">', r"<g><title>\1</title>", text)
    written = ", ".join(f"{name}.{ending}" for ending in files.formats)
    return Chart(name, title, svg[svg.index("<svg") :], written)


def show_value(axes: Axes, x: float, y: float, text: str) -> None:
    """Make an HTML page show a text when the pointer is over a point."""
    axes.plot([x], [y], marker="o", markersize=12, alpha=0, linestyle="", gid=VALUE + text)


def curves_of(runs: Iterable[Run]) -> list[tuple[str, str]]:
    """Return the tasks and quantities for which some run has a curve, in the runs' order."""
    points = (point for run in runs for point in run.points if point.x is not None)
    return list(dict.fromkeys((point.task, point.quantity) for point in points))


def points_of(run: Run, task: str, quantity: str) -> list[Point]:
    """Return the points of one quantity whose value is a number, not a bound such as ``>200``."""
    return [
        point
        for point in run.points
        if (point.task, point.quantity) == (task, quantity) and isinstance(point.value, int | float)
    ]


def over_x(points: Iterable[Point]) -> list[tuple[float, Point]]:
    """Return the points whose x is a number, each with this number."""
    return [(point.x, point) for point in points if isinstance(point.x, float)]
