"""Requests that lose a part of the memory: as the equations say, with contexts read once."""

import numpy as np
import pytest
from fake_runner import FakeRunner
from fixtures_engine import random_ids, scores, scores_and_stats, small_runner, states
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from parity import BASE, MODELS, weights
from parity_reference import reference_logits
from slow import examples, fast

from griffin_eval.engine.limits import Limits
from griffin_eval.engine.parallel import divide
from griffin_eval.engine.tree import Ablation, Scorable
from griffin_eval.errors import ArgumentError
from griffin_eval.lm.model import GriffinLM

FRAMEWORKS = ("torch", "jax")
KINDS = list(Ablation) + [Ablation.RECURRENT | Ablation.ATTENTION]


def expected_scores(sequence: Scorable, config=BASE) -> np.ndarray:
    """Compute by the equations in float64: a memory is lost before token ``start - 1``."""
    cut = sequence.start - 1
    ids = np.array(sequence.tokens)
    logits = reference_logits(
        config,
        weights(config),
        ids,
        recurrent_cut=cut if Ablation.RECURRENT in sequence.ablation else 0,
        attention_cut=cut if Ablation.ATTENTION in sequence.ablation else 0,
    )[cut:-1]
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    return logprobs[np.arange(len(logprobs)), ids[sequence.start :]]


@st.composite
def requests(draw):
    """Sequences that begin alike, of which some forget, at the same place or at different ones."""
    stem = draw(st.lists(st.integers(0, 60), min_size=1, max_size=30))
    tails = st.lists(st.integers(0, 2), min_size=1, max_size=12)
    found = []
    for _ in range(draw(st.integers(1, 6))):
        ids = stem[: draw(st.integers(1, len(stem)))] + draw(tails)
        kind = draw(st.sampled_from(KINDS))
        found.append(Scorable(ids, draw(st.integers(1, len(ids) - 1)), kind))
    return found


def check_scores(framework, sequences, rows, kept, config=BASE):
    runner = small_runner(framework, config)
    found = scores(runner, sequences, Limits(16, rows, states(runner, kept)))
    for sequence, result in zip(sequences, found, strict=True):
        np.testing.assert_allclose(result.logprobs, expected_scores(sequence, config), atol=2e-5)


@settings(max_examples=examples(8))
@given(sequences=requests(), rows=st.sampled_from([1, 4]), kept=st.sampled_from([1, 8]))
def test_equals_the_equations_in_torch(sequences, rows, kept):
    check_scores("torch", sequences, rows, kept)


@pytest.mark.ci
def test_equals_the_equations_in_jax():
    stem = random_ids(12, 3)  # one step reads them, another one all that follows
    sequences = [Scorable([*stem, 1, 2, 3], 12, kind) for kind in KINDS]
    check_scores("jax", sequences, rows=4, kept=8, config=MODELS["attention first"])


@pytest.mark.parametrize("model", ["one visible key", "mqa", "paper hawk", "every field changed"])
def test_other_blocks(model):
    config = MODELS[model]
    sequences = [Scorable(random_ids(40, 3), 25, kind) for kind in KINDS]
    found = scores(small_runner("torch", config), sequences)
    for sequence, result in zip(sequences, found, strict=True):
        np.testing.assert_allclose(result.logprobs, expected_scores(sequence, config), atol=1e-4)


def test_a_shared_context_is_read_once():
    context, target = random_ids(200, 0), random_ids(20, 1)
    sequences = [Scorable(context + target, 200, kind) for kind in KINDS]
    _, stats = scores_and_stats(FakeRunner(), sequences, Limits(32, 4))
    assert stats.tokens_computed == 199 + len(KINDS) * 20
    parts = divide([sequence.path for sequence in sequences], [1] * len(KINDS), 2)
    assert sorted(i for part in parts for i in part) == list(range(len(KINDS)))


# The lm-eval model


def instances(kind, arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


@pytest.fixture(scope="module", params=fast(["torch"], FRAMEWORKS))
def lm(request, checkpoint):
    return GriffinLM(pretrained=str(checkpoint), framework=request.param, max_batch_size=4)


def test_requests_of_the_model(lm):
    """Against each memory edited by hand between two steps of the same model."""
    context, target = "The unary minus operator yields the negation of its", " numeric argument."
    kinds = ("nothing", "recurrent", "attention")
    asked = instances("loglikelihood_ablated", [(context, target, kind) for kind in kinds])
    found = dict(zip(kinds, lm.loglikelihood_ablated(asked), strict=True))
    (plain,) = lm.loglikelihood(instances("loglikelihood", [(context, target)]))
    assert found["nothing"] == pytest.approx(plain, rel=1e-6)
    ids = np.array(lm.tok_encode(context + target))
    start = len(lm.tok_encode(context))
    for kind, flag in (("recurrent", 1), ("attention", 2)):
        runner = lm.runner
        pool = runner.open_pool(1, 64)
        zero, none = np.array([0]), np.array([-1])
        before, after = ids[: start - 1], ids[start - 1 : -1]
        _, pool = runner.read(pool, before, np.array([len(before)]), none, zero)
        hidden, _ = runner.read(pool, after, np.array([len(after)]), zero, none, np.array([flag]))
        at = np.arange(len(after))
        logprobs, _ = runner.score(hidden, at, ids[start:], at, "float32")
        assert found[kind][0] == pytest.approx(logprobs.sum(), rel=1e-5)
        assert abs(found[kind][0] - plain[0]) > 0.01


def test_an_unknown_memory_is_named(lm):
    request = instances("loglikelihood_ablated", [("a", " b", "everything")])
    with pytest.raises(
        ArgumentError, match="unknown ablation everything: expected nothing, recurr"
    ):
        lm.loglikelihood_ablated(request)
