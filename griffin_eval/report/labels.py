"""The words of the figures: titles, axes, and numbers on axes."""

import math
from collections.abc import Iterable

from griffin_eval.report.results import Point, Run

TOKENS = "tokens"
TASKS = {
    "griffin_phonebook_absent": "Phonebook without the name",
    "griffin_phonebook_counterfactual": "Phonebook with a changed number",
    "griffin_phonebook_jelassi": "Phonebook of Jelassi et al.",
    "griffin_phonebook_rank": "Phonebook, rank of the number",
    "griffin_longctx_context": "Long text",
    "griffin_longctx_position": "Long text",
}
# Label and unit of the horizontal axis, by task or quantity.
X_AXES = {
    "griffin_longctx_position": ("position in the document", TOKENS),
    "griffin_longctx_context": ("context", TOKENS),
    "griffin_extrapolation": ("context", "× the training length"),
    "griffin_passkey": ("length", TOKENS),
    "griffin_association": ("length", TOKENS),
    "griffin_selective_copying": ("length", TOKENS),
    "griffin_induction_heads": ("length", TOKENS),
    "exact_match_by_depth": ("depth of the entry in the book", "%"),
    "accuracy_by_distance": ("distance of the trigger", TOKENS),
    "accuracy_by_distance_over_window": ("distance over the window", ""),
}
QUANTITIES = {
    "nats_per_token": "loss",
    "bits_per_byte": "loss",
    "nats_difference": "loss of longer contexts",
    "acc": "accuracy",
    "acc_norm": "accuracy, normalised by length",
    "token_accuracy": "accuracy of symbols",
    "sequence_accuracy": "accuracy of whole sequences",
    "from_book": "answers from the book",
    "first": "number ranked first",
    "rank": "rank of the number",
}
Y_LABELS = {
    "nats_per_token": "loss, nats per token",
    "bits_per_byte": "loss, bits per byte",
    "nats_difference": "loss, difference in nats per token",
    "loglikelihood": "log-likelihood, nats",
    "rank": "rank among the candidates",
}


def task_words(task: str) -> str:
    """Return the name of a task of this package in words; other tasks keep their name."""
    if not task.startswith("griffin_"):
        return task
    return TASKS.get(task, task.removeprefix("griffin_").replace("_", " ").capitalize())


def chart_title(runs: list[Run], task: str, quantity: str) -> str:
    """Return the title of a curve, such as "Passkey: accuracy by length"."""
    base = quantity.partition("_by_")[0]
    measured = QUANTITIES.get(base, base.replace("_", " "))
    noun, _ = x_axis(runs, task, quantity)
    return f"{task_words(task)}: {measured} by {noun}"


def x_axis(runs: list[Run], task: str, quantity: str) -> tuple[str, str]:
    """Return the label and the unit of the horizontal axis of a quantity's curve."""
    axis = X_AXES.get(quantity, X_AXES.get(task))
    if axis is not None:
        return axis
    if not task.startswith("griffin_phonebook"):
        return "x", ""
    in_tokens = any(run.metadata.get(task, {}).get("tokens") for run in runs)
    return "length of the phonebook", TOKENS if in_tokens else "entries"


def x_label(runs: list[Run], task: str, quantity: str) -> str:
    """Return the label of the horizontal axis; it ends with `TOKENS` if it counts tokens."""
    return ", ".join(part for part in x_axis(runs, task, quantity) if part)


def at_x(runs: list[Run], task: str, quantity: str, x: float | str | None) -> str:
    """Return a point of a curve in words, such as "length 2k tokens"; "" without a curve."""
    if x is None:
        return ""
    if isinstance(x, str):
        return x.replace("_", " ")
    noun, unit = x_axis(runs, task, quantity)
    return f"{noun} {short_number(x)}{'' if unit == '%' else ' '}{unit}".strip()


def y_label(quantity: str) -> str:
    """Return the label of the vertical axis, without the part on the horizontal axis."""
    base = quantity.partition("_by_")[0]
    return Y_LABELS.get(base, QUANTITIES.get(base, base.replace("_", " ")))


def interval_note(points: Iterable[Point], shape: str) -> str:
    """Return a note on the intervals of a figure (``shape``: "Bands") and its items per point."""
    points = list(points)
    parts = []
    if any(point.low is not None and point.high is not None for point in points):
        parts.append(f"{shape}: 95% confidence intervals")
    counts = sorted({point.documents for point in points if point.documents is not None})
    if counts:
        several = f" to {counts[-1]:,}" if len(counts) > 1 else ""
        parts.append(f"n = {counts[0]:,}{several} items per point")
    return "; ".join(parts)


def short_number(x: float | str) -> str:
    """Return a number for an axis: 2048 is "2k", 2**20 is "1M", and 0.125 is "1/8"."""
    if isinstance(x, str):
        return x
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if x >= size and x % size == 0:
            return f"{x / size:g}{unit}"
    mantissa, exponent = math.frexp(x)
    if mantissa == 0.5 and exponent <= 0:
        return f"1/{1 << 1 - exponent}"
    return f"{x:g}"


def exact_number(x: float) -> str:
    """Return a number as metric names have it: whole numbers with all digits."""
    return f"{int(x)}" if x == int(x) else f"{x:g}"


def bounded(value: float | str, low: float | str | None, high: float | str | None) -> str:
    """Return a value with its bounds, if both are known.

    The number of decimals follows two digits of half the interval's width.
    """
    if low is None or high is None or low == high == value:
        return _short(value)
    if not any(isinstance(number, str) for number in (value, low, high)):
        half = (float(high) - float(low)) / 2
        if 1e-5 < half < math.inf:
            decimals = max(0, 1 - math.floor(math.log10(half)))
            texts = [f"{float(number):.{decimals}f}" for number in (value, low, high)]
            return f"{texts[0]} [{texts[1]}, {texts[2]}]"
        return f"{value:.2g} [{low:.2g}, {high:.2g}]"
    return f"{_short(value)} [{_short(low)}, {_short(high)}]"


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
