"""What the tasks share: metrics that are points of curves, each with a confidence interval."""

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
    """What one document contributes to one metric, unless that is a length.

    Attributes:
        value: numerator, such as nats or the number of right answers.
        weight: denominator, such as tokens or the number of answers; 1 in a mean.
        cluster: name of the book, document or sequence. Documents of one cluster are not
            independent.
    """

    value: float
    weight: float
    cluster: str


class LengthObservation(NamedTuple):
    """What one document contributes to a capacity or an effective length.

    Attributes:
        value: 1 for a right answer, 0 for a wrong one.
        length: length at which it was asked, in the unit of the metric.
        cluster: as in `Observation`.
    """

    value: float
    length: float
    cluster: str


AnyObservation = Observation | LengthObservation


class CurveTask(ConfigurableTask):
    """A task of lm_eval whose metrics are ``quantity@x``, each with the bounds
    ``quantity@x_low`` and ``quantity@x_high`` of its 95% interval.

    The intervals take whole clusters as independent (`griffin_eval.intervals`). lm_eval's own
    standard error takes every document as independent, so these metrics have none. A point of
    which ``--limit`` left no document is "N/A", as lm_eval writes it.
    """

    def __init__(self, config: dict[str, Any]):
        warn_of_near_misses(config.get("metadata") or {})
        super().__init__(config={key: value for key, value in config.items() if key != "class"})
        self._dataset_sha256 = self.dataset["test"][0]["dataset_sha256"]
        self._add_metadata("dataset_sha256", self._dataset_sha256)

    def declare(self, metric: str, kind: str, *, higher_is_better: bool | None) -> None:
        """Adds a metric and its two bounds.

        Args:
            kind: ``proportion`` of values that are 0 or 1, ``ratio`` of values to weights,
                ``capacity``, the length up to which half of the values are 1, or
                ``effective_length``, that up to which scores stay near that of the shortest.
            higher_is_better: direction of the arrow in lm_eval's table; None for what is neither.
        """
        for suffix, field in BOUNDS.items():
            self._aggregation_list[metric + suffix] = functools.partial(
                estimate, kind=kind, field=field
            )
            self._higher_is_better[metric + suffix] = higher_is_better

    def state_chance(self, chance: dict[str, float]) -> None:
        """Writes the scores of guessing, by metric, into the config that results.json holds."""
        self._add_metadata("chance", chance)

    def _add_metadata(self, name: str, value: Any) -> None:
        self.config.metadata = (self.config.metadata or {}) | {name: value}

    def scores(self, observations: dict[str, AnyObservation]) -> dict[str, AnyObservation | None]:
        """The return value of `process_results`: an entry for every metric in every document.

        lm_eval gathers from all processes the metrics that the first process has, so a metric
        that this document says nothing about is None and not left out.

        Args:
            observations: by metric, without its bounds.
        """
        return {
            metric: observations.get(metric.removesuffix("_low").removesuffix("_high"))
            for metric, aggregation in self._aggregation_list.items()
            if isinstance(aggregation, functools.partial)
        }

    def build_all_requests(self, **arguments: Any) -> None:
        """Builds the requests as lm_eval does, and refuses cached ones of another dataset.

        lm_eval's cache (``--cache_requests``) ignores metadata: it would score requests that were
        made with other metadata against the answers of these.

        Raises:
            ArgumentError: the cache holds requests of another dataset.
        """
        super().build_all_requests(**arguments)
        for instance in self.instances:
            if instance.doc["dataset_sha256"] != self._dataset_sha256:
                raise ArgumentError(
                    f"lm_eval's cache holds requests of another {self.config.task}, with other "
                    "--metadata; use --cache_requests refresh"
                )


def estimate(observations: Sequence[Sequence[Any] | None], kind: str, field: str) -> float | str:
    """The value or a bound of a metric, from the observations of all documents.

    Args:
        observations: one for each document, as it is or as lm_eval gathers it from another
            process; None from documents that say nothing about the metric.
        kind: as in `CurveTask.declare`.
        field: ``value``, ``low`` or ``high``.

    Returns:
        A number; "N/A" where the observations are too few for it; or for a length beyond the
        longest or below the shortest asked that length as in ">200" and "<20".
    """
    given = tuple(tuple(observation) for observation in observations if observation is not None)
    if not given:
        return "N/A"
    number = getattr(_estimated(kind, given), field)
    if kind in OF_LENGTHS and math.isinf(number):
        lengths = [length for _, length, _ in given]
        return f">{max(lengths):g}" if number > 0 else f"<{min(lengths):g}"
    return number if math.isfinite(number) else "N/A"


@functools.lru_cache(maxsize=1)  # lm_eval asks for the value and the bounds one after the other
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
    """The split ``test`` of a custom dataset of lm_eval.

    Args:
        rows: the documents. Each gets a column ``dataset_sha256``, the hash of them all.
        measured: further columns of each row, which depend on the model and which the hash leaves
            out; None for none.
    """
    import datasets

    digest = hashlib.sha256()  # of the rows as one list of JSON, which may be too long to hold
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
