"""Quantities as curves, one for each run with its interval, and as marks where x is no number."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from griffin_eval.drawing import COLORS, GRAY, panels
from griffin_eval.report.charts import (
    Chart,
    curves_of,
    over_x,
    points_of,
    save_chart,
    show_value,
    width_of,
)
from griffin_eval.report.heatmaps import AT_A_DEPTH
from griffin_eval.report.labels import (
    TOKENS,
    X_LABELS,
    bounded,
    exact_number,
    is_share,
    short_number,
    x_label,
    y_label,
)
from griffin_eval.report.results import Point, Run, differing, without_step

MARKERS = "osD^vPX"
LINES = ("-", "--", "-.", ":")

# Quantities that explain one another share a figure with a panel for each run.
CONTROLS = {
    "griffin_extrapolation": {
        "nats_difference": "longer context − training length",
        "reset_window": "reset one window before − longer context",
        "reset_train": "reset one training length before − longer context",
        "no_recurrent": "recurrent state zeroed − longer context",
        "no_attention": "attention window emptied − longer context",
    }
}


class Marks(NamedTuple):
    """Where curves over tokens have vertical lines; None for no line.

    Attributes:
        visible_keys: tokens of the local attention's window, if all runs that have one have the
            same.
        train_length: tokens of a training sequence.
        window: name of the line at ``visible_keys``.
    """

    visible_keys: int | None
    train_length: int | None
    window: str = "window"


def draw_curves(runs: list[Run], folder: Path, marks: Marks) -> Iterable[Chart]:
    """A chart for each quantity over its own axis, and one for its points at named cases.

    Args:
        folder: for the files of the charts.
        marks: vertical lines on axes of tokens.
    """
    for task, quantity in curves_of(runs):
        if quantity in CONTROLS.get(task, ()) or AT_A_DEPTH.fullmatch(quantity):
            continue
        points = [points_of(run, task, quantity) for run in runs]
        title = f"{task}: {quantity.replace('_', ' ')}"
        if len({x for own in points for x, _ in over_x(own)}) > 1:
            figure = curve_figure(runs, points, task, quantity, marks)
            yield save_chart(figure, folder, f"{task}_{quantity}", title)
        cases = [[point for point in own if isinstance(point.x, str)] for own in points]
        if any(cases):
            figure = _cases_figure(runs, cases, quantity)
            yield save_chart(figure, folder, f"{task}_{quantity}_by_case", f"{title}, by case")


def curve_figure(
    runs: list[Run], points: list[list[Point]], task: str, quantity: str, marks: Marks
) -> Figure:
    """One quantity of one task, a line for each run.

    Args:
        points: those of each run; they are drawn where x is a number.
        task, quantity: what the points measure.
        marks: vertical lines on axes of tokens.
    """
    figure, (axes,) = panels(1, width_of(1))
    for index, (run, own) in enumerate(zip(runs, points, strict=True)):
        if over_x(own):
            _line(axes, run.label, over_x(own), index)
    _draw_chance(axes, runs, task, quantity)
    axes.set_xlabel(x_label(runs, task, quantity))
    _scale_x(axes, [x for own in points for x, _ in over_x(own)])
    if axes.get_xlabel().endswith(TOKENS):
        _draw_marks(axes, marks)
    _finish(figure, axes, quantity)
    return figure


def draw_over_steps(runs: list[Run], folder: Path) -> Iterable[Chart]:
    """Every quantity over the training step, where runs are checkpoints of one training."""
    trainings = _trainings(runs)
    measured = dict.fromkeys(
        (p.task, p.quantity, p.x) for own in trainings.values() for run in own for p in run.points
    )
    for task, quantity in dict.fromkeys((task, quantity) for task, quantity, _ in measured):
        figure, (axes,) = panels(1, width_of(1))
        index = 0
        for name, own in trainings.items():
            for x in (x for t, q, x in measured if (t, q) == (task, quantity)):
                points = [
                    (float(run.step or 0), point)
                    for run in own
                    for point in points_of(run, task, quantity)
                    if point.x == x
                ]
                if points:
                    parts = (name, "" if x is None else f"at {short_number(x)}")
                    label = " ".join(part for part in parts if part)
                    _line(axes, label or quantity, points, index)
                    index += 1
        axes.set_xlabel("training step")
        _finish(figure, axes, quantity)
        title = f"{task}: {quantity.replace('_', ' ')} over training"
        yield save_chart(figure, folder, f"{task}_{quantity}_over_steps", title)


def draw_controls(runs: list[Run], folder: Path) -> Iterable[Chart]:
    """A chart for each task of `CONTROLS`, a panel for each run and a line for each quantity."""
    for task, names in CONTROLS.items():
        shown = [run for run in runs if any(points_of(run, task, name) for name in names)]
        if not shown:
            continue
        figure, drawn = panels(len(shown), width_of(len(shown)), share_y=True)
        for run, axes in zip(shown, drawn, strict=True):
            xs: list[float] = []
            for index, (quantity, label) in enumerate(names.items()):
                points = over_x(points_of(run, task, quantity))
                xs += [x for x, _ in points]
                if points:
                    _line(axes, label, points, index)
            axes.axhline(0, color=GRAY, linewidth=1)
            axes.set_title(run.label, fontsize=9)
            axes.set_xlabel(X_LABELS[task])
            _scale_x(axes, xs)
        drawn[0].set_ylabel(y_label(next(iter(names))))
        handles, labels = drawn[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", fontsize=8, frameon=False)
        yield save_chart(figure, folder, controls_name(task), f"{task}: what the loss depends on")


def controls_name(task: str) -> str:
    """The name of the chart of a task of `CONTROLS`."""
    return f"{task}_controls"


def _cases_figure(runs: list[Run], points: list[list[Point]], quantity: str) -> Figure:
    """Points at named cases: a row for each case, in it a mark and an interval for each run."""
    names = list(dict.fromkeys(str(point.x) for own in points for point in own))
    shown = [
        (index, run, own) for index, (run, own) in enumerate(zip(runs, points, strict=True)) if own
    ]
    figure, (axes,) = panels(1, width_of(1))
    figure.set_figheight(max(2.2, 1.4 + 0.28 * len(names) * len(shown)))
    for place, (index, run, own) in enumerate(shown):
        offset = (place - (len(shown) - 1) / 2) * 0.7 / len(shown)
        style = _style(index)
        color, marker = style["color"], style["marker"]
        for number, point in enumerate(own):
            y = names.index(str(point.x)) + offset
            label = run.label if number == 0 else None
            axes.plot(point.value, y, label=label, color=color, marker=marker, ls="")
            if point.low is not None and point.high is not None:
                axes.plot([point.low, point.high], [y, y], color=color, linewidth=1.6)
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first case is the upper row
    axes.set_xlabel(y_label(quantity))
    if is_share(quantity):
        axes.set_xlim(-0.03, 1.03)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def _trainings(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs of more than one step of a training, by what tells it from the others; "" if alone."""
    trainings: dict[str, list[Run]] = {}
    steps = [run for run in runs if run.step is not None]
    for run, name in zip(steps, differing([without_step(run) for run in steps]), strict=True):
        trainings.setdefault(name, []).append(run)
    named = {name: own for name, own in trainings.items() if len({r.step for r in own}) > 1}
    return named if len(trainings) > 1 else dict(zip([""], named.values(), strict=False))


def _line(axes: Axes, label: str, points: list[tuple[float, Point]], index: int) -> None:
    """A line through points, with a band where their intervals are known.

    Args:
        points: each with its place on the horizontal axis.
        index: number of the line in its panel, which gives it its style.
    """
    points = sorted(points, key=lambda each: each[0])
    x, y = [x for x, _ in points], [point.value for _, point in points]
    style = _style(index)
    width = max(3 - index, 1)  # so that a line under another one shows on both sides of it
    axes.plot(x, y, label=label, markersize=3 + width, linewidth=width, **style)  # type: ignore[arg-type]
    for place, point in points:
        value = f"{label}, {short_number(place)}: {bounded(point.value, point.low, point.high)}"
        show_value(axes, place, float(point.value), value)
    bands = [(x, p.low, p.high) for x, p in points if p.low is not None and p.high is not None]
    if bands:
        x, low, high = zip(*bands, strict=True)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _style(index: int) -> dict[str, str]:
    return {
        "color": COLORS[index % len(COLORS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINES[index // len(COLORS) % len(LINES)],
    }


def _draw_chance(axes: Axes, runs: list[Run], task: str, quantity: str) -> None:
    """A line at the score of guessing, if the task states it for the quantity or for each point."""
    for run in runs:
        chance = run.metadata.get(task, {}).get("chance")
        if not isinstance(chance, dict):
            continue
        xs = sorted({x for x, _ in over_x(points_of(run, task, quantity))})
        known = [chance.get(f"{quantity}@{exact_number(x)}", chance.get(quantity)) for x in xs]
        levels = [float(level) for level in known if isinstance(level, int | float)]
        if xs and len(levels) == len(xs):
            axes.plot(xs, levels, color=GRAY, linewidth=1, linestyle=":", label="chance")
            return


def _draw_marks(axes: Axes, marks: Marks) -> None:
    """Vertical lines at the marks that lie within the axis, each with its name above."""
    low, high = axes.get_xlim()
    for x, name, side in (
        (marks.visible_keys, f"{marks.window} ", "right"),
        (marks.train_length, " training length", "left"),
    ):
        if x is None or not low <= x <= high:
            continue
        axes.axvline(x, color=GRAY, linewidth=1, linestyle=(0, (4, 3)))
        above = axes.get_xaxis_transform()
        axes.text(x, 1.01, name, transform=above, ha=side, fontsize=8, color="#555555")


def _scale_x(axes: Axes, xs: Sequence[float]) -> None:
    """Scale a horizontal axis that has its label: linearly in per cent, else logarithmically where
    all points are above zero. Up to twelve points have a tick each."""
    ticks = sorted(set(xs))
    if not axes.get_xlabel().endswith("%") and ticks[0] > 0:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_number(x)))
    if len(ticks) <= 12:
        axes.set_xticks(ticks)
    axes.xaxis.set_minor_locator(NullLocator())


def _finish(figure: Figure, axes: Axes, quantity: str) -> None:
    """The vertical axis, and a legend: below the figure if it has more than six lines."""
    axes.set_ylabel(y_label(quantity))
    if is_share(quantity):
        axes.set_ylim(-0.03, 1.03)
    count = len(axes.get_legend_handles_labels()[1])
    if count > 6:
        figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    elif count:
        axes.legend(fontsize=8, frameon=False)
