"""Estimates with confidence intervals for items in clusters, such as questions about one book.

Items of one cluster are not independent, so the intervals depend on the number of clusters.

References:
    Wilson (1927), Probable inference, the law of succession, and statistical inference.
    Korn and Graubard (1998), Confidence intervals for proportions with small expected number of
    positive counts estimated from survey data.
    Agresti and Coull (1998), Approximate is better than "exact" for interval estimation of binomial
    proportions.
    Modarressi et al. (2025), NoLiMa: Long-context evaluation beyond literal matching.
"""

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000  # number of bootstrap resamples


class Estimate(NamedTuple):
    """An estimate with its confidence interval ``low`` to ``high``."""

    value: float
    low: float
    high: float
    items: int  # number of items
    clusters: int  # number of their clusters


def proportion(
    values: Sequence[float], clusters: Sequence[Hashable], confidence: float = 0.95
) -> Estimate:
    """Return the share of successes, with a clustered Wilson interval.

    This is Wilson's interval (1927) for the effective number of items: the number of items divided
    by the design effect, which is the variance of the share between clusters over the variance that
    independent items would have (Korn and Graubard, 1998, with Wilson's interval in place of
    Clopper and Pearson's). It is at most the number of items. If all values are equal, which shows
    no variance, it is the number of clusters. The quantile is Student's for that many clusters.

    Args:
        values: 0 or 1 for each item.
        clusters: Cluster of each item.
        confidence: Probability that such an interval contains the true share.
    """
    x, index = _sorted(values, clusters)
    n, groups = len(x), int(index.max()) + 1
    share = x.mean()
    variance = _ratio_variance(x, np.ones(n), index)
    if 0 < share < 1 and variance > 0:
        effective = min(share * (1 - share) / variance, n)
    else:
        effective = groups
    low, high = wilson(float(share), effective, groups, confidence)
    return Estimate(float(share), low, high, n, groups)


def wilson(
    share: float, effective: float, groups: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Return Wilson's interval (1927) of a share, with Student's quantile.

    Args:
        share: Share of successes.
        effective: Number of independent items with the same variance.
        groups: Number of clusters, which gives the quantile its degrees of freedom.
        confidence: Probability that such an interval contains the true share.
    """
    from scipy import special

    quantile = special.stdtrit(groups - 1, (1 + confidence) / 2) if groups > 1 else np.inf
    slack = quantile**2 / effective  # z and n enter only as z² / n
    if not np.isfinite(slack):
        return 0.0, 1.0
    center = (share + slack / 2) / (1 + slack)
    half = np.sqrt(slack * share * (1 - share) + slack**2 / 4) / (1 + slack)
    return float(max(center - half, 0.0)), float(min(center + half, 1.0))


def ratio(
    values: Sequence[float],
    weights: Sequence[float],
    clusters: Sequence[Hashable],
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Return Σ values / Σ weights, such as nats over tokens, with a bootstrap of whole clusters.

    The bounds are the percentiles of the bootstrap, widened by the ratio of Student's quantile to
    the normal one, since percentiles of few clusters are too narrow. A single cluster shows no
    variance, so its interval is infinite.

    Args:
        values: Numerator of each item.
        weights: Denominator of each item, positive; ones for a mean.
        clusters: Cluster of each item.
        confidence: Probability that such an interval contains the true ratio.
    """
    from scipy import special

    x, index = _sorted(values, clusters)
    w = np.asarray(weights, np.float64)
    groups = int(index.max()) + 1
    top, bottom = np.bincount(index, x), np.bincount(index, w)
    value = float(top.sum() / bottom.sum())
    if groups == 1:
        return Estimate(value, -np.inf, np.inf, len(x), 1)
    drawn = np.random.default_rng(seed).integers(groups, size=(RESAMPLES, groups))
    resampled = top[drawn].sum(1) / bottom[drawn].sum(1)
    tail = (1 + confidence) / 2
    # n / (n - 1): a resample varies less than a sample does.
    widen = special.stdtrit(groups - 1, tail) / special.ndtri(tail)
    widen *= np.sqrt(groups / (groups - 1))
    low, high = value + (np.quantile(resampled, [1 - tail, tail]) - value) * widen
    return Estimate(value, float(low), float(high), len(x), groups)


def standard_error(
    values: Sequence[float], weights: Sequence[float], clusters: Sequence[Hashable]
) -> float:
    """Return the standard error of Σ values / Σ weights over clusters, by linearisation; 0 for one
    cluster. The arguments are those of `ratio`."""
    x, index = _sorted(values, clusters)
    return math.sqrt(_ratio_variance(x, np.asarray(weights, np.float64), index))


def capacity(
    values: Sequence[float],
    lengths: Sequence[float],
    clusters: Sequence[Hashable],
    confidence: float = 0.95,
    level: float = 0.5,
    seed: int = 0,
) -> Estimate:
    """Return the largest length at which the share of successes is at least ``level``.

    The shares are fitted by a decreasing isotonic regression, weighted by the number of items;
    between two lengths the fit is linear in the logarithm of the length. The capacity is the last
    length at which the fit is at least ``level``: ``inf`` if the fit never falls below, ``-inf`` if
    it is below at the shortest length.

    The bounds are percentiles of a bootstrap of clusters within each length. Clusters that all
    agree show no variance, as if the share were known; therefore a cluster of successes and one of
    failures are added to the population, as in Agresti and Coull (1998). The interval covers the
    choice of clusters; only more lengths can show how the curve runs between two of them.

    Args:
        values: 0 or 1 for each item.
        lengths: Length of each item, positive.
        clusters: Cluster of each item; clusters of different lengths are different.
        confidence: Probability that such an interval contains the true capacity.
        level: Share between 0 and 1.
    """
    x, length = np.asarray(values, np.float64), np.asarray(lengths, np.float64)
    grid = np.unique(length)
    shares, weights = np.empty(len(grid)), np.empty(len(grid))
    resampled = np.empty((RESAMPLES, len(grid)))
    generator = np.random.default_rng(seed)
    groups = 0
    for column, each in enumerate(grid):
        here = length == each
        successes, index = _sorted(x[here], [clusters[i] for i in np.flatnonzero(here)])
        shares[column], weights[column] = successes.mean(), len(successes)
        top, bottom = np.bincount(index, successes), np.bincount(index).astype(np.float64)
        top = np.append(top, [0.0, bottom.mean()])
        bottom = np.append(bottom, [bottom.mean()] * 2)
        drawn = generator.integers(len(top), size=(RESAMPLES, len(top) - 2))
        resampled[:, column] = top[drawn].sum(1) / bottom[drawn].sum(1)
        groups += len(top) - 2
    value = _crossing(grid, shares, weights, level)
    rows, which = np.unique(resampled, axis=0, return_inverse=True)  # few clusters repeat rows
    crossings = np.array([_crossing(grid, row, weights, level) for row in rows])[which.ravel()]
    tail = (1 + confidence) / 2
    # Percentiles may be infinite, so do not interpolate between them.
    low, high = np.quantile(crossings, [1 - tail, tail], method="inverted_cdf")
    return Estimate(value, float(min(low, value)), float(max(high, value)), len(x), groups)


def effective_length(
    values: Sequence[float],
    lengths: Sequence[float],
    clusters: Sequence[Hashable],
    confidence: float = 0.95,
    level: float = 0.85,
    seed: int = 0,
) -> Estimate:
    """Return the longest length up to which scores stay near the score at the shortest length.

    This is NoLiMa's effective length (Modarressi et al., 2025): up to it every share of successes
    is at least ``level`` times the share at the shortest length. It is one of the lengths: ``inf``
    if no share is below, NaN if nothing is right at the shortest length.

    The bounds are percentiles of a bootstrap of clusters, as in `capacity`, but a cluster with
    items of several lengths is drawn with all of them. Other arguments are as in `capacity`.
    """
    x, index = _sorted(values, clusters)
    grid, column = np.unique(np.asarray(lengths, np.float64), return_inverse=True)
    groups = int(index.max()) + 1
    right, asked = np.zeros((groups, len(grid))), np.zeros((groups, len(grid)))
    np.add.at(right, (index, column), x)
    np.add.at(asked, (index, column), 1.0)
    value = float(_last_near_the_first(grid, (right.sum(0) / asked.sum(0))[None], level)[0])
    if math.isnan(value):
        return Estimate(math.nan, math.nan, math.nan, len(x), groups)
    generator = np.random.default_rng(seed)
    top, bottom = np.zeros((RESAMPLES, len(grid))), np.zeros((RESAMPLES, len(grid)))
    # Only clusters with items of the same lengths replace each other.
    for pattern in np.unique(asked > 0, axis=0):
        members = ((asked > 0) == pattern).all(1)
        mean = asked[members].mean(0)
        own_top = np.concatenate([right[members], np.stack([np.zeros_like(mean), mean])])
        own_bottom = np.concatenate([asked[members], np.stack([mean, mean])])
        drawn = generator.integers(len(own_top), size=(RESAMPLES, len(own_top) - 2))
        top += own_top[drawn].sum(1)
        bottom += own_bottom[drawn].sum(1)
    found = _last_near_the_first(grid, top / bottom, level)
    found = found[~np.isnan(found)]
    tail = (1 + confidence) / 2
    low, high = np.quantile(found, [1 - tail, tail], method="inverted_cdf")
    return Estimate(value, float(min(low, value)), float(max(high, value)), len(x), groups)


def _last_near_the_first(grid: np.ndarray, shares: np.ndarray, level: float) -> np.ndarray:
    """Return the effective length of each row of shares [rows, lengths]."""
    below = shares < level * shares[:, :1] - 1e-12
    before = np.maximum(below.argmax(1) - 1, 0)
    last = np.where(below.any(1), grid[before], math.inf)
    return np.where(shares[:, 0] > 0, last, math.nan)


def _crossing(grid: np.ndarray, shares: np.ndarray, weights: np.ndarray, level: float) -> float:
    """Return the last length at which the decreasing fit is at least ``level``."""
    from scipy import optimize

    fit = optimize.isotonic_regression(shares, weights=weights, increasing=False).x
    above = int((fit >= level - 1e-12).sum())  # a mean of two shares may be off by rounding
    if above == 0:
        return -math.inf
    if above == len(fit):
        return math.inf
    part = (fit[above - 1] - level) / (fit[above - 1] - fit[above])
    start, end = np.log(grid[above - 1 : above + 1])
    return float(np.exp(start + max(part, 0.0) * (end - start)))


def _sorted(
    values: Sequence[float] | np.ndarray, clusters: Sequence[Hashable]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the values as float64 [N], and the index of each value's cluster, int [N].

    Clusters are numbered in sorted order, since a bootstrap must not depend on the order in which
    several processes deliver their items.
    """
    numbers = {cluster: i for i, cluster in enumerate(sorted(set(clusters), key=repr))}
    return np.asarray(values, np.float64), np.array([numbers[cluster] for cluster in clusters])


def _ratio_variance(x: np.ndarray, w: np.ndarray, index: np.ndarray) -> float:
    """Return the variance of Σ x / Σ w over clusters, by linearisation; 0 for one cluster."""
    top, bottom = np.bincount(index, x), np.bincount(index, w)
    groups = len(top)
    if groups == 1:
        return 0.0
    residual = (top - top.sum() / bottom.sum() * bottom) / bottom.sum()
    return float(groups / (groups - 1) * np.square(residual).sum())
