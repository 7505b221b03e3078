"""Summary of a report: for each question a sentence, and a figure if there is one."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from matplotlib.ticker import FuncFormatter, MaxNLocator

from griffin_eval.drawing import BLUE, GRAY, LINE_WIDTH, MARKER_SIZE, Files, panels
from griffin_eval.report.charts import Chart, over_x, points_of, save_chart, show_value
from griffin_eval.report.curves import controls_name, trainings_of
from griffin_eval.report.labels import (
    TOKENS,
    at_x,
    bounded,
    exact_number,
    task_words,
    x_label,
    y_label,
)
from griffin_eval.report.paired import Difference, each_item_once
from griffin_eval.report.results import Point, Run
from griffin_eval.report.verdicts import Verdict

# Tasks about distant information, the most telling first, with their metric of right answers.
MEMORY = {
    "griffin_phonebook": "exact_match",
    "griffin_passkey": "accuracy",
    "griffin_association": "accuracy",
    "griffin_induction_heads": "accuracy",
    "griffin_selective_copying": "token_accuracy",
}
EXTRAPOLATION = "griffin_extrapolation", "nats_difference"
ENOUGH = 0.5  # share of right answers from which a length counts as remembered
MAX_RUNS = 4  # runs that a sentence names
MAX_ROWS = 8  # shown differences between the frameworks


class Answer(NamedTuple):
    """A question about the runs, the sentence that answers it, and its figure or None."""

    question: str
    sentence: str
    chart: Chart | None


def answers(
    runs: Sequence[Run],
    charts: Sequence[Chart],
    compared: Sequence[Difference],
    judged: Sequence[Verdict],
    files: Files,
    train_length: int | None,
) -> list[Answer]:
    """Return the answers that the runs contain; questions without a matching task are left out."""
    found = [
        _changed(judged, files),
        _learns(runs, charts),
        _remembers(runs, charts),
        _extrapolates(runs, charts, train_length),
        _agree(runs, compared, files),
    ]
    shown: set[str] = set()
    answered = []
    for answer in found:
        if answer is None:
            continue
        name = None if answer.chart is None else answer.chart.name
        answered.append(answer._replace(chart=None) if name in shown else answer)
        shown |= {name} if name else set()
    return answered


def _changed(judged: Sequence[Verdict], files: Files) -> Answer | None:
    if not judged:
        return None
    parts = []
    for verdict in ("worse", "better"):
        own = [one for one in judged if one.verdict == verdict]
        named = ", ".join(f"{one.task} ({one.metric} {one.mean:+.3g})" for one in own)
        parts.append(f"{_count(len(own), 'task')} {verdict}" + f": {named}" * bool(own))
    same = [one for one in judged if one.verdict == "no difference"]
    parts.append(f"{_count(len(same), 'task')} without a significant change")
    sentence = "; ".join(parts)
    seen = [v.detectable for v in same if math.isfinite(v.detectable)]
    if seen:
        low, high = min(seen), max(seen)
        sentence += f" (smallest detectable change: {low:.2g}"
        sentence += f" to {high:.2g})" if high > low else ")"
    if len(seen) < len(same):
        sentence += f"; {_count(len(same) - len(seen), 'task')} too small to detect any"
    rows = [
        (f"{v.task}: {v.metric}", v.mean, -v.detectable, v.detectable)
        for v in judged
        if math.isfinite(v.detectable)
    ]
    title = "Change against the earlier run (gray: too small to be detected)"
    label = "change of the metric"
    chart = _differences_chart(rows, files, "changes", title, label, gray=True) if rows else None
    return Answer("What changed against the other run?", f"{sentence}.", chart)


def _learns(runs: Sequence[Run], charts: Sequence[Chart]) -> Answer | None:
    """Describe how a metric of a task of `MEMORY`, or else of any task, changes in a training."""
    trainings = list(trainings_of(list(runs)).values())
    if len(trainings) != 1:
        return None
    steps = sorted(trainings[0], key=lambda run: run.step or 0)
    last = {point[:3]: point for point in steps[-1].points}
    both = [(point, last[point[:3]]) for point in steps[0].points if point[:3] in last]
    for before, after in sorted(both, key=lambda pair: pair[0].task not in MEMORY):
        chart = _chart(charts, f"{before.task}_{before.quantity}_over_steps")
        if chart is not None:
            where = at_x(list(runs), before.task, before.quantity, before.x)
            sentence = (
                f"{task_words(before.task)}: {y_label(before.quantity)}{where and f' at {where}'} "
                f"goes from {bounded(before.value, before.low, before.high)} at step "
                f"{steps[0].step:,} to {bounded(after.value, after.low, after.high)} at step "
                f"{steps[-1].step:,}."
            )
            return Answer("How does it change during training?", sentence, chart)
    return None


def _remembers(runs: Sequence[Run], charts: Sequence[Chart]) -> Answer | None:
    task, curves = _memory_curves(runs)
    if not curves:
        return None
    unit = TOKENS if x_label(list(runs), task, MEMORY[task]).endswith(TOKENS) else "entries"
    sentence = _of_runs(
        (
            run.label,
            "; ".join([*_effective(run, task, unit), *_by_window(run, task), _reach(points, unit)]),
        )
        for run, points in curves
    )
    chart = _chart(charts, f"{task}_{MEMORY[task]}")
    return Answer("How far does it remember?", f"{task_words(task)}: {sentence}.", chart)


def _effective(run: Run, task: str, unit: str) -> list[str]:
    """Return a clause on the effective length, if the run has one."""
    return [
        f"effective length {point.value if isinstance(point.value, str) else f'{point.value:g}'} "
        f"{unit} (at least 85% of the score at the shortest)"
        for point in run.points
        if (point.task, point.quantity, point.x) == (task, "effective_length", None)
    ]


def _by_window(run: Run, task: str) -> list[str]:
    """Return a clause on the right answers inside and outside the attention window, if known."""
    points = {point.x: point for point in points_of(run, task, MEMORY[task])}
    cases = [points.get("inside_window"), points.get("outside_window")]
    if None in cases:
        return []
    inside, outside = (_share(point) for point in cases if point is not None)
    return [f"{inside} of the answers are right inside the attention window, {outside} outside"]


def _reach(points: list[tuple[float, Point]], unit: str) -> str:
    """Describe up to which length more than half of the answers are right, without a gap before.

    A length counts if its whole interval lies above half, or its value if it has no interval.
    """
    reached = 0
    for _, point in points:
        least = point.low if isinstance(point.low, int | float) else float(point.value)
        if least < ENOUGH:
            break
        reached += 1
    at = [f"at {exact_number(x)} {unit} {_share(point)}" for x, point in points]
    if not reached and float(points[0][1].value) >= ENOUGH:
        return f"{at[0]} are right, of too few items to tell more"
    if not reached:
        return f"{at[0]} are right, the shortest length that was asked"
    x, point = points[reached - 1]
    sentence = f"more than half are right up to {exact_number(x)} {unit} ({_share(point)})"
    if reached < len(points):
        return f"{sentence}, {at[reached]}"
    return f"{sentence}, the longest length that was asked"


def _extrapolates(
    runs: Sequence[Run], charts: Sequence[Chart], train_length: int | None
) -> Answer | None:
    question = "Does it extrapolate?"
    task, quantity = EXTRAPOLATION
    curves = _curves(runs, task, quantity)
    if curves:
        sentence = _of_runs((run.label, _gain(*points[-1])) for run, points in curves)
        return Answer(
            question, f"{task_words(task)}: {sentence}.", _chart(charts, controls_name(task))
        )
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
                f"{_share(inside)} of the answers are right at {exact_number(x)} tokens, within "
                f"the training length, and {_share(outside)} at {exact_number(far)}",
            )
        )
    if not told:
        return None
    chart = _chart(charts, f"{task}_{MEMORY[task]}")
    return Answer(question, f"{task_words(task)}: {_of_runs(told)}.", chart)


def _gain(multiple: float, point: Point) -> str:
    value = float(point.value)
    certain = isinstance(point.low, int | float) and isinstance(point.high, int | float)
    if certain and float(point.low or 0) <= 0 <= float(point.high or 0):
        verdict = "neither gains nor loses significantly"
    else:
        verdict = "loses" if value > 0 else "gains"
    return (
        f"with {exact_number(multiple)} times the context of its training it {verdict} "
        f"({_said(point)})"
    )


def _agree(runs: Sequence[Run], compared: Sequence[Difference], files: Files) -> Answer | None:
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
    ][:MAX_ROWS]
    title = "Mean difference between the frameworks, where it is largest"
    label = f"{own[0].run} minus {own[0].baseline}, in the unit of the metric"
    chart = _differences_chart(rows, files, "frameworks", title, label) if rows else None
    return Answer("Do the frameworks agree?", f"{sentence}.", chart)


def _flips(compared: Sequence[Difference]) -> tuple[int, int]:
    """Return the number of differing right or wrong answers, and of all of them.

    An answer counts once, by the metric of its task that differs most.
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
    """Return whether two runs have the same weights and dtype in different frameworks."""
    keys = "griffin_weights_sha256", "model_dtype"
    same = all(one.config.get(key) == other.config.get(key) is not None for key in keys)
    return same and _framework(one) != _framework(other)


def _framework(run: Run) -> str:
    return str(run.config.get("model_framework"))


def _memory_curves(runs: Sequence[Run]) -> tuple[str, list[tuple[Run, list[tuple[float, Point]]]]]:
    """Return the first task of `MEMORY` that the runs have, and the curve of each such run."""
    for task, quantity in MEMORY.items():
        if curves := _curves(runs, task, quantity):
            return task, curves
    return "", []


def _curves(
    runs: Sequence[Run], task: str, quantity: str
) -> list[tuple[Run, list[tuple[float, Point]]]]:
    each = ((run, over_x(points_of(run, task, quantity))) for run in runs)
    return [(run, sorted(points, key=lambda p: p[0])) for run, points in each if points]


def _of_runs(texts: Iterable[tuple[str, str]]) -> str:
    """Return one sentence about all runs; runs with the same text are named together."""
    by_text: dict[str, list[str]] = {}
    for label, text in texts:
        by_text.setdefault(text, []).append(label)
    if len(by_text) == 1:
        return next(iter(by_text))
    parts = [f"{' and '.join(labels)}: {text}" for text, labels in by_text.items()]
    more = len(parts) - MAX_RUNS
    return "; ".join(parts[:MAX_RUNS]) + (f"; and {more} more below" if more > 0 else "")


def _share(point: Point) -> str:
    """Return a share in percent with its interval."""
    value = f"{float(point.value):.0%}"
    if not isinstance(point.low, int | float) or not isinstance(point.high, int | float):
        return value
    return f"{value} (95% interval {point.low:.0%} to {point.high:.0%})"


def _said(point: Point) -> str:
    value = f"{float(point.value):.3g} nats per token"
    if not isinstance(point.low, int | float) or not isinstance(point.high, int | float):
        return value
    return f"{value}, 95% interval {point.low:.2g} to {point.high:.2g}"


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'s' * (number != 1)}"


def _chart(charts: Sequence[Chart], name: str) -> Chart | None:
    return next((chart for chart in charts if chart.name == name), None)


def _differences_chart(
    rows: list[tuple[str, float, float, float]],
    files: Files,
    name: str,
    title: str,
    label: str,
    *,
    gray: bool = False,
) -> Chart:
    """Draw a bar from low to high for each difference; gray ones are undetectable changes."""
    figure, (axes,) = panels(1, height=max(2.2, 1.3 + 0.3 * len(rows)))
    axes.axvline(0, color=GRAY, linewidth=1)
    for place, (metric, value, low, high) in enumerate(rows):
        color, width = (GRAY, 3 * LINE_WIDTH) if gray else (BLUE, LINE_WIDTH)
        axes.plot([low, high], [place, place], color=color, linewidth=width)
        axes.plot(value, place, marker="o", color=BLUE, markersize=MARKER_SIZE)
        show_value(axes, value, place, f"{metric}: {bounded(value, low, high)}")
    axes.set_yticks(range(len(rows)), [metric for metric, *_ in rows])
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.set_xlabel(label)
    return save_chart(figure, files, name, title, "" if gray else "Bars: 95% confidence intervals")
