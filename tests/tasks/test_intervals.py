"""Estimates over clusters against scipy, and the coverage of their intervals."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from slow import ci, examples, fast, slow

from griffin_eval.intervals import capacity, effective_length, proportion, ratio

GRID = (20, 50, 100, 200)


def books(rng, share, agreement, count, questions):
    """Draw right (1) and wrong (0) answers to questions on books; return them and their books.
    ``agreement`` is the correlation within a book."""
    if agreement and 0 < share < 1:
        each = rng.beta(*(np.array([share, 1 - share]) * (1 / agreement - 1)), size=count)
    else:
        each = np.full(count, share)
    answers = rng.random((count, questions)) < each[:, None]
    return answers.astype(float).ravel(), np.repeat(np.arange(count), questions)


# Proportions


def test_of_independent_items_it_is_wilsons():
    for right in (
        1,
        40,
        200,
        399,
    ):
        values = [1.0] * right + [0.0] * (400 - right)
        found = proportion(values, range(400))
        expected = stats.binomtest(right, 400).proportion_ci(method="wilson")
        assert found.value == right / 400
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-3)
        assert (found.items, found.clusters) == (400, 400)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_where_all_are_alike_it_is_clusters_that_count(value):
    found = proportion([value] * 240, [i // 8 for i in range(240)])
    expected = stats.binomtest(int(30 * value), 30).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.02)


def test_one_cluster_says_nothing():
    assert proportion([1, 0, 1], "aaa")[:3] == (pytest.approx(2 / 3), 0, 1)
    assert ratio([1, 2], [1, 1], "aa")[:3] == (1.5, -math.inf, math.inf)


CASES = [*itertools.product([0.1, 0.5, 0.9], [0.0, 0.3, 0.9], [10, 30])]


@pytest.mark.parametrize("case", fast([(0.1, 0.9, 10), (0.5, 0.3, 30), (0.9, 0.0, 10)], CASES))
def test_coverage_of_proportions(case):
    """Intervals hold the true share even where Wilson's over all items hold it half of the time."""
    share, agreement, count = case
    rng = np.random.default_rng([int(share * 10), int(agreement * 10), count])
    ours = theirs = 0
    for _ in range(400):
        values, clusters = books(rng, share, agreement, count, 8)
        found = proportion(values, clusters)
        ours += found.low <= share <= found.high
        if agreement == 0.9:
            plain = stats.binomtest(int(values.sum()), len(values)).proportion_ci(method="wilson")
            theirs += plain.low <= share <= plain.high
    assert 0.92 <= ours / 400
    if agreement == 0.9:
        assert theirs / 400 < 0.7


# Ratios


def test_of_a_mean_it_is_nearly_students():
    values = np.random.default_rng(3).normal(5, 2, 40)
    found = ratio(values, np.ones(40), range(40))
    expected = stats.t.interval(0.95, 39, values.mean(), stats.sem(values))
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx(expected, abs=0.15)


@pytest.mark.parametrize("count", [5, 30])
def test_coverage_of_ratios(count):
    rng, held = np.random.default_rng(count), 0
    for _ in range(400):
        weights = rng.integers(1, 20, size=(count, 4))
        nats = weights * (2 + rng.normal(size=(count, 1)) + rng.normal(size=(count, 4)))
        found = ratio(nats.ravel(), weights.ravel(), np.repeat(np.arange(count), 4))
        held += found.low <= 2 <= found.high
    assert 0.92 <= held / 400 <= 0.98


def test_the_order_of_items_does_not_matter():
    rng = np.random.default_rng(0)
    values, clusters = books(rng, 0.5, 0.3, 12, 4)
    lengths, clusters = np.repeat((20, 50, 100), 16), [f"book {i}" for i in clusters]
    for estimate in (
        lambda x, n, which: proportion(x, which),
        ratio,
        capacity,
    ):
        order = rng.permutation(len(values))
        shuffled = values[order], lengths[order], [clusters[i] for i in order]
        assert estimate(*shuffled) == pytest.approx(estimate(values, lengths, clusters))


# Capacities


def measured(shares, count=20, questions=5, grid=GRID):
    """Make answers with exactly these shares of right ones, on ``count`` equal books per length."""
    values, lengths, clusters = [], [], []
    for length, share in zip(grid, shares, strict=True):
        right = round(share * questions)
        assert right == share * questions
        values += ([1.0] * right + [0.0] * (questions - right)) * count
        lengths += [length] * count * questions
        clusters += [f"{length} {i // questions}" for i in range(count * questions)]
    return values, lengths, clusters


def test_capacities():
    for shares, expected in (
        ((1, 0.8, 0.2, 0), math.sqrt(50 * 100)),  # half of the way over the logarithm
        ((1, 1, 1, 0), math.sqrt(100 * 200)),
        ((0.6, 0.4, 0.2, 0), math.sqrt(20 * 50)),
        ((0.2, 0.8, 0.2, 0), 50),  # pooled: 0.5, 0.5, 0.2, 0
        ((1, 0.8, 0.8, 0.6), math.inf),
        ((0.4, 0.4, 0, 0), -math.inf),
    ):
        found = capacity(*measured(shares))
        assert found.value == pytest.approx(expected)
        assert found.low <= found.value <= found.high
        assert (found.items, found.clusters) == (400, 80)


@settings(max_examples=examples(30))
@given(st.lists(st.integers(0, 5), min_size=4, max_size=4))
def test_the_fit_is_scipys_and_it_crosses_at_half(rights):
    values, lengths, clusters = measured([right / 5 for right in rights], count=1)
    found = capacity(values, lengths, clusters).value
    fit = optimize.isotonic_regression([r / 5 for r in rights], increasing=False).x
    if math.isinf(found):
        assert (fit >= 0.5 - 1e-9).all() if found > 0 else (fit < 0.5).all()
    else:
        assert np.interp(np.log(found), np.log(GRID), fit) == pytest.approx(0.5)


def test_books_that_all_agree_leave_some_doubt():
    found = capacity(*measured((1, 1, 0, 0), count=5))
    assert 50 < found.low < 0.9 * found.value < 1.1 * found.value < found.high < 200
    one_book = capacity(*measured((1, 1, 0, 0), count=1))
    assert (one_book.low, one_book.high) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    "shares",
    [
        ci((0.95, 0.7, 0.3, 0.05)),
        slow((0.995, 0.98, 0.02, 0.01)),
        slow((0.6, 0.55, 0.48, 0.4)),
    ],
)
def test_coverage_of_capacities(shares):
    rng, held = np.random.default_rng(7), 0
    truth = np.exp(np.interp(-0.5, -np.array(shares), np.log(GRID)))
    for _ in range(40):
        drawn = [books(rng, share, 0.3, 12, 4) for share in shares]
        values = np.concatenate([answers for answers, _ in drawn])
        lengths = np.repeat(GRID, 48)
        clusters = [f"{n} {i}" for n, (_, index) in zip(GRID, drawn, strict=True) for i in index]
        found = capacity(values, lengths, clusters)
        held += found.low <= truth <= found.high
    assert held >= 36


# Effective lengths


def test_effective_lengths():
    for shares, expected in (
        ((1, 0.8, 0.8, 0.8), 20),
        ((1, 1, 0.2, 1), 50),  # a score that comes back does not count
        ((0.8, 0.8, 0.6, 0), 50),
        ((0.2, 0.4, 0.6, 0.2), math.inf),
        ((0, 1, 1, 1), math.nan),
    ):
        found = effective_length(*measured(shares))
        assert found.value == pytest.approx(expected, nan_ok=True)
        if expected == expected:
            assert found.low <= found.value <= found.high


def test_clusters_that_are_asked_at_every_length_are_drawn_whole():
    """Half of the texts are easy, and their answers are right at every length."""
    easy = {f"text {i}": i % 2 for i in range(40)}
    asked = [(right, length, name) for name, right in easy.items() for length in GRID]
    values, lengths, together = zip(*asked, strict=True)
    found = effective_length(values, lengths, together)
    assert (found.low, found.value, found.clusters) == (math.inf, math.inf, 40)
    apart = [f"{name} {length}" for _, length, name in asked]
    assert effective_length(values, lengths, apart).low < GRID[-1]
