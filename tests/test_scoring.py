"""Scores equal one pass of transformers, however sequences are batched and cut into chunks."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity import TOLERANCES

from griffin_eval import scoring
from griffin_eval.scoring import Scorable, fastest_batch_size, score


def scores(runner, sequences, batch_size):
    found = [None] * len(sequences)
    score(
        runner,
        sequences,
        batch_size=batch_size,
        softmax_dtype="float32",
        done=lambda i, result: found.__setitem__(i, result),
    )
    return found


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_equals_one_pass_of_transformers(
    runner, batch_size, random_tokens, reference_logprobs, record_parity
):
    shapes = [(2, 1), (5, 4), (40, 39), (128, 1), (129, 128), (300, 250), (700, 1)]
    sequences = [Scorable(random_tokens(length), start) for length, start in shapes]
    for sequence, result in zip(sequences, scores(runner, sequences, batch_size), strict=True):
        logprobs, greedy = reference_logprobs(sequence.tokens)
        error = np.abs(result.logprobs - logprobs[sequence.start - 1 :]).max()
        pair, quantity = f"{runner.framework} - transformers", "log-probability of a token"
        record_parity(pair, quantity, error, TOLERANCES[pair, quantity])
        assert (result.greedy == greedy[sequence.start - 1 :]).all()


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_batches_and_chunks_change_nothing(runner, data, random_tokens, monkeypatch):
    monkeypatch.setattr(scoring, "CHUNK", data.draw(st.sampled_from([3, 8, 512]), "chunk"))
    shape = st.integers(2, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n - 1)))
    shapes = data.draw(
        st.lists(st.tuples(shape, st.integers(0, 1)), min_size=1, max_size=6), "rows"
    )
    sequences = [Scorable(random_tokens(n, seed), start) for (n, start), seed in shapes]
    together = scores(runner, sequences, data.draw(st.integers(1, 4), "batch size"))
    for sequence, result in zip(sequences, together, strict=True):
        (alone,) = scores(runner, [sequence], 1)
        np.testing.assert_allclose(result.logprobs, alone.logprobs, atol=2e-5)
        assert len(result.logprobs) == len(sequence.tokens) - sequence.start


def test_progress_counts_every_token_read(runner, random_tokens):
    sequences = [Scorable(random_tokens(n), 1) for n in (700, 20, 2)]
    read = []
    score(
        runner,
        sequences,
        batch_size=2,
        softmax_dtype="float32",
        done=lambda i, result: None,
        progress=read.append,
    )
    assert sum(read) == 700 + 20 + 2 - 3


def test_softmax_dtype_is_honoured(runner, random_tokens):
    tokens = Scorable(random_tokens(50), 1)

    def total(dtype):
        found = []
        score(
            runner,
            [tokens],
            batch_size=1,
            softmax_dtype=dtype,
            done=lambda i, result: found.append(result.logprobs),
        )
        return found[0]

    assert 0 < np.abs(total("float64") - total("float32")).max() < 1e-5
    assert 1e-3 < np.abs(total("bfloat16") - total("float32")).max() < 0.1


class Limited:
    """A runner that runs out of memory above some number of rows."""

    def __init__(self, runner, rows, error):
        self._runner, self._rows, self._error = runner, rows, error

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def step(self, tokens, lengths, state):
        if len(tokens) > self._rows:
            raise self._error
        return self._runner.step(tokens, lengths, state)


def test_batch_size_backs_off_when_memory_runs_out(runner, monkeypatch):
    monkeypatch.setattr(scoring, "_tokens_per_second", _count_rows)
    limited = Limited(runner, 4, RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert fastest_batch_size(limited, 20, 64) == 4
    assert fastest_batch_size(Limited(runner, 0, MemoryError()), 20, 64) == 1
    assert fastest_batch_size(runner, 20, 6) == 4
    with pytest.raises(RuntimeError, match="shapes"):
        fastest_batch_size(Limited(runner, 1, RuntimeError("shapes differ")), 20, 64)


def _count_rows(runner, batch, length):
    """As if time did not depend on the batch."""
    tokens = np.ones((batch, length), np.int32)
    runner.step(tokens, np.full(batch, length, np.int32), runner.init_state(batch, length))
    return float(batch)
