"""Scores equal one pass of the equations, and do not depend on what else is read, or how."""

import gc

import numpy as np
import pytest
from fake_runner import FakeRunner, scores_alone
from fixtures_engine import (
    Around,
    Damaged,
    OneAtATime,
    random_ids,
    reference_scores,
    scores,
    scores_and_stats,
    small_runner,
    states,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from parity import TOLERANCES
from slow import examples, fast

from griffin_eval.engine.limits import COPIED_STATES, Limits, limits_for
from griffin_eval.engine.reader import Reader
from griffin_eval.engine.scoring import NotFinite, score
from griffin_eval.engine.stats import Stats
from griffin_eval.engine.tree import Scorable, build


# tests/lm/test_lm.py compares log-likelihoods in JAX with the equations.
@pytest.mark.parametrize("runner", fast(["torch"], ["torch", "jax"]), indirect=True)
def test_equals_one_pass_of_the_equations(runner, random_tokens, reference_logprobs, record_parity):
    shapes = [(2, 1), (5, 4), (40, 39), (128, 1), (129, 128), (300, 1)]
    sequences = [Scorable(random_tokens(length), start) for length, start in shapes]
    # A fork inside the longest, within and past the window of 128.
    sequences += [Scorable(sequences[-1].tokens[:n] + random_tokens(9), n - 20) for n in (60, 250)]
    found = scores(runner, sequences, Limits(100, 3))
    for sequence, result in zip(sequences, found, strict=True):
        logprobs, greedy = reference_logprobs(sequence.tokens)
        error = np.abs(result.logprobs - logprobs[sequence.start - 1 :]).max()
        pair, quantity = f"{runner.framework} - equations", "log-probability of a token"
        record_parity(pair, quantity, error, TOLERANCES[pair, quantity])
        assert (result.greedy == greedy[sequence.start - 1 :]).all()


@st.composite
def requests(draw):
    """Sequences of which many begin alike: prefixes of each other, duplicates, forks anywhere."""
    token = st.integers(0, 2)  # few, so that prefixes are shared by chance as well
    sequences = []
    for _ in range(draw(st.integers(1, 7))):
        stem = draw(st.sampled_from(sequences)).tokens if sequences else []
        stem = stem[: draw(st.integers(0, len(stem)))]
        tail = draw(st.lists(token, min_size=0 if stem else 1, max_size=30))
        ids = stem + tail
        sequences.append(Scorable(ids, draw(st.integers(1, len(ids)))))
    return sequences


def check_alone(sequences, results):
    """Compare scores with those of the fake model after each sequence that is read by itself."""
    for sequence, result in zip(sequences, results, strict=True):
        logprobs, greedy = scores_alone(sequence.tokens)
        np.testing.assert_allclose(result.logprobs, logprobs[sequence.start - 1 :], atol=1e-5)
        np.testing.assert_array_equal(result.greedy, greedy[sequence.start - 1 :])


@settings(max_examples=examples(25))
@given(
    sequences=requests(),
    rows=st.sampled_from([1, 4]),
    kept=st.sampled_from([1, 8]),
    padded=st.booleans(),
)
def test_equals_reading_each_request_alone(sequences, rows, kept, padded):
    runner = FakeRunner(padded=padded)
    together, stats = scores_and_stats(runner, sequences, Limits(16, rows, states(runner, kept)))
    check_alone(sequences, together)
    unique = {tuple(s.tokens[:n]) for s in sequences for n in range(1, len(s.tokens))}
    assert stats.tokens_unique == len(unique)
    assert stats.tokens_computed == len(unique) + stats.tokens_again
    assert stats.tokens_requested == sum(len(s.tokens) - 1 for s in sequences)
    if not stats.states_evicted:
        assert stats.tokens_again <= len(unique) / 50


def test_states_that_do_not_fit_are_computed_again():
    runner = FakeRunner()
    # A caterpillar: at every second token of a document another one begins.
    stem = np.random.default_rng(0).integers(60, size=14).tolist()
    sequences = [Scorable([*stem[:n], 60, *stem[:5]], n) for n in range(2, 14, 2)]
    found, stats = scores_and_stats(runner, sequences, Limits(16, 1, states(runner, 8)))
    check_alone(sequences, found)
    assert stats.tokens_again == stats.states_evicted == 0
    found, stats = scores_and_stats(runner, sequences, Limits(16, 1, states(runner, 1)))
    check_alone(sequences, found)
    assert stats.tokens_again > 0
    assert stats.states_evicted > 0


def test_progress_counts_every_token_once():
    long = random_ids(700, 0)
    sequences = [Scorable(ids, 1) for ids in (long, long[:20] + [5], random_ids(2, 0))]
    read = []
    _, stats = scores_and_stats(FakeRunner(), sequences, progress=read.append)
    assert sum(read) == 699 + 0 + 1
    assert stats.tokens_requested == 699 + 20 + 1


@pytest.mark.slow
def test_few_shapes_are_compiled():
    runner = small_runner("jax")
    rng = np.random.default_rng(0)
    sequences = [
        Scorable(rng.integers(60, size=n).tolist(), 1) for n in rng.integers(2, 60, size=24)
    ]
    before = runner.compilations
    for more in range(4):
        asked = sequences[more::3] + sequences[:5]
        for sequence, found in zip(asked, scores(runner, asked, Limits(16, 4)), strict=True):
            logprobs, greedy = reference_scores(tuple(sequence.tokens))
            np.testing.assert_allclose(found.logprobs, logprobs, rtol=1e-6, atol=2e-5)
            np.testing.assert_array_equal(found.greedy, greedy)
    # Steps, for each of two sizes of the pool: first full ones of 8 rows, then of 16 tokens and 8
    # rows or 1, and of 1 token. Logits: of 64 tokens.
    assert runner.compilations - before <= 9


class Limited(Around):
    """A runner that runs out of memory where a step has more tokens or rows than some number."""

    def __init__(self, runner, tokens, rows, error):
        super().__init__(runner)
        self._tokens, self._rows, self._error, self.refused = tokens, rows, error, 0

    def read(self, pool, tokens, lengths, sources, targets, ablations=None):
        if len(tokens) > self._tokens or len(lengths) > self._rows:
            self.refused += 1
            raise self._error
        return self._runner.read(pool, tokens, lengths, sources, targets, ablations)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried …")])
def test_goes_on_in_smaller_steps_when_memory_runs_out(error):
    documents = np.random.default_rng(0).integers(60, size=(4, 40)).tolist()
    sequences = [Scorable([*ids[:n], 60, 1, 2], 1) for ids in documents for n in (9, 25, 40)]
    limited = Limited(FakeRunner(), 40, 2, error)
    check_alone(sequences, scores(limited, sequences, Limits(64, 4)))
    assert 0 < limited.refused < 5


def test_one_pool_is_in_memory_at_a_time():
    """Neither a failed step nor an earlier call keeps its pool, without the garbage collector."""
    runner = OneAtATime(FakeRunner(), "read")
    sequences = [Scorable(random_ids(40, seed), 1) for seed in range(4)]
    gc.disable()
    try:
        for _ in range(2):
            check_alone(sequences, scores(runner, sequences, Limits(64, 4)))
    finally:
        gc.enable()


class Failing(Around):
    """A fake runner that runs out of memory in some of its steps."""

    def __init__(self, steps):
        super().__init__(FakeRunner())
        self._steps, self._count = steps, 0

    def read(self, *arguments):
        self._count += 1
        if self._count in self._steps:
            raise MemoryError
        return self._runner.read(*arguments)


@settings(max_examples=examples(25))
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 40), st.integers(2, 40), st.booleans()), min_size=1, max_size=4
    ),
    steps=st.sets(st.integers(1, 8), max_size=2),
    kept=st.integers(1, 4),
)
@example(lengths=[(0, 3, False)], steps={1}, kept=1)
def test_scores_outlive_a_step_that_runs_out_of_memory(lengths, steps, kept):
    """Tokens that were scored before are not scored again, nor left out. Some have no score."""
    runner, book = Failing(steps), random_ids(40, 0)
    sequences = [
        Scorable(book[:stem] + random_ids(own, n), 1 if scored else stem + own)
        for n, (stem, own, scored) in enumerate(lengths)
    ]
    check_alone(sequences, scores(runner, sequences, Limits(20, 4, states(runner, kept))))


@settings(max_examples=examples(25))
@given(
    stems=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 4), st.integers(1, 20)),
        min_size=1,
        max_size=3,
    ),
    steps=st.sets(st.integers(1, 6), max_size=2),
    kept=st.sampled_from([1, 4, 16]),
)
@example(stems=[(20, 3, 20)], steps={2}, kept=16)
def test_no_state_is_left_when_all_is_read(stems, steps, kept):
    """Neither of an edge whose children began before memory ran out, nor of others."""
    runner = Failing(steps)
    sequences = [
        Scorable(random_ids(stem, seed) + [child, *random_ids(own, child)], 1)
        for seed, (stem, children, own) in enumerate(stems)
        for child in range(children)
    ]
    reader = Reader(
        runner,
        build(sequences),
        Limits(32, 4, states(runner, kept)),
        64,
        Stats(),
        on_step=lambda hidden, parts, bases: None,
        progress=lambda count: None,
        describe=str,
    )
    while reader.busy:
        reader.fill()
        reader.step()
    assert reader.pool.taken == 0


def test_names_what_does_not_fit_at_all():
    sequences = [Scorable([1, 2, 3], 1), Scorable([2] * 30, 29)]
    delivered = []
    with pytest.raises(MemoryError, match="document 1: not even 16 tokens"):
        score(
            Limited(FakeRunner(), 10, 9, MemoryError()),
            sequences,
            limits=Limits(64, 1),
            softmax_dtype="float32",
            on_result=lambda i, result: delivered.append(i),
            describe="document {}".format,
        )
    assert delivered == [0]


def test_a_score_that_is_not_finite_is_named_and_the_rest_delivered():
    good = [Scorable([1, 2, 3, 4], 1), Scorable([1, 2, 9, 9, 9], 3)]
    sequences = [good[0], Scorable([1, 2, 7, 4], 1), good[1]]
    delivered = {}
    with pytest.raises(NotFinite, match="1 of 3 .*: document 1;"):
        score(
            Damaged(FakeRunner(), 7),
            sequences,
            limits=Limits(32, 4),
            softmax_dtype="float32",
            on_result=delivered.__setitem__,
            describe="document {}".format,
        )
    assert sorted(delivered) == [0, 2]
    check_alone(good, [delivered[0], delivered[2]])


def test_limits_follow_from_the_device_and_the_size_of_a_state():
    runner = FakeRunner()
    limits = limits_for(runner)
    assert limits[:2] == (runner.step_tokens, runner.step_rows)
    assert 0 < limits.state_bytes < runner.free_memory()
    assert limits_for(runner, 1000, max_rows=3) == (runner.step_tokens, 3, 1000)
    assert limits_for(runner, max_rows=10**9).rows == runner.step_rows
    for state, rows in ((1, 64), (COPIED_STATES // 3, 3), (COPIED_STATES * 2, 1)):
        assert Limits(512, 64).fitting(state) == Limits(512, rows)
