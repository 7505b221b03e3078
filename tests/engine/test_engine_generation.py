"""Generation equals transformers' own, and does not depend on who shares the batch."""

import numpy as np
import pytest
from fake_runner import FakeRunner, continuation_alone
from fixtures_engine import (
    OneAtATime,
    continuations,
    continuations_and_stats,
    random_ids,
    states,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from parity_twins import leaves
from slow import examples, fast, slow

from griffin_eval.engine import generation
from griffin_eval.engine.generation import Prompt
from griffin_eval.engine.limits import Limits
from griffin_eval.engine.sampling import GREEDY, Chooser, Sampling
from griffin_eval.engine.scoring import NotFinite

# tests/lm/test_lm.py compares generation in JAX with lm-eval's hf model.
torch_quickly = pytest.mark.parametrize("runner", fast(["torch"], ["torch", "jax"]), indirect=True)


@torch_quickly
@pytest.mark.parametrize("length", [1, slow(2), 130])
def test_greedy_equals_the_equations(runner, equations, random_tokens, length):
    ids = random_tokens(length)
    (found,) = continuations(runner, [Prompt(ids, 12)])
    assert found == equations([*ids, *found])[length - 1 : -1].argmax(1).tolist()


@torch_quickly
def test_batches_are_sized_by_the_memory_that_decoding_takes(runner):
    rows = 4
    state = runner.start_decoding(rows, 64).rows
    spare = sum(leaf[:, :1].nbytes for leaf in leaves(state) if leaf.ndim == 3)  # a slot of a ring
    taken = sum(leaf.nbytes for leaf in leaves(state))
    assert taken - spare <= rows * runner.state_bytes(64) < taken


SAMPLINGS = (Sampling(), Sampling(0.8), Sampling(1.3, 20, 0.9))


@st.composite
def prompts(draw):
    """Prompts of which some begin alike, equal prompts and prompts of one token included."""
    found = []
    for index in range(draw(st.integers(1, 6))):
        stem = draw(st.sampled_from(found)).tokens if found else []
        stem = stem[: draw(st.integers(0, len(stem)))]
        tail = random_ids(draw(st.integers(0 if stem else 1, 20)), index)
        sampling = draw(st.sampled_from(SAMPLINGS))
        found.append(Prompt([*stem, *tail], draw(st.integers(0, 6)), sampling))
    return found


@settings(max_examples=examples(25))
@given(
    asked=prompts(),
    rows=st.sampled_from([1, 4]),
    kept=st.sampled_from([1, 8]),
    eos=st.integers(0, 60),
    padded=st.booleans(),
)
def test_a_prompt_gets_the_same_in_any_batch(asked, rows, kept, eos, padded):
    runner = FakeRunner(padded=padded)
    arguments = {"seed": 7, "eos_ids": frozenset([eos])}
    limits = Limits(16, rows, states(runner, kept))
    together, stats = continuations_and_stats(runner, asked, limits, **arguments)
    for index, prompt in enumerate(asked):
        chooser = Chooser(prompt.sampling, 7, index)
        alone = continuation_alone(prompt.tokens, prompt.max_new_tokens, chooser, eos)
        assert together[index] == alone
    assert stats.tokens_generated == sum(map(len, together))
    unique = {tuple(p.tokens[:n]) for p in asked for n in range(1, len(p.tokens))}
    assert stats.tokens_unique == len(unique)


def test_a_shared_prompt_is_read_once_and_rows_are_refilled():
    stem = random_ids(40, 0)
    asked = [Prompt([*stem, i], 3 + 4 * (i % 3)) for i in range(9)]
    read = []
    _, stats = continuations_and_stats(FakeRunner(), asked, Limits(512, 2), progress=read.append)
    generated = sum(p.max_new_tokens for p in asked)
    assert stats.tokens_computed == 40 + generated and sum(read) == 40
    assert stats.tokens_requested == sum(40 + p.max_new_tokens for p in asked)
    # Two rows that are refilled at once: never an idle row but at the end.
    assert stats.steps <= 1 + -(-generated // 2) + 11


@pytest.mark.parametrize("failing", ["read", "decode_step"])
def test_a_failed_step_keeps_no_state_in_memory(failing):
    runner, asked = OneAtATime(FakeRunner(), failing), [random_ids(20, n) for n in range(3)]
    found = continuations(runner, [Prompt(ids, 4) for ids in asked], Limits(64, 4))
    assert found == [continuation_alone(ids, 4) for ids in asked]


def test_draws_follow_the_tempered_probabilities():
    logits = np.array([1.0, 3.0, 2.0, -1.0], np.float32)
    chooser = Chooser(Sampling(2.0), 0, 0)
    counts = np.bincount([chooser(logits) for _ in range(10_000)], minlength=4) / 10_000
    p = np.exp(logits / 2.0)
    np.testing.assert_allclose(counts, p / p.sum(), atol=0.015)


def test_top_k_and_top_p_leave_out_the_rest():
    logits = np.log(np.array([0.1, 0.6, 0.29, 0.01]))
    for sampling, possible in (
        (Sampling(1.0, 2), {1, 2}),
        (Sampling(1.0, 0, 0.7), {1, 2}),
        (Sampling(1.0, 0, 0.0), {1}),
        (Sampling(1.0, -1), {0, 1, 2, 3}),
        (Sampling(1e-310), {1}),
    ):
        chooser = Chooser(sampling, 0, 0)
        assert {chooser(logits) for _ in range(1_000)} == possible, sampling
    for infinite, expected in (([1, np.inf, 2], 1), ([-np.inf] * 3, 0), ([1, 2, -np.inf], 1)):
        assert Chooser(Sampling(1e-300), 0, 0)(np.array(infinite, np.float32)) == expected


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8)])
def test_logits_that_are_nan_are_named_and_the_rest_delivered(sampling, monkeypatch):
    runner = FakeRunner()
    decode_step = runner.decode_step
    asked = [Prompt(tokens, 4, sampling) for tokens in ([3, 5], [3, 7], [4, 4, 4])]
    expected = [
        continuation_alone(p.tokens, 4, Chooser(sampling, 0, i)) for i, p in enumerate(asked)
    ]
    alone = []

    def damaged(state, tokens, active):
        """Damage all prompts of a step with one that ends in 7, and that one for good."""
        hidden, state = decode_step(state, tokens, active)
        if 7 in tokens[active > 0]:
            alone.append(active.sum() == 1)
            hidden = hidden * np.nan
        return hidden, state

    monkeypatch.setattr(runner, "decode_step", damaged)
    delivered = {}
    with pytest.raises(NotFinite, match="1 of 3 generations are NaN.*: question 1;"):
        generation.generate(
            runner,
            asked,
            limits=Limits(16, 4),
            eos_ids=frozenset(),
            on_result=delivered.__setitem__,
            describe="question {}".format,
        )
    assert not alone[0] and alone[-1]
    assert delivered == {0: expected[0], 2: expected[2]}
