"""The words of the figures: axes, numbers on axes, and which quantities are shares."""

from griffin_eval.report.results import Run

TOKENS = "tokens"
X_LABELS = {
    "griffin_longctx_position": "position in the document, tokens",
    "griffin_longctx_context": "context, tokens",
    "griffin_extrapolation": "context, multiples of the training length",
    "griffin_passkey": "length, tokens",
    "griffin_selective_copying": "length, tokens",
    "griffin_induction_heads": "length, tokens",
    "exact_match_by_depth": "depth of the entry in the book, %",
    "accuracy_by_distance": "distance of the trigger, tokens",
    "accuracy_by_distance_over_window": "distance of the trigger, windows of local attention",
}
Y_LABELS = {
    "nats_per_token": "loss, nats per token",
    "bits_per_byte": "loss, bits per byte",
    "nats_difference": "loss, difference in nats per token",
    "loglikelihood": "log-likelihood, nats",
    "rank": "rank among the candidates",
}
# Quantities between 0 and 1, besides those whose name starts with "accuracy".
SHARES = (
    "exact_match",
    "exact_match_by_depth",
    "acc",
    "token_accuracy",
    "sequence_accuracy",
    "from_book",
    "first",
    "follows",
    "prefers",
)


def x_label(runs: list[Run], task: str, quantity: str) -> str:
    """The horizontal axis of a quantity's curve; it ends with `TOKENS` if it counts tokens."""
    label = X_LABELS.get(quantity, X_LABELS.get(task))
    if label is not None:
        return label
    if not task.startswith("griffin_phonebook"):
        return "x"
    in_tokens = any(run.metadata.get(task, {}).get("tokens") for run in runs)
    return f"length of the phonebook, {TOKENS if in_tokens else 'entries'}"


def y_label(quantity: str) -> str:
    """The vertical axis of a quantity."""
    return Y_LABELS.get(quantity, quantity.replace("_", " "))


def is_share(quantity: str) -> bool:
    """Whether a quantity lies between 0 and 1, so that its axis does."""
    return quantity in SHARES or quantity.startswith("accuracy")


def short_number(x: float | str) -> str:
    """A number on an axis, powers of two as k and M: 2048 is "2k"."""
    if isinstance(x, str):
        return x
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if x >= size and x % size == 0:
            return f"{x / size:g}{unit}"
    return f"{x:g}"


def exact_number(x: float) -> str:
    """A number as metric names have it: whole numbers with all digits."""
    return f"{int(x)}" if x == int(x) else f"{x:g}"


def bounded(value: float | str, low: float | str | None, high: float | str | None) -> str:
    """A value with its bounds, where both are known."""
    interval = "" if low is None or high is None else f" [{_short(low)}, {_short(high)}]"
    return f"{_short(value)}{interval}"


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
