"""Scores of a bfloat16 model without a soft cap, from logits of a scale of 50, against float64."""

import functools
from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from parity import PAPER, relative_error, weights
from parity_twins import JaxTwin, TorchTwin
from xla_options import QUICK_COMPILE

from griffin_eval.config import HAWK
from griffin_eval.runners.jax_runner import JaxRunner
from griffin_eval.runners.torch_runner import TorchRunner

CONFIG = replace(PAPER, block_pattern=HAWK, num_layers=1, width=256, vocab_size=500)
SCALE = 50.0
EMBEDDING = "model.embed_tokens.weight"


def bfloat16_noise(seed, *shape):
    """Return random numbers of bfloat16 in float32."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


VECTORS = bfloat16_noise(0, CONFIG.vocab_size, CONFIG.width)


@functools.cache
def runner(framework):
    values = weights(CONFIG) | {EMBEDDING: VECTORS}
    if framework == "torch":
        return TorchRunner(TorchTwin(CONFIG, values, "bfloat16").model)
    return JaxRunner(JaxTwin(CONFIG, values, "bfloat16").model, QUICK_COMPILE)


def hidden_vectors(framework, rows):
    """Return hidden vectors in bfloat16, and their exact logits [rows, vocabulary]."""
    drawn = bfloat16_noise(1, rows, CONFIG.width) * (SCALE / CONFIG.width**0.5)
    narrow = drawn.astype(ml_dtypes.bfloat16)
    exact = narrow.astype(float) @ VECTORS.astype(float).T
    assert 0.8 * SCALE < exact.std() < 1.2 * SCALE
    if framework == "torch":
        return torch.tensor(narrow.astype(np.float32)).bfloat16(), exact
    return jnp.asarray(narrow), exact


# Few rows are multiplied by another kernel than many.
@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_logits_are_accumulated_and_returned_in_float32(framework, rows):
    hidden, exact = hidden_vectors(framework, rows)
    found = runner(framework).logits(hidden, np.arange(rows))
    assert found.dtype == np.float32
    assert relative_error(found, exact) < 1e-6
    assert (runner(framework).greedy(hidden, np.arange(rows)) == exact.argmax(1)).all()


@pytest.mark.parametrize("softmax_dtype", ["float32", "float64"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_scores_are_exact_up_to_the_rounding_of_logits(framework, softmax_dtype):
    """Log-probabilities may differ by two units in the last place of the largest logit, in the
    dtype of the normalisation."""
    subject, rows = runner(framework), 40
    hidden, exact = hidden_vectors(framework, rows)
    at = np.arange(rows)
    logits = subject.logits(hidden, at).astype(float)
    spread = logits - logits.max(1, keepdims=True)
    logprobs = spread - np.log(np.exp(spread).sum(1, keepdims=True))
    entropies = -(np.exp(logprobs) * logprobs).sum(1)
    assert entropies.max() > 0.1 and logprobs.min() < -5 * SCALE
    # Each position predicts its likeliest token, its second and a token of any rank.
    ranked = np.argsort(-exact, axis=1)
    targets = np.concatenate([ranked[:, 0], ranked[:, 1], (7 * at) % CONFIG.vocab_size])
    position_of = np.tile(at, 3)
    tolerance = 2 * np.spacing(np.array(np.abs(logits).max(), softmax_dtype))

    score = functools.partial(subject.score, hidden, at, targets, position_of, softmax_dtype)
    plain, detailed, top = score(), score(details=True), score(top=5)
    for found in (plain[0], detailed[0], top[0]):
        np.testing.assert_allclose(found, logprobs[position_of, targets], rtol=0, atol=tolerance)
    for greedy in (plain[1], detailed[1]):
        assert (greedy == (exact.argmax(1)[position_of] == targets)).all()
    ranks = 1 + (logits[position_of] > logits[position_of, targets][:, None]).sum(1)
    assert (detailed[2] == ranks).all()
    np.testing.assert_allclose(detailed[3], entropies[position_of], rtol=0, atol=tolerance)
    assert (top[1] == ranked[position_of, :5]).all()
    likeliest = np.take_along_axis(logprobs[position_of], top[1], 1)
    np.testing.assert_allclose(top[2], likeliest, rtol=0, atol=tolerance)
