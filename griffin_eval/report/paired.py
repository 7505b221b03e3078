"""Item-by-item comparison of runs, from the samples that ``--log_samples`` keeps."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from griffin_eval import intervals
from griffin_eval.report.results import Run, x_of
from griffin_eval.report.samples import read_samples

# Metrics for which lm_eval's samples hold a log-likelihood and the words or bytes of the text, and
# the number of nats in the unit in which they are compared.
LOGLIKELIHOODS = {
    "word_perplexity": 1.0,
    "byte_perplexity": 1.0,
    "perplexity": 1.0,
    "bits_per_byte": math.log(2),
}

# Metrics for which a sample holds a length in place of a weight.
LENGTHS = ("capacity", "effective_length")

Samples = dict[str, dict[str, dict[str, Any]]]  # samples by filter and key of the item
Common = tuple[str, dict[str, Any], dict[str, Any]]  # key of an item, its sample in two runs


class Difference(NamedTuple):
    """The mean difference between a run and a baseline over their common items.

    Attributes:
        metric: Name of the compared metric, from `compared_name`.
        items: Number of common items.
        mean: Mean of run minus baseline, weighted like the metric.
        low, high: Bounds of its 95% interval by a bootstrap of clusters (`intervals.ratio`); None
            with too few clusters.
        largest: Largest absolute difference.
        gained, lost: Number of items that are right only in the run, and only in the baseline;
            None unless items are right or wrong.
        p: p-value of McNemar's exact test, which treats items as independent; None like ``gained``.
    """

    task: str
    metric: str
    run: str
    baseline: str
    items: int
    mean: float
    low: float | None
    high: float | None
    largest: float
    gained: int | None
    lost: int | None
    p: float | None


def differences(runs: list[Run]) -> list[Difference]:
    """Compare every run with the first run that has samples of the same task."""
    compared = []
    for task in dict.fromkeys(task for run in runs for task in run.samples):
        baseline, *others = (run for run in runs if task in run.samples)
        theirs = read_samples(baseline.samples[task]) if others else {}
        for run in others:
            common = common_items(read_samples(run.samples[task]), theirs)
            for name, items in common.items():
                for metric in metrics_of(*(sample for _, _, sample in items)):
                    pairs = [(key, own.get(metric), other.get(metric)) for key, own, other in items]
                    if found := _difference(task, metric, name, run.label, baseline.label, pairs):
                        compared.append(found)
    return compared


def common_items(ours: Samples, theirs: Samples) -> dict[str, list[Common]]:
    """Return the items that both runs have, by filter.

    Samples with the same key but another weight of a metric, such as another number of bytes, are
    not common: another tokenizer cuts the document into other parts.
    """
    common = {}
    for name, samples in theirs.items():
        own = ours.get(name, {})
        pairs = [(key, own[key], sample) for key, sample in samples.items() if key in own]
        if items := [(key, a, b) for key, a, b in pairs if _same_weights(a, b)]:
            common[name] = items
    return common


def each_item_once(quantity: str, metrics: Iterable[str]) -> list[str]:
    """Return the metrics of a quantity that together count each item once.

    These are the quantity itself, or else its points at numbers, or else at named cases.

    Args:
        metrics: Metrics of all quantities, such as ``exact_match@20``.
    """
    own = [metric for metric in metrics if metric.partition("@")[0] == quantity]
    if quantity in own:
        return [quantity]
    return [metric for metric in own if isinstance(x_of(metric.partition("@")[2]), float)] or own


def not_compared(runs: list[Run], compared: list[Difference]) -> list[tuple[str, str, str]]:
    """Return task, run and baseline of pairs that have no common item with a number."""
    found = {(d.task, d.run) for d in compared}
    lacking = []
    for task in dict.fromkeys(task for run in runs for task in run.samples):
        baseline, *others = (run.label for run in runs if task in run.samples)
        lacking += [(task, run, baseline) for run in others if (task, run) not in found]
    return lacking


def metrics_of(*samples: dict[str, Any]) -> list[str]:
    """Return the metrics of samples, without bounds and without `LENGTHS`."""
    names = dict.fromkeys(name for sample in samples for name in sample.get("metrics", []))
    return [name for name in names if not name.endswith(("_low", "_high")) and name not in LENGTHS]


def _same_weights(one: dict[str, Any], other: dict[str, Any]) -> bool:
    for metric in metrics_of(one):
        a, b = (item_of(metric, sample.get(metric), "") for sample in (one, other))
        if a and b and a[1] != b[1]:
            return False
    return True


def _difference(
    task: str,
    metric: str,
    filter_name: str,
    run: str,
    baseline: str,
    pairs: list[tuple[str, Any, Any]],
) -> Difference | None:
    """Return the comparison of one metric, or None if no item has numbers in both runs.

    Args:
        metric, filter_name: lm_eval's names.
        pairs: Key of each common item, and its metric in the run and in the baseline.
    """
    values, weights, clusters = [], [], []
    gained = lost = 0
    binary = True
    for key, mine, other in pairs:
        a, b = item_of(metric, mine, key), item_of(metric, other, key)
        if a is None or b is None:
            continue
        values.append(a[0] - b[0])
        weights.append(b[1])
        clusters.append(b[2])
        binary = binary and {a[0], b[0]} <= {0.0, 1.0} and b[1] == 1.0
        gained, lost = gained + (a[0] > b[0]), lost + (a[0] < b[0])
    if not values:
        return None
    mean = intervals.ratio(values, weights, clusters)
    finite = math.isfinite(mean.low)
    bound = 1.0 if binary else math.inf  # a difference of shares
    return Difference(
        task,
        compared_name(metric, filter_name),
        run,
        baseline,
        len(values),
        mean.value,
        max(mean.low, -bound) if finite else None,
        min(mean.high, bound) if finite else None,
        max(abs(value / weight) for value, weight in zip(values, weights, strict=True)),
        gained if binary else None,
        lost if binary else None,
        mcnemar(gained, lost) if binary else None,
    )


def mcnemar(gained: int, lost: int) -> float:
    """Return the p-value of McNemar's exact test (McNemar, 1947)."""
    from scipy import stats

    return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def item_of(metric: str, value: Any, key: str) -> tuple[float, float, str] | None:
    """Return value, weight and cluster of an item, or None if the metric is no number.

    Args:
        metric: Name of the metric. For `LOGLIKELIHOODS` the value is the negative log-likelihood.
        value: Number in the sample, or a list of value, weight and cluster, or of the two numbers
            of `LOGLIKELIHOODS`. Other lists are not of one item: F1 and Matthews' correlation, for
            example, keep the right and the predicted class.
        key: Cluster of an item that names none.
    """
    parts, unit, cluster = value if isinstance(value, list) else [value, 1.0], 1.0, key
    if len(parts) == 3 and isinstance(parts[2], str):
        cluster = parts[2]
    elif len(parts) == 2 and metric in LOGLIKELIHOODS:
        unit = -LOGLIKELIHOODS[metric]
    elif isinstance(value, list):
        return None
    if not parts[1] or not all(isinstance(part, bool | int | float) for part in parts[:2]):
        return None
    return float(parts[0]) / unit, float(parts[1]), cluster


def compared_name(metric: str, filter_name: str) -> str:
    """Return the name of a comparison: a perplexity is compared as ``ln(perplexity)``, and a
    filter other than ``none`` follows in brackets, as in ``exact_match (strict-match)``."""
    quantity, at, x = metric.partition("@")
    if LOGLIKELIHOODS.get(metric) == 1.0:
        quantity = f"ln({quantity})"
    return quantity + f" ({filter_name})" * (filter_name != "none") + at + x
