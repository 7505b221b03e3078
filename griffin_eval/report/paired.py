"""Runs compared item by item, from the samples that ``--log_samples`` keeps."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from griffin_eval import intervals
from griffin_eval.report.results import Run, read_samples, x_of

# Of these lm_eval keeps the log-likelihood of an item, with the words or bytes of its text; and the
# nats in the unit of the negative log-likelihood that they are compared by.
LOGLIKELIHOODS = {
    "word_perplexity": 1.0,
    "byte_perplexity": 1.0,
    "perplexity": 1.0,
    "bits_per_byte": math.log(2),
}

# Metrics of which a sample holds a length in place of a weight.
LENGTHS = ("capacity", "effective_length")

Samples = dict[str, dict[str, dict[str, Any]]]  # by filter and key of the item
Common = tuple[str, dict[str, Any], dict[str, Any]]  # key of an item, its sample in two runs


class Difference(NamedTuple):
    """A run minus the run it is compared with, over the items that both have.

    Attributes:
        task, metric: the metric that is compared, by its name in `compared_name`.
        run, baseline: labels of the two runs.
        items: number of common items.
        mean: mean difference, weighted as the metric is.
        low, high: bounds of its 95% interval by a bootstrap of clusters (`intervals.ratio`); None
            with too few clusters.
        largest: largest absolute difference.
        gained, lost: number of items that are right in the run alone, and in the baseline alone;
            None where items are not right or wrong.
        p: probability of such a difference by chance, by McNemar's exact test, which takes items as
            independent; None as above.
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
    """Every run that has samples of a task, compared with the first run that has, over the items
    that both have; left out where there are none.

    Raises:
        ReportError: an incomplete file of samples.
    """
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
    """The items that both runs have, by filter.

    Not common are samples with the same key of which some metric has another weight, such as
    another number of bytes: they are of other parts of a document, as another tokenizer cuts it.

    Args:
        ours, theirs: samples of two runs, as `read_samples` gives them.
    """
    common = {}
    for name, samples in theirs.items():
        own = ours.get(name, {})
        pairs = [(key, own[key], sample) for key, sample in samples.items() if key in own]
        if items := [(key, a, b) for key, a, b in pairs if _same_weights(a, b)]:
            common[name] = items
    return common


def each_item_once(quantity: str, metrics: Iterable[str]) -> list[str]:
    """The metrics of a quantity that together count each item once: the quantity itself, or else
    its points at numbers, or else at named cases.

    Args:
        quantity: such as ``exact_match``.
        metrics: of all quantities, such as ``exact_match@20`` and ``exact_match@inside_window``.
    """
    own = [metric for metric in metrics if metric.partition("@")[0] == quantity]
    if quantity in own:
        return [quantity]
    return [metric for metric in own if isinstance(x_of(metric.partition("@")[2]), float)] or own


def not_compared(runs: list[Run], compared: list[Difference]) -> list[tuple[str, str, str]]:
    """Task, run and baseline where both have samples, but no item in common that has a number.

    Args:
        compared: their `differences`.
    """
    found = {(d.task, d.run) for d in compared}
    lacking = []
    for task in dict.fromkeys(task for run in runs for task in run.samples):
        baseline, *others = (run.label for run in runs if task in run.samples)
        lacking += [(task, run, baseline) for run in others if (task, run) not in found]
    return lacking


def metrics_of(*samples: dict[str, Any]) -> list[str]:
    """Return the metrics of samples, without their bounds and without `LENGTHS`."""
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
    """The comparison of one metric, None if no item has numbers in both runs.

    Args:
        task, run, baseline: as in `Difference`.
        metric, filter_name: lm_eval's names of the metric and of the filter of the samples.
        pairs: key of each common item, and its metric in the run and in the baseline.
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
    return Difference(
        task,
        compared_name(metric, filter_name),
        run,
        baseline,
        len(values),
        mean.value,
        mean.low if finite else None,
        mean.high if finite else None,
        max(abs(value / weight) for value, weight in zip(values, weights, strict=True)),
        gained if binary else None,
        lost if binary else None,
        mcnemar(gained, lost) if binary else None,
    )


def mcnemar(gained: int, lost: int) -> float:
    """The p-value of McNemar's exact test (McNemar, 1947)."""
    from scipy import stats

    return float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0


def item_of(metric: str, value: Any, key: str) -> tuple[float, float, str] | None:
    """Value, weight and cluster of an item; None if the metric is no number.

    Args:
        metric: its name. For those of `LOGLIKELIHOODS` the value is the negative log-likelihood.
        value: metric in the sample: a number, or a list of value, weight and perhaps cluster.
        key: cluster of an item that names none: the item itself.
    """
    parts = value if isinstance(value, list) else [value, 1.0]
    if len(parts) not in (2, 3) or not parts[1]:
        return None
    if not all(isinstance(part, bool | int | float) for part in parts[:2]):
        return None
    number, cluster = float(parts[0]), str(parts[2]) if len(parts) == 3 else key
    if metric in LOGLIKELIHOODS and len(parts) == 2:
        number /= -LOGLIKELIHOODS[metric]
    return number, float(parts[1]), cluster


def compared_name(metric: str, filter_name: str) -> str:
    """What is compared: of a perplexity its logarithm, ``ln(perplexity)``, and with a filter its
    name, ``exact_match (strict-match)``.

    Args:
        metric: lm_eval's name of the metric.
        filter_name: lm_eval's name of the filter, ``none`` without one.
    """
    quantity, at, x = metric.partition("@")
    if LOGLIKELIHOODS.get(metric) == 1.0:
        quantity = f"ln({quantity})"
    return quantity + f" ({filter_name})" * (filter_name != "none") + at + x
