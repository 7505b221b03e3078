"""Base class of the tasks: metrics that are points of curves, with confidence intervals."""

import functools
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from lm_eval.api.task import ConfigurableTask

from griffin_eval import intervals
from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.metadata import warn_of_near_misses

BOUNDS = {"": "value", "_low": "low", "_high": "high"}  # suffix of a metric: field of an estimate
OF_LENGTHS = {"capacity": intervals.capacity, "effective_length": intervals.effective_length}


class Observation(NamedTuple):
    """The contribution of one document to a metric that is a mean or a ratio.

    Attributes:
        value: Numerator, such as nats or the number of right answers.
        weight: Denominator, such as tokens or the number of answers; 1 in a mean.
        cluster: Name of the book, document or sequence. Documents of one cluster are dependent.
    """

    value: float
    weight: float
    cluster: str


class LengthObservation(NamedTuple):
    """The contribution of one document to a capacity or an effective length.

    Attributes:
        value: 1 for a right answer, 0 for a wrong one.
        length: Length of the document, in the unit of the metric.
        cluster: See `Observation`.
    """

    value: float
    length: float
    cluster: str


AnyObservation = Observation | LengthObservation


class CurveTask(ConfigurableTask):
    """An lm_eval task with metrics ``quantity@x`` and the bounds ``quantity@x_low`` and
    ``quantity@x_high`` of their 95% intervals.

    The intervals treat clusters as independent (`griffin_eval.intervals`). lm_eval's standard error
    treats every document as independent, so these metrics have none. If ``--limit`` leaves no
    document for a point, its value is "N/A", as lm_eval writes it.
    """

    def __init__(self, config: dict[str, Any]):
        warn_of_near_misses(config.get("metadata") or {})
        super().__init__(config={key: value for key, value in config.items() if key != "class"})
        self._dataset_sha256 = self.dataset["test"][0]["dataset_sha256"]
        self._add_metadata("dataset_sha256", self._dataset_sha256)

    def declare(self, metric: str, kind: str, *, higher_is_better: bool | None) -> None:
        """Add a metric and its two bounds.

        Args:
            kind: ``proportion`` (mean of values that are 0 or 1), ``ratio`` (values over weights),
                ``capacity`` (length up to which half of the values are 1) or
                ``effective_length`` (length up to which scores stay near the shortest one's).
            higher_is_better: Direction of the arrow in lm_eval's table, or None for no arrow.
        """
        for suffix, field in BOUNDS.items():
            self._aggregation_list[metric + suffix] = functools.partial(
                estimate, kind=kind, field=field
            )
            self._higher_is_better[metric + suffix] = higher_is_better

    def state_chance(self, chance: dict[str, float]) -> None:
        """Record the scores of guessing, by metric, in the config that results.json holds."""
        self._add_metadata("chance", chance)

    def _add_metadata(self, name: str, value: Any) -> None:
        self.config.metadata = (self.config.metadata or {}) | {name: value}

    def scores(self, observations: dict[str, AnyObservation]) -> dict[str, AnyObservation | None]:
        """Return the value of `process_results`: an entry for every metric in every document.

        lm_eval gathers from all processes only the metrics that the first process has. A metric
        without an observation in this document is therefore None rather than missing.
        """
        return {
            metric: observations.get(metric.removesuffix("_low").removesuffix("_high"))
            for metric, aggregation in self._aggregation_list.items()
            if isinstance(aggregation, functools.partial)
        }

    def build_all_requests(self, **arguments: Any) -> None:
        """Build the requests as lm_eval does, and reject cached requests of another dataset.

        lm_eval's cache (``--cache_requests``) ignores metadata, and would score requests that were
        built with other metadata against the answers of this dataset.
        """
        super().build_all_requests(**arguments)
        for instance in self.instances:
            if instance.doc["dataset_sha256"] != self._dataset_sha256:
                raise ArgumentError(
                    f"lm_eval's cache holds requests of another {self.config.task}, with other "
                    "--metadata; use --cache_requests refresh"
                )


def estimate(observations: Sequence[Sequence[Any] | None], kind: str, field: str) -> float | str:
    """Return the value or a bound of a metric from the observations of all documents.

    Args:
        observations: One for each document, as a tuple or as the list that lm_eval gathers from
            another process; None for documents without the metric.
        kind: See `CurveTask.declare`.
        field: ``value``, ``low`` or ``high``.

    Returns:
        A number; "N/A" if there are too few observations; ">200" or "<20" for a length beyond the
        longest or below the shortest length of the documents.
    """
    given = tuple(tuple(observation) for observation in observations if observation is not None)
    if not given:
        return "N/A"
    number = getattr(_estimated(kind, given), field)
    if kind in OF_LENGTHS and math.isinf(number):
        lengths = [length for _, length, _ in given]
        return f">{max(lengths):g}" if number > 0 else f"<{min(lengths):g}"
    return number if math.isfinite(number) else "N/A"


@functools.lru_cache(maxsize=1)  # lm_eval asks for the value and both bounds in turn
def _estimated(kind: str, observations: tuple[tuple[Any, ...], ...]) -> intervals.Estimate:
    values, weights, clusters = zip(*observations, strict=True)
    if kind in OF_LENGTHS:
        return OF_LENGTHS[kind](values, weights, clusters)
    if kind == "ratio":
        return intervals.ratio(values, weights, clusters)
    answers = [
        (number < value, cluster)
        for value, weight, cluster in observations
        for number in range(int(weight))
    ]
    right, clusters = zip(*answers, strict=True)
    return intervals.proportion(right, clusters)


def as_split(
    rows: list[dict[str, Any]], measured: Sequence[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the split ``test`` of a custom lm_eval dataset.

    Args:
        rows: Documents. Each gets a column ``dataset_sha256`` with the hash of all rows.
        measured: Further columns of each row, which depend on the model and are not hashed.
    """
    import datasets

    digest = hashlib.sha256()  # updated row by row: JSON of all rows may not fit into memory
    for index, row in enumerate(rows):
        digest.update((", " if index else "[").encode() + json.dumps(row, sort_keys=True).encode())
    digest.update(b"]")
    columns = measured or [{}] * len(rows)
    return {
        "test": datasets.Dataset.from_list(
            [
                row | {"dataset_sha256": digest.hexdigest()} | more
                for row, more in zip(rows, columns, strict=True)
            ]
        )
    }
