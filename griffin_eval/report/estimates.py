"""Intervals of the numbers in a report, within the range of their metric."""

from griffin_eval import intervals

# Quantities between 0 and 1, besides those whose name starts with "accuracy".
SHARES = {
    *("exact_match", "acc", "acc_norm", "token_accuracy", "sequence_accuracy"),
    *("from_book", "first", "follows", "prefers", "contains", "f1", "em"),
}
# Quantities of at least 0.
LOSSES = {
    *("nats_per_token", "bits_per_byte", "byte_perplexity", "word_perplexity", "perplexity"),
    *("rank", "capacity", "brier_score"),
}
MIN_ITEMS = 3  # with fewer, an interval would be as wide as the metric's range

Bounds = tuple[float | str | None, float | str | None]


def is_share(quantity: str) -> bool:
    """Return whether a quantity lies between 0 and 1."""
    base = quantity.partition(" (")[0].partition("_by_")[0]
    return base in SHARES or base.startswith("accuracy")


def interval_of(
    quantity: str, value: float | str, error: float | None, items: int | None
) -> Bounds:
    """Return a 95% interval from lm_eval's standard error, without samples.

    A share has Wilson's interval for the number of items with this standard error, at most the
    given number. Other numbers have 1.96 standard errors to each side.

    Args:
        error: Standard error; 0 for a share of independent right or wrong items; None for no
            interval.
        items: Number of items, or None if unknown.
    """
    if error is None or isinstance(value, str):
        return None, None
    if is_share(quantity) and 0 <= value <= 1 and items is not None:
        effective = value * (1 - value) / error**2 if error > 0 else float(items)
        return intervals.wilson(value, min(effective or items, items), items)
    return within_range(quantity, (value - 1.96 * error, value + 1.96 * error))


def within_range(quantity: str, bounds: Bounds) -> Bounds:
    """Clip bounds to the range of the metric."""
    base = quantity.partition(" (")[0]
    lowest = 0.0 if is_share(quantity) or base in LOSSES else None
    highest = 1.0 if is_share(quantity) else None
    low, high = bounds
    if lowest is not None and isinstance(low, int | float):
        low = max(low, lowest)
    if highest is not None and isinstance(high, int | float):
        high = min(high, highest)
    return low, high
