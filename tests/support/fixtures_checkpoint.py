"""Checkpoints and models that several test files share, made once per test process."""

import numpy as np
import parity_reference
import pytest

from benchmarks.random_checkpoint import VOCABULARY, write_checkpoint
from griffin_eval.converters.checkpoint import Checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Write a RecurrentGemma folder as transformers does: width and window 128, a tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def equations(checkpoint):
    """Return a function from tokens [T] to logits float64 [T, V] (`parity_reference`)."""
    opened = Checkpoint(checkpoint)
    weights = {name: opened.numpy(name) for name in opened.dtypes}
    return lambda tokens: parity_reference.reference_logits(
        opened.config, weights, np.asarray(tokens)
    )


@pytest.fixture(scope="session")
def reference_logprobs(equations):
    """Return a function from tokens [T] to the log-probabilities [T - 1] and greedy flags [T - 1]
    of all tokens but the first, from the equations in numpy."""

    def logprobs(tokens) -> tuple[np.ndarray, np.ndarray]:
        logits, targets = equations(tokens)[:-1], np.asarray(tokens)[1:]
        found = logits[np.arange(len(targets)), targets] - np.logaddexp.reduce(logits, -1)
        return found, logits.argmax(-1) == targets

    return logprobs


@pytest.fixture(scope="session", params=["torch", "jax"])
def runner(request, checkpoint):
    from griffin_eval.runners.load import load_runner

    return load_runner(checkpoint, framework=request.param, device="cpu")


@pytest.fixture
def random_tokens():
    def draw(length: int, seed: int = 0) -> list[int]:
        return np.random.default_rng([length, seed]).integers(3, VOCABULARY, length).tolist()

    return draw
