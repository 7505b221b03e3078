"""Quantities as curves with an interval for each run, and as marks where x is no number."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from griffin_eval.drawing import (
    COLORS,
    GRAY,
    LIGHT_GRAY,
    LINE_WIDTH,
    MARKER_SIZE,
    MARKERS,
    MAX_BANDS,
    SMALL_SIZE,
    Files,
    draw_band,
    draw_line,
    panels,
)
from griffin_eval.report.charts import Chart, curves_of, over_x, points_of, save_chart, show_value
from griffin_eval.report.estimates import is_share
from griffin_eval.report.heatmaps import AT_A_DEPTH
from griffin_eval.report.labels import (
    TOKENS,
    at_x,
    bounded,
    chart_title,
    exact_number,
    interval_note,
    short_number,
    task_words,
    x_label,
    y_label,
)
from griffin_eval.report.results import Point, Run, differing, without_step

LONG_NAME = 20  # letters above which a mark's name is in the legend
Placed = list[tuple[float, Point]]  # points, each with its place on the horizontal axis

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
    """Vertical lines of charts over tokens; None for no line.

    Attributes:
        visible_keys: Tokens of the local attention window, if all runs with a window agree.
        train_length: Tokens of a training sequence.
        window: Name of the line at ``visible_keys``.
    """

    visible_keys: int | None
    train_length: int | None
    window: str = "window"


def draw_curves(runs: list[Run], files: Files, marks: Marks) -> Iterable[Chart]:
    """Draw a chart for each quantity over its own axis, and one for its named cases."""
    for task, quantity in curves_of(runs):
        if quantity in CONTROLS.get(task, ()) or AT_A_DEPTH.fullmatch(quantity):
            continue
        points = [points_of(run, task, quantity) for run in runs]
        numbers = [point for own in points for _, point in over_x(own)]
        title = chart_title(runs, task, quantity)
        if len({point.x for point in numbers}) > 1:
            figure = curve_figure(runs, points, task, quantity, marks)
            note = _note(len(figure.axes), numbers)
            yield save_chart(figure, files, f"{task}_{quantity}", title, note)
        cases = [[point for point in own if isinstance(point.x, str)] for own in points]
        if any(cases):
            figure = _cases_figure(runs, cases, quantity)
            windows = all(str(point.x).endswith("_window") for own in cases for point in own)
            what = "inside and outside the attention window" if windows else "by case"
            title = f"{title.rpartition(' by ')[0]} {what}"
            note = interval_note((point for own in cases for point in own), "Bars")
            yield save_chart(figure, files, f"{task}_{quantity}_by_case", title, note)


def curve_figure(
    runs: list[Run], points: list[list[Point]], task: str, quantity: str, marks: Marks
) -> Figure:
    """Return a figure of one quantity of one task, with a line for each run."""
    lines = {r.label: over_x(own) for r, own in zip(runs, points, strict=True) if over_x(own)}
    figure, drawn = _lines_figure(lines, quantity)
    for axes in drawn:
        _draw_chance(axes, runs, task, quantity)
        axes.set_xlabel(x_label(runs, task, quantity))
        _scale_x(axes, [x for own in lines.values() for x, _ in own])
        if axes.get_xlabel().endswith(TOKENS):
            long = len(marks.window) > LONG_NAME
            _draw_marks(axes, marks, in_legend=len(drawn) > 1 or long)
    return figure


def draw_over_steps(runs: list[Run], files: Files) -> Iterable[Chart]:
    """Draw every quantity over the training step, for runs that are steps of one training."""
    trainings = trainings_of(runs)
    measured = dict.fromkeys(
        (p.task, p.quantity, p.x) for own in trainings.values() for run in own for p in run.points
    )
    for task, quantity in dict.fromkeys((task, quantity) for task, quantity, _ in measured):
        lines: dict[str, Placed] = {}
        for name, own in trainings.items():
            for x in (x for t, q, x in measured if (t, q) == (task, quantity)):
                points = [
                    (float(run.step or 0), point)
                    for run in own
                    for point in points_of(run, task, quantity)
                    if point.x == x
                ]
                words = (name, at_x(runs, task, quantity, x))
                if points:
                    lines[", ".join(word for word in words if word)] = points
        if not lines:
            continue
        figure, drawn = _lines_figure(lines, quantity)
        for axes in drawn:
            axes.set_xlabel("training step")
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        note = _note(len(drawn), [point for own in lines.values() for _, point in own])
        title = chart_title(runs, task, quantity)
        title = f"{title}," if "_by_" in quantity else title.rpartition(" by ")[0]
        name = f"{task}_{quantity}_over_steps"
        yield save_chart(figure, files, name, f"{title} during training", note)


def draw_controls(runs: list[Run], files: Files) -> Iterable[Chart]:
    """Draw a chart for each task of `CONTROLS`, with a panel a run and a line a quantity."""
    for task, names in CONTROLS.items():
        shown = [run for run in runs if any(points_of(run, task, name) for name in names)]
        if not shown:
            continue
        figure, drawn = panels(len(shown), share_y=True)
        for run, axes in zip(shown, drawn, strict=True):
            xs: list[float] = []
            for index, (quantity, label) in enumerate(names.items()):
                points = over_x(points_of(run, task, quantity))
                xs += [x for x, _ in points]
                if points:
                    _line(axes, label, points, index, band=len(names) <= MAX_BANDS)
            axes.axhline(0, color=GRAY, linewidth=1)
            if len(shown) > 1:
                axes.set_title(run.label, fontsize=SMALL_SIZE)
            axes.set_xlabel(x_label(runs, task, ""))
            _scale_x(axes, xs)
            if axes is drawn[0]:
                axes.set_ylabel(y_label("nats_difference"))
        measured = [p for run in shown for name in names for p in points_of(run, task, name)]
        if len(names) > MAX_BANDS:  # without bands
            measured = [point._replace(low=None) for point in measured]
        note = interval_note(measured, "Bands")
        title = f"{task_words(task)}: what the loss depends on"
        yield save_chart(figure, files, controls_name(task), title, note)


def controls_name(task: str) -> str:
    """Return the name of the chart of a task of `CONTROLS`."""
    return f"{task}_controls"


def _lines_figure(lines: dict[str, Placed], quantity: str) -> tuple[Figure, list[Axes]]:
    """Return a figure of lines and its panels: one panel, or with more than `MAX_BANDS` lines a
    panel for each, in which the others are gray."""
    if len(lines) <= MAX_BANDS:
        figure, drawn = panels(1)
        for index, (label, points) in enumerate(lines.items()):
            _line(drawn[0], label if len(lines) > 1 else "", points, index)
    else:
        figure, drawn = panels(len(lines), share_y=True)
        for axes, (label, points) in zip(drawn, lines.items(), strict=True):
            for others in lines.values():
                if others is not points:
                    axes.plot(*_values(others), color=LIGHT_GRAY, linewidth=1, zorder=1)
            _line(axes, "", points, 0)
            axes.set_title(label, fontsize=SMALL_SIZE)
    for axes in drawn:
        if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axes.set_ylabel(y_label(quantity))
        if is_share(quantity):
            axes.set_ylim(-0.03, 1.03)
    return figure, drawn


def _note(panels_drawn: int, points: list[Point]) -> str:
    note = interval_note(points, "Bands")
    return f"{note}; gray: the lines of the other panels" if panels_drawn > 1 else note


def _cases_figure(runs: list[Run], points: list[list[Point]], quantity: str) -> Figure:
    """Return a figure with a row for each named case, with a mark and an interval for each run."""
    names = list(dict.fromkeys(str(point.x) for own in points for point in own))
    shown = [
        (index, run, own) for index, (run, own) in enumerate(zip(runs, points, strict=True)) if own
    ]
    figure, (axes,) = panels(1, height=max(2.2, 1.6 + 0.28 * len(names) * len(shown)))
    for place, (index, run, own) in enumerate(shown):
        offset = (place - (len(shown) - 1) / 2) * 0.7 / len(shown)
        color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
        for number, point in enumerate(own):
            y = names.index(str(point.x)) + offset
            label = run.label if number == 0 and len(shown) > 1 else None
            axes.plot(
                point.value, y, label=label, color=color, marker=marker, ls="", ms=MARKER_SIZE
            )
            if point.low is not None and point.high is not None:
                axes.plot([point.low, point.high], [y, y], color=color, linewidth=LINE_WIDTH)
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)  # the first case is the upper row
    axes.set_xlabel(y_label(quantity))
    if is_share(quantity):
        axes.set_xlim(-0.03, 1.03)
    return figure


def trainings_of(runs: list[Run]) -> dict[str, list[Run]]:
    """Return the runs of each training with more than one step, by a name that tells it apart."""
    trainings: dict[str, list[Run]] = {}
    steps = [run for run in runs if run.step is not None]
    for run, name in zip(steps, differing([without_step(run) for run in steps]), strict=True):
        trainings.setdefault(name, []).append(run)
    named = {name: own for name, own in trainings.items() if len({r.step for r in own}) > 1}
    return named if len(trainings) > 1 else dict(zip([""], named.values(), strict=False))


def _line(axes: Axes, label: str, points: Placed, index: int, *, band: bool = True) -> None:
    """Draw a line through points, with the style number ``index`` and a band for intervals."""
    points = sorted(points, key=lambda point: point[0])
    draw_line(axes, *_values(points), index, label or None)
    for place, point in points:
        value = f"{short_number(place)}: {bounded(point.value, point.low, point.high)}"
        show_value(axes, place, float(point.value), f"{label}, {value}" if label else value)
    bands = [
        (x, point.low, point.high)
        for x, point in points
        if isinstance(point.low, int | float) and isinstance(point.high, int | float)
    ]
    if bands and band:
        x, low, high = zip(*bands, strict=True)
        draw_band(axes, x, low, high, index)


def _values(points: Placed) -> tuple[list[float], list[float]]:
    points = sorted(points, key=lambda point: point[0])
    return [x for x, _ in points], [float(point.value) for _, point in points]


def _draw_chance(axes: Axes, runs: list[Run], task: str, quantity: str) -> None:
    """Draw a line at the score of guessing, if the task states it for the quantity or each x."""
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


def _draw_marks(axes: Axes, marks: Marks, *, in_legend: bool) -> None:
    """Draw vertical lines at the marks within the axis, with names above or in the legend."""
    low, high = axes.get_xlim()
    for x, name, side, dashes in (
        (marks.visible_keys, f"{marks.window} ", "right", (0, (4, 3))),
        (marks.train_length, " training length", "left", (0, (1, 2))),
    ):
        if x is None or not low <= x <= high:
            continue
        label = name.strip() if in_legend else None
        axes.axvline(x, color=GRAY, linewidth=1, linestyle=dashes, label=label)
        if in_legend:
            continue
        above = axes.get_xaxis_transform()
        axes.text(x, 1.01, name, transform=above, ha=side, fontsize=SMALL_SIZE, color="#555555")


def _scale_x(axes: Axes, xs: Sequence[float]) -> None:
    """Scale a labelled horizontal axis: linear in per cent, otherwise logarithmic if all points
    are above zero. Up to twelve points have a tick each."""
    ticks = sorted(set(xs))
    if not axes.get_xlabel().endswith("%") and ticks[0] > 0:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_number(x)))
    if len(ticks) <= 12:
        axes.set_xticks(ticks)
    axes.xaxis.set_minor_locator(NullLocator())
