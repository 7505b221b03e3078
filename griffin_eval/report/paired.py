"""Runs compared item by item, from the samples that ``--log_samples`` keeps."""

import math
from typing import Any, NamedTuple

from griffin_eval import intervals
from griffin_eval.report.results import ReportError, Run, read_samples

# Of these lm_eval keeps the log-likelihood of an item, with the words or bytes of its text; and the
# nats in the unit of the negative log-likelihood that they are compared by.
LOGLIKELIHOODS = {
    "word_perplexity": 1.0,
    "byte_perplexity": 1.0,
    "perplexity": 1.0,
    "bits_per_byte": math.log(2),
}


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
    """Every run that has samples of a task, compared with the first run that has.

    Raises:
        ReportError: an incomplete file of samples, or two of one task without a common item.
    """
    compared = []
    for task in dict.fromkeys(task for run in runs for task in run.samples):
        baseline, *others = (run for run in runs if task in run.samples)
        theirs = read_samples(baseline.samples[task]) if others else {}
        for run in others:
            ours = read_samples(run.samples[task])
            common = [key for key in theirs if key in ours]
            if not common:
                raise ReportError(
                    f"{run.samples[task]} and {baseline.samples[task]} have no item in common: "
                    "they are of other documents or prompts"
                )
            metrics = dict.fromkeys(m for key in common for m in theirs[key].get("metrics", []))
            for metric in metrics:
                if metric.endswith(("_low", "_high")):
                    continue
                pairs = [(key, ours[key].get(metric), theirs[key].get(metric)) for key in common]
                if difference := _difference(task, metric, run.label, baseline.label, pairs):
                    compared.append(difference)
    return compared


def _difference(
    task: str, metric: str, run: str, baseline: str, pairs: list[tuple[str, Any, Any]]
) -> Difference | None:
    """The comparison of one metric, None if no item has numbers in both runs.

    Args:
        task, metric, run, baseline: as in `Difference`.
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
        binary = binary and {a[0], b[0]} <= {0.0, 1.0} and a[1] == b[1] == 1.0
        gained, lost = gained + (a[0] > b[0]), lost + (a[0] < b[0])
    if not values:
        return None
    mean = intervals.ratio(values, weights, clusters)
    finite = math.isfinite(mean.low)
    return Difference(
        task,
        compared_name(metric),
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


def compared_name(metric: str) -> str:
    """What is compared of a metric: of a perplexity its logarithm, ``ln(perplexity)``."""
    return f"ln({metric})" if LOGLIKELIHOODS.get(metric) == 1.0 else metric
