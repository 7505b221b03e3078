"""Checkpoints and models that several test files share, made once per test process."""

import numpy as np
import pytest

from benchmarks.random_checkpoint import VOCABULARY, write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A RecurrentGemma folder written by transformers: width and window 128, tokenizer included."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def transformers_model(checkpoint):
    from transformers import RecurrentGemmaForCausalLM

    return RecurrentGemmaForCausalLM.from_pretrained(checkpoint).eval()


@pytest.fixture(scope="session")
def reference_logprobs(transformers_model):
    """log p(token | all before it) of every token but the first, by one pass of transformers."""
    import torch

    def logprobs(tokens) -> tuple[np.ndarray, np.ndarray]:
        ids = torch.tensor([list(tokens)])
        with torch.no_grad():
            logits = transformers_model(ids, use_cache=False).logits[0, :-1].double()
        target = ids[0, 1:, None]
        found = logits.log_softmax(-1).gather(1, target)[:, 0]
        return found.numpy(), (logits.argmax(-1) == target[:, 0]).numpy()

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
