"""Published scores of the paper's benchmarks, to be shown beside measured ones."""

from typing import NamedTuple


class Benchmark(NamedTuple):
    """A column of the paper's Table 1 as lm_eval measures it.

    Attributes:
        task: task or group of lm_eval in results.json.
        metric: metric of the task. The paper: "character normalized accuracy on MMLU, HellaSwag,
            PIQA, ARC-E and ARC-C, while we report absolute accuracy on WinoGrande with partial
            scoring" (section 3.2).
        shots: number of examples before the question, which the paper does not name; for MMLU,
            HellaSwag and PIQA as in RecurrentGemma's model card.
    """

    task: str
    metric: str
    shots: int


class Published(NamedTuple):
    """A row of a published table.

    Attributes:
        model: name of the model.
        source: key of ``SOURCES``.
        scores: scores in percent, by name of the benchmark.
    """

    model: str
    source: str
    scores: dict[str, float]


BENCHMARKS = {
    "MMLU": Benchmark("griffin_paper_mmlu", "acc_norm", 5),
    "HellaSwag": Benchmark("hellaswag", "acc_norm", 0),
    "PIQA": Benchmark("piqa", "acc_norm", 0),
    "WinoGrande": Benchmark("winogrande", "acc", 0),
    "ARC-E": Benchmark("arc_easy", "acc_norm", 0),
    "ARC-C": Benchmark("arc_challenge", "acc_norm", 0),
}

SOURCES = {
    "model card": "https://ai.google.dev/gemma/docs/recurrentgemma/model_card. MMLU 5-shot, top-1, "
    "which need not be the answers' texts as in griffin_paper; HellaSwag and PIQA 0-shot; "
    "WinoGrande partial score; shots of ARC are not given.",
}


PUBLISHED = (
    Published(
        "RecurrentGemma 2B",
        "model card",
        {
            "MMLU": 38.4,
            "HellaSwag": 71.0,
            "PIQA": 78.5,
            "WinoGrande": 67.8,
            "ARC-E": 72.9,
            "ARC-C": 42.3,
        },
    ),
    Published(
        "RecurrentGemma 9B",
        "model card",
        {"MMLU": 60.5, "HellaSwag": 80.4, "PIQA": 81.3, "WinoGrande": 73.6},
    ),
)
