"""Is a run better or worse than another? A verdict for each task, from the samples of both.

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
from griffin_eval.report.results import ReportError, Run, read_samples

LEVEL = 0.05  # probability of a verdict on any task by chance
POWER = 0.8  # probability that a difference of the stated size is seen


class Verdict(NamedTuple):
    """What a run's samples of a task say against those of another run.

    Attributes:
        task: lm_eval's name of it.
        metric: the task's first metric of which a direction is known, with its first filter, by its
            name in `griffin_eval.report.paired.compared_name`; of a curve its quantity, over all
            numbers x unless the quantity itself is a metric.
        items: number of items that both runs have.
        mean: mean difference, the run minus the other, weighted as the metric is.
        p: probability of such a difference by chance, corrected for the number of tasks (Holm).
        detectable: smallest difference that would have been seen with a probability of `POWER`; 0
            where all clusters moved alike and are not right or wrong, infinite where none would
            have been: with one cluster, or too few of them for the sign test, if they moved alike
            or are right or wrong.
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
        task, metric: As in `Verdict`.
        higher_is_better: Direction of the metric.
        values: Score of each item in the run, minus that in the other.
        own: Score of each item in the run.
        weights, clusters: Weight and cluster of each item.
        right_or_wrong: Whether all scores are 0 or 1.
        binary: Whether besides each item is independent, of weight 1.
    """

    task: str
    metric: str
    higher_is_better: bool
    values: list[float]
    own: list[float]
    weights: list[float]
    clusters: list[str]
    right_or_wrong: bool
    binary: bool


def verdicts(run: Run, other: Run) -> list[Verdict]:
    """A verdict for each task of the other run.

    Args:
        run: the run that is judged.
        other: what it is compared with.

    Raises:
        ReportError: a task without samples, without an item that both have, or without a metric of
            which a direction is known.
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
    """Holm's correction: p-values of which each may be compared with the level of the family."""
    corrected, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        corrected[index] = largest
    return corrected


def compare(run: Run, other: Run) -> list[Compared]:
    """Return the items of each task of the other run, compared.

    Raises:
        ReportError: As in `verdicts`.
    """
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
        f"{other.path}: {task} has no metric that is a number for each item and of which is known "
        "whether more is better, so that there is no verdict on it"
    )


def _test(one: Compared) -> tuple[float, float]:
    """The p-value of no difference, and the standard error of the mean difference.

    Items that are right or wrong and independent have McNemar's exact test, others Student's over
    clusters; where all clusters moved alike, which shows no variance, the exact sign test.
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
    # So few clusters of right or wrong items may be nearly alike by chance.
    return max(p, _sign_test(groups)) if one.right_or_wrong else p, error


def _detectable(one: Compared, error: float, tasks: int) -> float:
    """The smallest difference that is seen at the strictest level of Holm's procedure."""
    groups, level = len(set(one.clusters)), LEVEL / tasks
    if groups == 1:
        return math.inf
    if _alike(error, sum(one.values) / sum(one.weights)) and _sign_test(groups) >= level:
        return math.inf
    seen = error * quantiles(groups, level)
    if one.right_or_wrong:  # so many clusters must change, all to one side, for McNemar's test
        seen = max(seen, math.ceil(math.log2(2 / level)) / groups)
        if seen > 1:
            return math.inf
    return seen


def quantiles(groups: int, level: float) -> float:
    """Return how many standard errors a difference must have to be seen with `POWER`.

    Args:
        groups: Number of clusters, at least 2.
        level: Probability of a verdict by chance.
    """
    from scipy import special

    return float(special.stdtrit(groups - 1, [1 - level / 2, POWER]).sum())


def _alike(error: float, mean: float) -> bool:
    """Whether all clusters moved alike, but for rounding."""
    return error <= 1e-9 * abs(mean)


def _sign_test(groups: int) -> float:
    """The p-value of so many clusters that all moved to one side."""
    return min(1.0, 2 * 0.5**groups)


def unseen(found: Sequence[Verdict], wanted: float) -> list[Verdict]:
    """The verdicts of runs that are too small to see a difference as small as is wanted."""
    return [one for one in found if not one.detectable <= wanted]
