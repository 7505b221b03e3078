"""What a report says first: a sentence, and where there is one a figure, for each question."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from griffin_eval.drawing import BLUE, GRAY, panels
from griffin_eval.report.charts import (
    Chart,
    over_x,
    points_of,
    save_chart,
    show_value,
    width_of,
)
from griffin_eval.report.curves import controls_name
from griffin_eval.report.labels import TOKENS, bounded, exact_number, x_label
from griffin_eval.report.paired import Difference, each_item_once
from griffin_eval.report.results import Point, Run
from griffin_eval.report.verdicts import Verdict

# Tasks that ask for something from far back, the most telling first, and the share that is right.
MEMORY = {
    "griffin_phonebook": "exact_match",
    "griffin_passkey": "accuracy",
    "griffin_induction_heads": "accuracy",
    "griffin_selective_copying": "token_accuracy",
}
EXTRAPOLATION = "griffin_extrapolation", "nats_difference"
ENOUGH = 0.5  # share of right answers with which a length counts as remembered
MOST_RUNS = 4  # that a sentence names
MOST_ROWS = 8  # of differences between the frameworks, which mean little


class Answer(NamedTuple):
    """An answer to a question about the runs.

    Attributes:
        question: for people.
        sentence: what the runs say.
        chart: that shows it, None if there is no curve.
    """

    question: str
    sentence: str
    chart: Chart | None


def answers(
    runs: Sequence[Run],
    charts: Sequence[Chart],
    compared: Sequence[Difference],
    judged: Sequence[Verdict],
    folder: Path,
    train_length: int | None,
) -> list[Answer]:
    """The answers that the runs have; a question that none of their tasks asks is left out.

    Args:
        compared: the runs item by item.
        judged: the last run judged by the first.
        folder: for further charts.
        train_length: tokens of a training sequence, None if unknown.
    """
    found = [
        _changed(judged, folder),
        _remembers(runs, charts),
        _extrapolates(runs, charts, train_length),
        _agree(runs, compared, folder),
    ]
    return [answer for answer in found if answer is not None]


def _changed(judged: Sequence[Verdict], folder: Path) -> Answer | None:
    if not judged:
        return None
    parts = []
    for verdict in ("worse", "better"):
        own = [one for one in judged if one.verdict == verdict]
        named = ", ".join(f"{one.task} ({one.metric} {one.mean:+.3g})" for one in own)
        parts.append(f"{_count(len(own), 'task')} {verdict}" + f": {named}" * bool(own))
    same = [one for one in judged if one.verdict == "no difference"]
    parts.append(f"{_count(len(same), 'task')} without a difference")
    sentence = "; ".join(parts)
    seen = [v.detectable for v in same if math.isfinite(v.detectable)]
    if seen:
        low, high = min(seen), max(seen)
        sentence += f", where one of {low:.2g}" + f" to {high:.2g}" * (high > low)
        sentence += " would have been seen"
    if len(seen) < len(same):
        sentence += f"; {_count(len(same) - len(seen), 'task')} too small to see any"
    rows = [
        (f"{v.task}: {v.metric}", v.mean, -v.detectable, v.detectable)
        for v in judged
        if math.isfinite(v.detectable)
    ]
    title = "Difference from the earlier run, and in gray what could not have been seen"
    chart = _differences_chart(rows, folder, "changes", title, around_zero=True) if rows else None
    return Answer("What changed against the other run?", f"{sentence}.", chart)


def _remembers(runs: Sequence[Run], charts: Sequence[Chart]) -> Answer | None:
    task, curves = _memory_curves(runs)
    if not curves:
        return None
    unit = TOKENS if x_label(list(runs), task, MEMORY[task]).endswith(TOKENS) else "entries"
    sentence = _of_runs((run.label, _reach(points, unit)) for run, points in curves)
    chart = _chart(charts, f"{task}_{MEMORY[task]}")
    return Answer("How far does it remember?", f"{task}: {sentence}.", chart)


def _reach(points: list[tuple[float, Point]], unit: str) -> str:
    """How far at least `ENOUGH` of the answers are right, without a gap before."""
    reached = None
    for x, point in points:
        if float(point.value) < ENOUGH:
            break
        reached = x, point
    if reached is None:
        x, point = points[0]
        return f"not half of the answers are right even at {exact_number(x)} {unit}{_value(point)}"
    x, point = reached
    most = ", the longest that was asked" * (x == points[-1][0])
    return (
        f"at least half of the answers are right up to {exact_number(x)} {unit}"
        f"{most}{_value(point)}"
    )


def _extrapolates(
    runs: Sequence[Run], charts: Sequence[Chart], train_length: int | None
) -> Answer | None:
    question = "Does it extrapolate?"
    task, quantity = EXTRAPOLATION
    curves = _curves(runs, task, quantity)
    if curves:
        sentence = _of_runs((run.label, _gain(*points[-1])) for run, points in curves)
        return Answer(question, f"{task}: {sentence}.", _chart(charts, controls_name(task)))
    task, curves = _memory_curves(runs)
    if train_length is None or not curves:
        return None
    if not x_label(list(runs), task, MEMORY[task]).endswith(TOKENS):
        return None
    told = []
    for run, points in curves:
        within = [each for each in points if each[0] <= train_length]
        if not within or points[-1][0] <= train_length:
            continue
        (x, inside), (far, outside) = within[-1], points[-1]
        told.append(
            (
                run.label,
                f"{inside.value:.1%} of the answers are right at {exact_number(x)} tokens, within "
                f"the training length, and {outside.value:.1%} at {exact_number(far)}",
            )
        )
    if not told:
        return None
    chart = _chart(charts, f"{task}_{MEMORY[task]}")
    return Answer(question, f"{task}: {_of_runs(told)}.", chart)


def _gain(multiple: float, point: Point) -> str:
    value = float(point.value)
    certain = isinstance(point.low, int | float) and isinstance(point.high, int | float)
    if certain and float(point.low or 0) <= 0 <= float(point.high or 0):
        verdict = "loses and gains nothing that can be told from chance"
    else:
        verdict = "loses" if value > 0 else "gains"
    return (
        f"with {exact_number(multiple)} times the context of its training it {verdict} "
        f"({_said(point)}, nats per token)"
    )


def _agree(runs: Sequence[Run], compared: Sequence[Difference], folder: Path) -> Answer | None:
    by_label = {run.label: run for run in runs}
    own = [d for d in compared if _same_model(by_label[d.run], by_label[d.baseline])]
    if not own:
        return None
    frameworks = {_framework(by_label[label]) for d in own for label in (d.run, d.baseline)}
    largest = max(own, key=lambda d: d.largest)
    flips, binary = _flips(own)
    sentence = f"{' and '.join(sorted(frameworks))}: "
    if binary:
        flipped = f"{flips} of {binary} right or wrong answers differ"
        sentence += f"none of {binary} right or wrong answers differs" if not flips else flipped
        sentence += "; "
    sentence += (
        f"the largest difference of an item is {largest.largest:.2g} ({largest.metric} of "
        f"{largest.task})"
    )
    rows = [
        (f"{d.task}: {d.metric}", d.mean, d.low, d.high)
        for d in sorted(own, key=lambda d: -d.largest)
        if d.low is not None and d.high is not None and d.largest
    ][:MOST_ROWS]
    title = "The largest differences between the frameworks, in the mean over items"
    chart = _differences_chart(rows, folder, "frameworks", title) if rows else None
    return Answer("Do the frameworks agree?", f"{sentence}.", chart)


def _flips(compared: Sequence[Difference]) -> tuple[int, int]:
    """The number of right or wrong answers that differ, and of all of them.

    An answer counts once, however many metrics it has: of each task by the one that differs most.
    """
    tasks: dict[tuple[str, str], dict[str, Difference]] = {}
    for d in compared:
        if d.gained is not None:
            tasks.setdefault((d.task, d.run), {})[d.metric] = d
    flips = items = 0
    for of_task in tasks.values():
        counted = []
        for quantity in dict.fromkeys(metric.partition("@")[0] for metric in of_task):
            own = [of_task[metric] for metric in each_item_once(quantity, of_task)]
            differing = sum((d.gained or 0) + (d.lost or 0) for d in own)
            counted.append((differing, sum(d.items for d in own)))
        flips, items = (a + b for a, b in zip((flips, items), max(counted), strict=True))
    return flips, items


def _same_model(one: Run, other: Run) -> bool:
    """Whether two runs are of the same weights and dtype, in different frameworks."""
    keys = "griffin_weights_sha256", "model_dtype"
    same = all(one.config.get(key) == other.config.get(key) is not None for key in keys)
    return same and _framework(one) != _framework(other)


def _framework(run: Run) -> str:
    return str(run.config.get("model_framework"))


def _memory_curves(runs: Sequence[Run]) -> tuple[str, list[tuple[Run, list[tuple[float, Point]]]]]:
    """The first task of `MEMORY` that the runs have, and the curve of each that has it."""
    for task, quantity in MEMORY.items():
        if curves := _curves(runs, task, quantity):
            return task, curves
    return "", []


def _curves(
    runs: Sequence[Run], task: str, quantity: str
) -> list[tuple[Run, list[tuple[float, Point]]]]:
    each = ((run, over_x(points_of(run, task, quantity))) for run in runs)
    return [(run, sorted(points, key=lambda p: p[0])) for run, points in each if points]


def _of_runs(told: Iterable[tuple[str, str]]) -> str:
    """A sentence about each run; the same about several is said once."""
    by_text: dict[str, list[str]] = {}
    for label, text in told:
        by_text.setdefault(text, []).append(label)
    if len(by_text) == 1:
        return next(iter(by_text))
    parts = [f"{' and '.join(labels)}: {text}" for text, labels in by_text.items()]
    more = len(parts) - MOST_RUNS
    return "; ".join(parts[:MOST_RUNS]) + (f"; and {more} more below" if more > 0 else "")


def _value(point: Point) -> str:
    return f" ({_said(point)})"


def _said(point: Point) -> str:
    value = f"{float(point.value):.3g}"
    if not isinstance(point.low, int | float) or not isinstance(point.high, int | float):
        return value
    return f"{value}, interval {point.low:.2g} to {point.high:.2g}"


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'s' * (number != 1)}"


def _chart(charts: Sequence[Chart], name: str) -> Chart | None:
    return next((chart for chart in charts if chart.name == name), None)


def _differences_chart(
    rows: list[tuple[str, float, float, float]],
    folder: Path,
    name: str,
    title: str,
    around_zero: bool = False,
) -> Chart:
    """A row for each difference, with a bar from low to high.

    Args:
        rows: label, difference, low and high.
        around_zero: whether the bars are of what could not have been seen, and not intervals.
    """
    figure, (axes,) = panels(1, width_of(1))
    figure.set_figheight(max(2.2, 1.2 + 0.3 * len(rows)))
    axes.axvline(0, color=GRAY, linewidth=1)
    for place, (label, value, low, high) in enumerate(rows):
        color = GRAY if around_zero else BLUE
        axes.plot([low, high], [place, place], color=color, linewidth=5 if around_zero else 2)
        axes.plot(value, place, marker="o", color=BLUE)
        show_value(axes, value, place, f"{label}: {bounded(value, low, high)}")
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("difference")
    return save_chart(figure, folder, name, title)
