"""Induction heads (section 6.2): which token followed the trigger when it occurred before?

The trigger stands at one random earlier position, drawn evenly, and at the end. Metrics: `accuracy`
for each length; `accuracy_by_distance`, over all lengths, where the earlier trigger is x to below
2x tokens before the last one; and `accuracy_by_distance_over_window`, where x is that distance
divided by the number of keys that local attention sees: below 1 the last token sees the earlier
trigger within a single layer, from 1 on it does not. Guessing scores 1/15, which is recorded in the
config that results.json holds.

Gu and Dao (2023) test lengths from 2^6 to 2^20 with models trained, like the paper's, with 256.
"""

import math
from collections.abc import Sequence
from typing import Any

from griffin_eval.arguments import visible_keys_argument
from griffin_eval.tasks.curves import Observation, as_split
from griffin_eval.tasks.metadata import visible_keys_of
from griffin_eval.tasks.symbols import sequences
from griffin_eval.tasks.symbols.task import SymbolTask, check, documents

NAME = "griffin_induction_heads"
LENGTHS = tuple(2**power for power in range(6, 13))


class InductionHeads(SymbolTask):
    """The lm_eval task."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        rows = self.dataset["test"]
        self._visible_keys = visible_keys_of(**self.config.metadata or {})
        lengths, distances = sorted(set(rows["length"])), sorted(set(rows["distance"]))
        points = [f"accuracy@{n}" for n in lengths]
        points += [_by_distance(n) for n in distances]
        if self._visible_keys:
            points += [_by_distance_over_window(n, self._visible_keys) for n in distances]
        for metric in dict.fromkeys(points):
            self.declare(metric, "proportion", higher_is_better=True)
        self.state_chance({"accuracy": 1 / len(sequences.ORDINARY)})

    def process_results(
        self, doc: dict[str, Any], results: list[tuple[float, bool]]
    ) -> dict[str, Any]:
        ((_, right),) = results
        observation = Observation(right, 1, cluster=f"{doc['length']} {doc['sample']}")
        points = [f"accuracy@{doc['length']}", _by_distance(doc["distance"])]
        if self._visible_keys:
            points.append(_by_distance_over_window(doc["distance"], self._visible_keys))
        return self.scores(dict.fromkeys(points, observation))


def _by_distance(distance: int) -> str:
    return f"accuracy_by_distance@{1 << distance.bit_length() - 1}"


def _by_distance_over_window(distance: int, visible_keys: int) -> str:
    power = math.frexp(distance / visible_keys)[1] - 1  # floor of the base-2 logarithm
    return f"accuracy_by_distance_over_window@{2.0**power:g}"


def dataset(
    lengths: int | Sequence[int] = LENGTHS,
    samples: int = 100,
    seed: int = 0,
    visible_keys: int | None = None,
    window: int | None = None,
    pretrained: str | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Return the split ``test``.

    Args:
        lengths: Number of tokens of a sequence, including the last trigger.
        samples: Number of sequences of each length.
        visible_keys: Number of keys that a local attention query sees, including its own; by
            default the checkpoint's. The sequences do not depend on it.
        window: Another name of ``visible_keys``.
    """
    given = visible_keys_argument(visible_keys=visible_keys, window=window)
    checked = check(NAME, pretrained, lengths, 3, samples=samples, seed=seed, **given)
    rows = documents(NAME, sequences.induction_heads, checked, samples, seed)
    for row in rows:
        row["distance"] = (
            row["length"] - 1 - row["tokens"].index(sequences.ALPHABET[sequences.TRIGGER])
        )
    return as_split(rows)
