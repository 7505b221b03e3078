"""The results of `benchmarks.evaluation.run`: the table of times, and whether answers
agree."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.evaluation.requests import HEAD

# Of a log-likelihood, relative above 1 nat and absolute below. In 16 bits hf rounds logits too.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
METRIC_TOLERANCE = 1e-6  # relative; of an accuracy, less than one document


class Timing(NamedTuple):
    """One line of the table: median times in seconds, and tokens; None where it was not measured.

    Attributes:
        task: its name.
        what: ``in the model`` or ``whole command``.
        documents: number of documents of each task.
        framework: the framework that griffin ran in.
        hf: seconds of hf's model.
        griffin: seconds of this package's.
        limit: seconds that the matrix products need.
        tokens: requested, unique and computed.
    """

    task: str
    what: str
    documents: int
    framework: str
    hf: float | None
    griffin: float
    limit: float | None = None
    tokens: tuple[int, int, int] | None = None


def timing_table(timings: Sequence[Timing]) -> Table:
    """The table of times, with the speed-up over hf and the time over the roofline."""
    table = Table(title="seconds, medians")
    for heading in ("task", "time", "griffin"):
        table.add_column(heading, no_wrap=True)
    numbers = ("documents", "hf", "griffin", "speed-up over hf", "roofline", "x roofline")
    for heading in (*numbers, "requested", "unique", "computed"):
        table.add_column(heading, justify="right")
    for timing in timings:
        hf, speed_up, limit, over_limit = "", "", "", ""
        if timing.hf is not None:
            hf, speed_up = f"{timing.hf:.2f}", f"{timing.hf / timing.griffin:.1f}"
        if timing.limit is not None:
            limit, over_limit = f"{timing.limit:.3f}", f"{timing.griffin / timing.limit:.1f}"
        tokens = [str(count) for count in timing.tokens or ("",) * 3]
        table.add_row(
            *(timing.task, timing.what, timing.framework, str(timing.documents)),
            *(hf, f"{timing.griffin:.2f}", speed_up, limit, over_limit, *tokens),
        )
    return table


def tokens_and_limit(
    plan: Mapping[str, Any], stats: Mapping[str, int], rate: float
) -> tuple[tuple[int, int, int], float]:
    """Tokens requested, unique and computed, and the limit in seconds.

    Args:
        plan: of `benchmarks.evaluation.plan`, which knows of no generated tokens.
        stats: of griffin's engine, whose steps of generation are what is left of all it computed.
        rate: FLOP/s.
    """
    decoded = stats["tokens_computed"] - stats["tokens_again"] - stats["tokens_unique"]
    tokens = (plan["requested"] + decoded, plan["unique"] + decoded, stats["tokens_computed"])
    return tokens, (plan["flops"] + decoded * plan["decode_flops"]) / rate


def differing_flags(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[int]:
    """Which log-likelihood requests have another greedy flag."""
    pairs = zip(*(x["answers"].get("loglikelihood", []) for x in (ours, theirs)), strict=True)
    return [i for i, ((_, flag), (_, other)) in enumerate(pairs) if flag != other]


def compare(
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    plan: Mapping[str, Any],
    unclear: frozenset[int],
    dtype: str = "float32",
) -> tuple[list[str], list[str]]:
    """What is the same in griffin's and in hf's answers, and what is not, in words.

    In 16 bits rounding decides metrics, greedy flags and texts: log-likelihoods alone are compared.

    Args:
        ours: of `benchmarks.evaluation.worker.evaluate`.
        theirs: of hf, the same.
        plan: of `benchmarks.evaluation.plan`; what rolling log-likelihoods are compared
        with.
        unclear: requests whose greedy flag rounding decides.
        dtype: of both models.
    """
    same, problems = [], []

    def note(count: int, total: int, what: str, detail: str = "") -> None:
        if total:
            same.append(f"{total - count}/{total} {what}")
        if count:
            problems.append(f"{count} of {total} {what}{detail}")

    tolerance, exact = TOLERANCES[dtype], dtype == "float32"
    if exact:
        wrong = differing_metrics(ours["metrics"], theirs["metrics"])
        note(len(wrong), len(theirs["metrics"]), "metrics", f": {'; '.join(wrong)}")

    a, b = (x["answers"].get("loglikelihood", []) for x in (ours, theirs))
    note(*_far_apart([x for x, _ in a], [x for x, _ in b], tolerance), "log-likelihoods")
    if exact:
        flags = [i for i in differing_flags(ours, theirs) if i not in unclear]
        note(len(flags), len(b), "greedy flags", f": requests {', '.join(map(str, flags))}")
        a, b = (x["answers"].get("generate_until", []) for x in (ours, theirs))
        texts = [(x, y) for x, y in zip(a, b, strict=True) if x != y]
        note(len(texts), len(b), "texts", "".join(f": {x!r}, not {y!r}" for x, y in texts[:1]))

    a = ours["answers"].get("loglikelihood_rolling", [])
    passes = f"documents as one pass of transformers over their first {HEAD} tokens has them"
    note(*_far_apart(a, plan["rolling"], tolerance), passes)

    counted, expected = ours["stats"]["tokens_unique"], plan["unique"]
    if counted != expected:
        problems.append(f"{counted} unique tokens, {expected} by transformers' tokenizer")
    return same, problems


def differing_metrics(ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[str]:
    """Metrics that are not the same, with both values."""
    return [
        f"{name} {ours.get(name)}, not {value}"
        for name, value in theirs.items()
        if not math.isclose(ours.get(name, math.nan), value, rel_tol=METRIC_TOLERANCE)
    ]


def _far_apart(
    found: Sequence[float], expected: Sequence[float], tolerance: float
) -> tuple[int, int]:
    """How many numbers differ by more than the tolerance, and how many there are."""
    far = [
        not abs(a - b) <= tolerance * max(1.0, abs(b)) for a, b in zip(found, expected, strict=True)
    ]
    return sum(far), len(far)
