"""Induction heads (section 6.2): which token followed the trigger when it was there before?

The trigger stands at one earlier place, drawn evenly, and at the end. Metrics: `accuracy` for each
length; `accuracy_by_distance` from the earlier trigger to the one at the end, in tokens, over all
lengths, for distances from x to below 2x; and `accuracy_by_distance_over_window`, the same where x
is the distance over the number of keys that local attention sees: below 1 the earlier trigger is
in view of the question in a single layer, from 1 it is not. Guessing scores 1/15, which is in the
config that results.json holds.

Gu and Dao (2023) test lengths from 2^6 to 2^20, trained like the paper's models with 256.
"""

import math
from collections.abc import Sequence
from typing import Any

from griffin_eval.tasks import symbols
from griffin_eval.tasks.curves import Item, as_split
from griffin_eval.tasks.metadata import window_of
from griffin_eval.tasks.symbol_task import SymbolTask, check, documents

NAME = "griffin_induction_heads"
LENGTHS = tuple(2**power for power in range(6, 13))


class InductionHeads(SymbolTask):
    """The task of lm_eval."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        rows, given = self.dataset["test"], self.config.metadata or {}
        self._window = window_of(**given)
        length, distance = sorted(set(rows["length"])), sorted(set(rows["distance"]))
        points = [f"accuracy@{n}" for n in length]
        points += [_by_distance(n) for n in distance]
        if self._window:
            points += [_by_distance_over_window(n, self._window) for n in distance]
        for metric in dict.fromkeys(points):
            self.declare(metric, "proportion", higher_is_better=True)
        self.state_chance({"accuracy": 1 / len(symbols.ORDINARY)})

    def process_results(
        self, doc: dict[str, Any], results: list[tuple[float, bool]]
    ) -> dict[str, Item | None]:
        ((_, right),) = results
        item = Item(right, 1, f"{doc['length']} {doc['sample']}")
        points = [f"accuracy@{doc['length']}", _by_distance(doc["distance"])]
        if self._window:
            points.append(_by_distance_over_window(doc["distance"], self._window))
        return self.scores(dict.fromkeys(points, item))


def _by_distance(distance: int) -> str:
    return f"accuracy_by_distance@{1 << distance.bit_length() - 1}"


def _by_distance_over_window(distance: int, window: int) -> str:
    power = math.frexp(distance / window)[1] - 1  # of the largest power of two that is not above
    return f"accuracy_by_distance_over_window@{2.0**power:g}"


def dataset(
    lengths: int | Sequence[int] = LENGTHS,
    samples: int = 100,
    seed: int = 0,
    window: int | None = None,
    pretrained: str | None = None,
    **_: Any,
) -> dict[str, Any]:
    """The split ``test``; lm_eval passes ``--metadata`` and the model's arguments.

    Args:
        lengths: tokens of a sequence, the question included.
        samples: sequences of each length.
        seed: of all that is drawn.
        window: keys that local attention sees, the query's own included, which no sequence
            depends on; by default what the checkpoint says.
        pretrained: the model's argument.

    Raises:
        ArgumentError: a value that cannot be.
    """
    numbers = {"samples": samples, "seed": seed} | ({} if window is None else {"window": window})
    chosen = check(NAME, pretrained, lengths, 3, **numbers)
    rows = documents(NAME, symbols.induction_heads, chosen, samples, seed)
    for row in rows:
        row["distance"] = row["length"] - 1 - row["tokens"].index(symbols.ALPHABET[symbols.TRIGGER])
    return as_split(rows)
