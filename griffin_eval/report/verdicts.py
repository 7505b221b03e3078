"""Verdicts of better or worse for each task, from the samples of two runs.

References:
    Holm (1979), A simple sequentially rejective multiple test procedure.
    McNemar (1947), Note on the sampling error of the difference between correlated proportions.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from griffin_eval import intervals
from griffin_eval.report.paired import (
    common_items,
    compared_name,
    each_item_once,
    item_of,
    mcnemar,
    metrics_of,
)
from griffin_eval.report.results import Run
from griffin_eval.report.samples import ReportError, read_samples

LEVEL = 0.05  # probability that any task gets a verdict by chance
POWER = 0.8  # probability of seeing a difference of the stated size


class Verdict(NamedTuple):
    """The verdict on a run's samples of a task against another run's.

    Attributes:
        metric: First metric of the task with a known direction, with its first filter, named by
            `griffin_eval.report.paired.compared_name`; for a curve its quantity, over all numbers x
            unless the quantity itself is a metric.
        items: Number of common items.
        mean: Mean of the run minus the other run, weighted like the metric.
        p: p-value, corrected for the number of tasks (Holm).
        detectable: Smallest difference that is seen with a probability of `POWER`. It is 0 if all
            clusters moved alike and items are not right or wrong. It is infinite if no difference
            can be seen: with one cluster, or with too few for the sign test if clusters moved alike
            or items are right or wrong.
        verdict: ``better``, ``worse`` or ``no difference``.
    """

    task: str
    metric: str
    items: int
    mean: float
    p: float
    detectable: float
    verdict: str


class Compared(NamedTuple):
    """The items of a task in two runs.

    Attributes:
        values: Score of each item in the run, minus that in the other run.
        scores: Score of each item in the run.
        weights, clusters: Weight and cluster of each item.
        right_or_wrong: Whether all scores are 0 or 1.
        binary: Whether in addition each item is independent and has weight 1.
    """

    task: str
    metric: str
    higher_is_better: bool
    values: list[float]
    scores: list[float]
    weights: list[float]
    clusters: list[str]
    right_or_wrong: bool
    binary: bool


def verdicts(run: Run, other: Run) -> list[Verdict]:
    """Return a verdict on ``run`` for each task of ``other``.

    Raises:
        ReportError: A task has no samples, no common item, or no metric with a known direction.
    """
    compared = compare(run, other)
    tests = [_test(one) for one in compared]
    corrected = holm([p for p, _ in tests])
    found = []
    for one, (_, error), p in zip(compared, tests, corrected, strict=True):
        mean = sum(one.values) / sum(one.weights)
        verdict = "no difference"
        if p < LEVEL:
            verdict = "better" if (mean > 0) == one.higher_is_better else "worse"
        detectable = _detectable(one, error, len(compared))
        found.append(Verdict(one.task, one.metric, len(one.values), mean, p, detectable, verdict))
    return found


def holm(p: Sequence[float]) -> list[float]:
    """Return p-values with Holm's correction, comparable with the level of the family."""
    corrected, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        corrected[index] = largest
    return corrected


def compare(run: Run, other: Run) -> list[Compared]:
    """Return the common items of each task of the other run."""
    tasks = list(other.samples)
    lacking = [task for task in tasks if task not in run.samples]
    if lacking or not tasks:
        raise ReportError(
            f"{run.path} has no samples of {', '.join(lacking) or 'any task'}, which this needs: "
            f"evaluate both runs on the same tasks with lm_eval --log_samples"
        )
    return [_compare(run, other, task) for task in tasks]


def _compare(run: Run, other: Run, task: str) -> Compared:
    common = common_items(read_samples(run.samples[task]), read_samples(other.samples[task]))
    if not common:
        raise ReportError(
            f"{run.samples[task]} and {other.samples[task]} have no item in common: they are of "
            "other documents or prompts, or cut by another tokenizer"
        )
    directions: dict[str, bool] = {}
    for (named, metric), higher in other.higher_is_better.items():
        if named == task and higher is not None:
            directions.setdefault(metric.partition("@")[0], bool(higher))
    filter_name, items = next(iter(common.items()))
    metrics = metrics_of(*(sample for _, _, sample in items))
    for quantity in dict.fromkeys(metric.partition("@")[0] for metric in metrics):
        if quantity not in directions:
            continue
        names = each_item_once(quantity, metrics)
        pairs = [
            (item_of(name, own.get(name), key), item_of(name, theirs.get(name), key))
            for key, own, theirs in items
            for name in names
        ]
        both = [(a, b) for a, b in pairs if a and b and math.isfinite(a[0]) and math.isfinite(b[0])]
        if both:
            alone = len({b[2] for _, b in both}) == len(both)
            right_or_wrong = all({a[0], b[0]} <= {0.0, 1.0} for a, b in both)
            return Compared(
                task,
                compared_name(quantity, filter_name),
                directions[quantity],
                [a[0] - b[0] for a, b in both],
                [a[0] for a, _ in both],
                [b[1] for _, b in both],
                [b[2] for _, b in both],
                right_or_wrong,
                right_or_wrong and alone and all(b[1] == 1 for _, b in both),
            )
    raise ReportError(
        f"{other.path}: {task} has no metric with a number for each item and with a known "
        "direction (whether more is better), so that there is no verdict on it"
    )


def _test(one: Compared) -> tuple[float, float]:
    """Return the p-value of no difference, and the standard error of the mean difference.

    Independent items that are right or wrong use McNemar's exact test, others Student's test over
    clusters. If all clusters moved alike, there is no variance, and the exact sign test applies.
    """
    from scipy import stats

    error = intervals.standard_error(one.values, one.weights, one.clusters)
    if one.binary:
        gained, lost = (sum(sign * value > 0 for value in one.values) for sign in (1, -1))
        return mcnemar(gained, lost), error
    groups = len(set(one.clusters))
    mean = sum(one.values) / sum(one.weights)
    if groups == 1 or mean == 0:
        return 1.0, error
    if _alike(error, mean):
        return _sign_test(groups), error
    p = float(2 * stats.t.sf(abs(mean) / error, groups - 1))
    # A few clusters of right or wrong items may be nearly alike by chance.
    return max(p, _sign_test(groups)) if one.right_or_wrong else p, error


def _detectable(one: Compared, error: float, tasks: int) -> float:
    """Return the smallest difference that is seen at the strictest level of Holm's procedure."""
    groups, level = len(set(one.clusters)), LEVEL / tasks
    if groups == 1:
        return math.inf
    if _alike(error, sum(one.values) / sum(one.weights)) and _sign_test(groups) >= level:
        return math.inf
    seen = error * quantiles(groups, level)
    if one.right_or_wrong:  # McNemar's test needs at least this many changes, all to one side
        seen = max(seen, math.ceil(math.log2(2 / level)) / groups)
        if seen > 1:
            return math.inf
    return seen


def quantiles(groups: int, level: float) -> float:
    """Return the standard errors that a difference must have to be seen with `POWER`."""
    from scipy import special

    return float(special.stdtrit(groups - 1, [1 - level / 2, POWER]).sum())


def _alike(error: float, mean: float) -> bool:
    """Return whether all clusters moved alike, up to rounding."""
    return error <= 1e-9 * abs(mean)


def _sign_test(groups: int) -> float:
    """Return the p-value of this many clusters that all moved to one side."""
    return min(1.0, 2 * 0.5**groups)


def unseen(verdicts: Sequence[Verdict], difference: float) -> list[Verdict]:
    """Return the verdicts on samples too small to detect the wanted difference."""
    return [one for one in verdicts if not one.detectable <= difference]
