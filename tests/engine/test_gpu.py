"""What runs on a GPU gives the answers of the CPU, in both frameworks: `make test-gpu`."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from parity import BASE, weights
from safetensors.numpy import save_file

from griffin_eval import Evaluator
from griffin_eval.config import HAWK, MQA

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
MODELS = {
    "griffin": BASE,
    "hawk": replace(BASE, block_pattern=HAWK),
    "mqa": replace(BASE, block_pattern=MQA),
    "complex gates": replace(BASE, complex_gates=True),
}
# Its error, the root of the mean square over tokens, over that of the CPU in the same dtype.
MOST = 3.0


@pytest.fixture(scope="module")
def texts():
    """More texts than a step takes rows, of lengths up to several chunks, some with one prefix."""
    rng = np.random.default_rng(0)
    lengths = [1, 2, 3, 700, *rng.integers(2, 90, 60), 5000]
    prefix = rng.integers(BASE.vocab_size, size=300)
    drawn = [rng.integers(BASE.vocab_size, size=n) for n in lengths]
    return [row.tolist() for row in (*drawn, *(np.append(prefix, row) for row in drawn[:20]))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_gpu_is_as_exact_as_the_cpu(framework, model, dtype, texts, tmp_path):
    config = MODELS[model]
    save_file(weights(config), tmp_path / "model.safetensors")
    raw = {"model_type": "griffin", **asdict(config)}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    common = {"framework": framework, "dtype": dtype}
    here, there = (Evaluator(tmp_path, device=d, **common) for d in ("cpu", DEVICE))
    assert there._runners[0].device.partition(":")[0] in ("cuda", "gpu")
    exact = logprobs(Evaluator(tmp_path, device="cpu", framework="torch", dtype="float64"), texts)
    found, wanted = (rms(logprobs(each, texts) - exact) for each in (there, here))
    print(f"{framework}, {model}, {dtype}: {found:.2g} on the GPU, {wanted:.2g} on the CPU")
    assert found < MOST * wanted
    if dtype == "float32":
        for found, wanted in zip(
            there.generate(texts[:12], max_new_tokens=20),
            here.generate(texts[:12], max_new_tokens=20),
            strict=True,
        ):
            assert list(found.tokens) == list(wanted.tokens)


def logprobs(evaluator, texts):
    return np.concatenate([score.logprobs for score in evaluator.score(texts)])


def rms(errors):
    return np.sqrt(np.mean(errors**2))
