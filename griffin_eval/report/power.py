"""How small a difference a run can show, before it is run.

References:
    Miller (2024), Adding error bars to evals: A statistical approach to language model
    evaluations, arXiv 2411.00640, sections 4 and 5.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from griffin_eval import intervals
from griffin_eval.errors import ArgumentError
from griffin_eval.report.results import Run
from griffin_eval.report.verdicts import LEVEL, compare, quantiles

MAX_CLUSTERS = 10**9


class Spread(NamedTuple):
    """How much the difference of two models varies from item to item.

    Attributes:
        task, metric: Names of both; empty where the spread was given as numbers.
        items: Number of items that it was measured on, or that are planned.
        clusters: Number of their clusters.
        deviation: Standard error of the mean difference, times the root of the clusters.
        paired: Whether it was measured on the same items in two runs.
    """

    task: str
    metric: str
    items: int
    clusters: int
    deviation: float
    paired: bool


def spreads(run: Run, other: Run | None, correlation: float) -> list[Spread]:
    """Return the spread of each task of an earlier run.

    Args:
        run: A run with samples.
        other: A run of another model on the same items, or None. Without one, both models are taken
            to vary as this one does.
        correlation: Correlation of two models' scores of an item, used without another run.

    Raises:
        ReportError: A task without samples, or without a metric that can be compared.
    """
    found = []
    for one in compare(run, other or run):
        values = one.values if other else one.scores
        error = intervals.standard_error(values, one.weights, one.clusters)
        if other is None:
            error *= math.sqrt(2 * (1 - correlation))
        groups = len(set(one.clusters))
        deviation = error * math.sqrt(groups)
        found.append(
            Spread(one.task, one.metric, len(values), groups, deviation, other is not None)
        )
    return found


def assumed_spread(
    items: int, score: float, correlation: float, cluster_size: int, within: float
) -> Spread:
    """Return the spread of answers that are right or wrong, without an earlier run.

    The variance of a difference is 2 p (1 - p) (1 - r) for an item, times the design effect
    1 + (m - 1) w of clusters of m items.

    Args:
        items: Number of items that are planned.
        score: Share p of right answers that is expected.
        correlation: Correlation r of two models' scores of an item.
        cluster_size: Number m of items in a cluster.
        within: Correlation w of items in a cluster.
    """
    variance = 2 * score * (1 - score) * (1 - correlation) * (1 + (cluster_size - 1) * within)
    clusters = max(1, items // cluster_size)
    return Spread("", "", items, clusters, math.sqrt(variance / cluster_size), False)


def smallest_difference(spread: Spread, clusters: int) -> float:
    """Return the difference that is seen with a probability of `POWER` at a level of `LEVEL`.

    This is Miller's equation 9 solved for the difference, with Student's quantiles for the number
    of clusters. It is infinite for one cluster.
    """
    if clusters < 2:
        return math.inf
    return spread.deviation / math.sqrt(clusters) * quantiles(clusters, LEVEL)


def clusters_needed(spread: Spread, difference: float) -> int | None:
    """Return the least number of clusters that can show a difference; None if beyond reason."""
    counts = range(2, MAX_CLUSTERS)
    place = bisect_left(counts, True, key=lambda n: smallest_difference(spread, n) <= difference)
    return None if place == len(counts) else counts[place]


class Plan(NamedTuple):
    """A row of the table.

    Attributes:
        task, metric: Names of both; empty without an earlier run.
        items, clusters: Planned items and their clusters.
        smallest: Smallest difference that they can show.
        needed: Number of items that can show the wanted difference, or None.
        paired: Whether the spread was measured between two runs.
    """

    task: str
    metric: str
    items: int
    clusters: int
    smallest: float
    needed: int | None
    paired: bool


def plans(spreads: Sequence[Spread], items: int | None, difference: float | None) -> list[Plan]:
    """Return a row for each spread.

    Args:
        spreads: Spreads of tasks.
        items: Number of items that are planned; as many as were measured by default.
        difference: Difference that is to be seen, or None.

    Raises:
        ArgumentError: A spread of 0, which shows nothing.
    """
    rows = []
    for spread in spreads:
        if spread.deviation == 0 or spread.clusters < 2:
            what = f"{spread.task}: {spread.metric}" if spread.task else "these items"
            raise ArgumentError(
                f"{what}: all {spread.clusters} clusters are alike, which does not tell how much "
                "others would vary; give --items and --score in place of results"
            )
        size = spread.items / spread.clusters
        clusters = spread.clusters if items is None else max(1, round(items / size))
        needed = None if difference is None else clusters_needed(spread, difference)
        rows.append(
            Plan(
                spread.task,
                spread.metric,
                items or spread.items,
                clusters,
                smallest_difference(spread, clusters),
                None if needed is None else math.ceil(needed * size),
                spread.paired,
            )
        )
    return rows
