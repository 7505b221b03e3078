"""Requests that lose a part of the memory: as the equations say, with contexts read once."""

import itertools

import numpy as np
import pytest
from fixtures_engine import random_ids, scores, scores_and_stats, small_runner, states
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from parity import BASE, MODELS, TOLERANCES, relative_error, tokens, weights
from parity_reference import reference_logits
from parity_twins import to_numpy, twin
from slow import examples, fast, slow

from griffin_eval.engine.limits import Limits
from griffin_eval.engine.parallel import divide
from griffin_eval.engine.tree import Ablation, Scorable
from griffin_eval.errors import ArgumentError
from griffin_eval.lm.model import GriffinLM
from griffin_eval.model_jax import state as jax_state
from griffin_eval.model_torch import state as torch_state

FRAMEWORKS = ("torch", "jax")
each_framework = pytest.mark.parametrize("framework", FRAMEWORKS)
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


@pytest.mark.slow  # compiles a program for every shape of a step
@settings(max_examples=examples(20))
@given(sequences=requests(), rows=st.sampled_from([1, 4]), kept=st.sampled_from([1, 8]))
def test_any_requests_equal_the_equations_in_jax(sequences, rows, kept):
    check_scores("jax", sequences, rows, kept)


@pytest.mark.parametrize(
    "model",
    [
        "one visible key",
        "wide convolution",
        "mqa",
        "paper hawk",
        "grouped queries",
        "every field changed",
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_other_blocks(model, kind):
    config = MODELS[model]
    ids = random_ids(40, 3)
    sequence = Scorable(ids, 25, kind)
    (found,) = scores(small_runner("torch", config), [sequence])
    np.testing.assert_allclose(found.logprobs, expected_scores(sequence, config), atol=1e-4)


def test_each_memory_matters_here():
    """The tests above would not notice a memory without influence."""
    runner = small_runner("torch")
    found = scores(runner, [Scorable(random_ids(40, 3), 25, kind) for kind in KINDS])
    for i, one in enumerate(found):
        for other in found[i + 1 :]:
            assert abs(one.logprobs[0] - other.logprobs[0]) > 1e-3


@pytest.mark.parametrize("framework", fast(["torch"], FRAMEWORKS))
def test_a_shared_context_is_read_once(framework):
    context, target = random_ids(200, 0), random_ids(20, 1)
    sequences = [Scorable(context + target, 200, kind) for kind in KINDS]
    _, stats = scores_and_stats(small_runner(framework), sequences, Limits(32, 4))
    assert stats.tokens_computed == 199 + len(KINDS) * 20
    parts = divide([sequence.path for sequence in sequences], [1] * len(KINDS), 2)
    assert sorted(i for part in parts for i in part) == list(range(len(KINDS)))


STATES = {"torch": torch_state, "jax": jax_state}


# Ends of chunks. The first lies before the cut. JAX compiles a program for each length.
ENDS = {"torch": (13, 17, 18, 30), "jax": (10, 20, 30)}


@pytest.mark.parametrize(
    ("framework", "packed"),
    [("torch", False), ("torch", True), slow("jax", False), slow("jax", True)],
)
@pytest.mark.parametrize("kind", fast(KINDS[-1:], KINDS[1:]))
def test_a_state_edited_by_hand_in_float64(framework, kind, packed, record_parity):
    """One row forgets, the other does not; then both are read on in several chunks."""
    model = twin(framework, BASE, "float64")
    ids, (cut, *ends) = tokens(BASE, 2, 30), ENDS[framework]

    def read(chunk, state):
        if packed:
            lengths = np.full(2, chunk.shape[1])
            hidden, state = model.step_packed(chunk.ravel(), lengths, state, 16)
            return hidden.reshape(2, chunk.shape[1], -1), state
        return model.step(chunk, None, state)

    def mask(memory):
        return model._array(np.array([memory in kind, False]))

    with model.precision() if framework == "jax" else np.errstate():
        hidden, state = read(ids[:, :cut], model.init_state(2))
        state = STATES[framework].ablate(state, mask(Ablation.RECURRENT), mask(Ablation.ATTENTION))
        parts = [hidden]
        for begin, end in itertools.pairwise([cut, *ends]):
            hidden, state = read(ids[:, begin:end], state)
            parts.append(hidden)
        hidden = np.concatenate(parts, 1)
        found = to_numpy(model.model.logits(as_array(framework, hidden)))
    for row, forgets in enumerate((kind, Ablation.NOTHING)):
        expected = reference_logits(
            BASE,
            weights(BASE),
            ids[row],
            recurrent_cut=cut if Ablation.RECURRENT in forgets else 0,
            attention_cut=cut if Ablation.ATTENTION in forgets else 0,
        )
        pair, quantity = f"{framework} - equations", "logits, float64"
        error = relative_error(found[row].astype(np.float64), expected)
        record_parity(pair, quantity, error, TOLERANCES[pair, quantity])


def as_array(framework, array):
    if framework == "torch":
        import torch

        return torch.from_numpy(array)
    import jax.numpy as jnp

    return jnp.asarray(array)


@each_framework
def test_a_new_document_knows_nothing_of_it(framework):
    config = MODELS["attention first"]
    model, ids = twin(framework, config), tokens(config, 1, 30)
    everything = model._array(np.array([True]))
    nowhere = np.zeros((1, 17), bool)
    _, state = model.step(ids[:, :17], [13], model.init_state(1), nowhere)
    state = STATES[framework].ablate(state, everything, everything)
    resets = nowhere.copy()
    resets[0, 4] = True
    found, after = model.step(ids[:, 13:], [17], state, resets)
    padded = np.pad(ids[:, 17:], [(0, 0), (0, 4)])
    expected, _ = model.step(padded, [13], model.init_state(1), nowhere)
    np.testing.assert_allclose(found[:, 4:], expected[:, :13], atol=2e-5)
    assert to_numpy(after.attention_start).tolist() == [0] and to_numpy(after.pos).tolist() == [13]


# The lm-eval model


def instances(kind, arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


@pytest.fixture(scope="module", params=fast(["torch"], FRAMEWORKS))
def lm(request, checkpoint):
    return GriffinLM(pretrained=str(checkpoint), framework=request.param, max_batch_size=4)


def test_requests_of_the_model(lm):
    """Against each memory edited by hand between two steps of the same model."""
    context, target = "The unary minus operator yields the negation of its", " numeric argument."
    found = dict(
        zip(
            ("nothing", "recurrent", "attention"),
            lm.loglikelihood_ablated(
                instances(
                    "loglikelihood_ablated",
                    [(context, target, kind) for kind in ("nothing", "recurrent", "attention")],
                )
            ),
            strict=True,
        )
    )
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
