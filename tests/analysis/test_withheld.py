"""Facts that are not written and keys that are not seen, for `griffin-eval map`."""

from dataclasses import replace

import numpy as np
import pytest
from fact_pairs import PAIRS, by_the_equations, pair_of
from fixtures_engine import small_runner
from hypothesis import given
from hypothesis import strategies as st
from parity import BASE, MODELS
from slow import fast, slow

from experiments.causal_map.causal_map import Component, Pair, components, measure
from experiments.causal_map.withheld import bins, lost_keys, lost_writes

FRAMEWORKS = ("torch", "jax")
SEVERAL_HEADS = replace(BASE, num_kv_heads=2)  # of keys
LAYERS = tuple(range(BASE.num_layers))
EVERYTHING = Component("everything", LAYERS, ("RG-LRU", "conv", "attention"))
NOTHING = Component("nothing", (), ("RG-LRU", "conv", "attention"))
# A fact of several tokens, one that the document begins with, and one at its last token but one.
SEVERAL = pair_of(3)._replace(changed=np.where(np.arange(30) // 3 == 2, 7, pair_of(3).original))
ALL = [
    *PAIRS,
    SEVERAL._replace(fact_end=9),
    pair_of(4, fact=0, answer=1),
    pair_of(5, length=20, fact=18),
]


def differences(pairs) -> np.ndarray:
    return np.array(
        [by_the_equations(p, p.changed) - by_the_equations(p, p.original) for p in pairs]
    )


@pytest.mark.parametrize(
    ("framework", "config"),
    [
        ("torch", BASE),
        slow("jax", BASE),
        *(slow(framework, SEVERAL_HEADS) for framework in FRAMEWORKS),
    ],
)
def test_everything_withheld_is_everything_lost_and_nothing_is_nothing(framework, config):
    runner = small_runner(framework, config)
    effects = measure(runner, ALL, [], [None])
    between = differences(ALL) if config is BASE else effects.between
    lost = lost_writes(runner, ALL, [EVERYTHING, NOTHING, *components(BASE)], between)
    np.testing.assert_allclose(lost[:, 0], between, rtol=0, atol=5e-5)
    np.testing.assert_allclose(lost[:, 1], 0, rtol=0, atol=5e-5)
    # Every layer matters to some pair, and none is all of it.
    for part in lost[:, 2:].T:
        assert np.abs(part).max() > 1e-4 and np.abs(part - between).max() > 1e-4


@pytest.mark.slow
def test_frameworks_lose_the_same():
    between = differences(ALL)
    keys = [part for part in components(BASE) if "attention" in part.kinds]
    ages = bins(ALL, BASE.visible_keys)
    one, other = (
        (
            lost_writes(small_runner(each), ALL, components(BASE), between),
            lost_keys(small_runner(each), ALL, keys, ages, between),
        )
        for each in FRAMEWORKS
    )
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("framework", fast(["torch"], FRAMEWORKS))
def test_the_last_layers_write_is_what_its_state_keeps(framework):
    """Of the last layer the state alone is read later, so that patching it is the same."""
    config = MODELS["attention first"]
    runner, pairs = small_runner(framework, config), [pair_of(1), pair_of(2, answer=1)]
    last = Component("1 RG-LRU", (1,), ("RG-LRU",))
    between = np.zeros(len(pairs))
    lost = lost_writes(runner, pairs, [last], between)[:, 0]
    for pair, mine in zip(pairs, lost, strict=True):
        left = [state_kept(runner, pair, document) for document in pair[:2]]
        assert mine == pytest.approx(left[0] - left[1], abs=5e-5)


def state_kept(runner, pair: Pair, document: np.ndarray) -> float:
    """L of a document after whose fact the last layer's h is put back."""
    (first,) = np.flatnonzero(pair.original != pair.changed)
    capacity, found = runner.padded_tokens(len(document) + 2), []
    for answer in (pair.original_answer, pair.changed_answer):
        pool, states = runner.open_pool(1, capacity), []
        row, begin = np.zeros(1, int), 0
        for end in (int(first), pair.fact_end):
            source = row if begin else np.array([-1])
            _, pool = runner.read(pool, document[begin:end], np.array([end - begin]), source, row)
            states.append(runner.state_tensors(pool, 0, end))
            begin = end
        kept = states[1] | {"layers.1.h": states[0]["layers.1.h"]}
        pool = runner.write_state(pool, 0, kept, begin, capacity)
        rest = np.concatenate([document[begin:], answer[:-1]])
        hidden, _ = runner.read(pool, rest, np.array([len(rest)]), row, row)
        places = np.arange(len(rest) - len(answer), len(rest))
        scored, _ = runner.score(hidden, places, answer, np.arange(len(answer)), "float32")
        found.append(scored.sum())
    return found[1] - found[0]


@pytest.mark.parametrize("framework", ["torch", slow("jax")])
def test_keys_beyond_an_age_are_a_smaller_window(framework):
    wide, narrow = BASE, replace(BASE, visible_keys=4)
    both = [measure(small_runner(framework, config), ALL, [], [None]) for config in (wide, narrow)]
    between, smaller = (each.changed - each.original for each in both)
    part = Component("all attention", LAYERS, ("attention",))
    ages = [(4, wide.visible_keys), (wide.visible_keys, 99)]
    lost = lost_keys(small_runner(framework, wide), ALL, [part], ages, between)
    np.testing.assert_allclose(between - lost[:, 0, 0], smaller, rtol=0, atol=5e-5)
    assert np.abs(between - smaller).max() > 1e-3
    np.testing.assert_allclose(lost[:, 0, 1], 0, rtol=0, atol=5e-5)


@given(st.integers(2, 3000), st.one_of(st.none(), st.integers(2, 3000)))
def test_bins_hold_every_age_once(length, visible):
    ages = bins([pair_of(0, length=length, fact=0)], visible)
    held = [age for low, high in ages for age in range(low, high)]
    assert held == list(range(1, min(length + 1, visible or length + 1)))
