"""Inputs and the comparison that gradient tests share."""

import numpy as np
from parity import BASE, compare, tokens

LENGTH = 2 * BASE.visible_keys + 3
WHOLE = np.zeros((2, LENGTH), bool)


def batch(config):
    return tokens(config, 2, LENGTH), tokens(config, 2, LENGTH, seed=1)


def compare_gradients(record_parity, pair, quantity, actual, expected):
    assert actual.keys() == expected.keys()
    assert all(np.abs(gradient).max() > 1e-4 for gradient in expected.values())
    names = sorted(expected)
    compare(record_parity, pair, quantity, [actual[n] for n in names], [expected[n] for n in names])
