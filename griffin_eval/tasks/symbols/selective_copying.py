"""Selective copying (section 6.2): repeat data symbols that stand among noise, in their order.

Metrics for each length: `token_accuracy` over the data symbols, each predicted after the right
symbols before it (in the variant ``markers`` no answer is ever read); and `sequence_accuracy`, the
share of sequences in which every symbol is right, which equals that of greedy decoding. Guessing
among the 14 data symbols scores 1/14 and (1/14)^symbols, which are recorded in the config that
results.json holds.
"""

import functools
from collections.abc import Sequence
from typing import Any

from griffin_eval.errors import ArgumentError
from griffin_eval.messages import did_you_mean
from griffin_eval.tasks.curves import Observation, as_split
from griffin_eval.tasks.symbols.sequences import DATA, VARIANTS, selective_copying
from griffin_eval.tasks.symbols.task import SymbolTask, check, documents

NAME = "griffin_selective_copying"
LENGTHS = (1024, 4096)  # the paper's, and Mamba's (Gu and Dao, 2023)


class SelectiveCopying(SymbolTask):
    """The lm_eval task."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        rows = self.dataset["test"]
        for length in sorted(set(rows["length"])):
            for metric in ("token_accuracy", "sequence_accuracy"):
                self.declare(f"{metric}@{length}", "proportion", higher_is_better=True)
        chance = 1 / len(DATA)
        asked = len(rows[0]["answers"])
        self.state_chance({"token_accuracy": chance, "sequence_accuracy": chance**asked})

    def process_results(
        self, doc: dict[str, Any], results: list[tuple[float, bool]]
    ) -> dict[str, Any]:
        right, cluster = [greedy for _, greedy in results], f"{doc['length']} {doc['sample']}"
        return self.scores(
            {
                f"token_accuracy@{doc['length']}": Observation(sum(right), len(right), cluster),
                f"sequence_accuracy@{doc['length']}": Observation(all(right), 1, cluster),
            }
        )


def dataset(
    lengths: int | Sequence[int] = LENGTHS,
    symbols: int = 16,
    variant: str = "markers",
    samples: int = 100,
    seed: int = 0,
    pretrained: str | None = None,
    **_: Any,
) -> dict[str, Any]:
    """Return the split ``test``.

    Args:
        lengths: Number of tokens of a sequence before the first marker, including data.
        symbols: Number of tokens that carry data.
        variant: See `griffin_eval.tasks.symbols.sequences.selective_copying`.
        samples: Number of sequences of each length.
    """
    if variant not in VARIANTS:
        raise ArgumentError(
            f"{NAME}: variant must be {' or '.join(VARIANTS)}, found {variant!r}"
            f"{did_you_mean(str(variant), VARIANTS)}"
        )
    checked = check(NAME, pretrained, lengths, symbols, samples=samples, seed=seed, symbols=symbols)
    draw = functools.partial(selective_copying, symbols=symbols, variant=variant)
    return as_split(
        [row | {"variant": variant} for row in documents(NAME, draw, checked, samples, seed)]
    )
