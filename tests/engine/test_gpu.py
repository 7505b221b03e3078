"""What runs on a GPU gives the answers of the CPU, in both frameworks: `make test-gpu`."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from parity import BASE, weights
from safetensors.numpy import save_file

from griffin_eval import Evaluator
from griffin_eval.config import HAWK, MQA
from griffin_eval.model_torch.decoding import DecodingState
from griffin_eval.runners.torch_runner import GraphedDecoding

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
MODELS = {
    "griffin": BASE,
    "hawk": replace(BASE, block_pattern=HAWK),
    "mqa": replace(BASE, block_pattern=MQA),
    "complex gates": replace(BASE, complex_gates=True),
}
# Its error, the root of the mean square over tokens, over that of the CPU in the same dtype.
MAX_RATIO = 3.0


@pytest.fixture(scope="module")
def texts():
    """More texts than a step takes rows, of lengths up to several chunks, some with one prefix."""
    rng = np.random.default_rng(0)
    lengths = [1, 2, 3, 700, *rng.integers(2, 90, 60), 5000]
    prefix = rng.integers(BASE.vocab_size, size=300)
    drawn = [rng.integers(BASE.vocab_size, size=n) for n in lengths]
    return [row.tolist() for row in (*drawn, *(np.append(prefix, row) for row in drawn[:20]))]


def write(config, folder):
    """Return a checkpoint of random weights."""
    folder.mkdir(exist_ok=True)
    save_file(weights(config), folder / "model.safetensors")
    raw = {"model_type": "griffin", **asdict(config)}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_gpu_is_as_exact_as_the_cpu(framework, model, dtype, texts, tmp_path):
    write(MODELS[model], tmp_path)
    common = {"framework": framework, "dtype": dtype}
    here, there = (Evaluator(tmp_path, device=d, **common) for d in ("cpu", DEVICE))
    assert there._model.runners[0].device.partition(":")[0] in ("cuda", "gpu")
    exact = logprobs(Evaluator(tmp_path, device="cpu", framework="torch", dtype="float64"), texts)
    found, wanted = (rms(logprobs(each, texts) - exact) for each in (there, here))
    print(f"{framework}, {model}, {dtype}: {found:.2g} on the GPU, {wanted:.2g} on the CPU")
    assert found < MAX_RATIO * wanted
    if dtype == "float32":
        for found, wanted in zip(
            there.generate(texts[:12], max_new_tokens=20),
            here.generate(texts[:12], max_new_tokens=20),
            strict=True,
        ):
            assert list(found.tokens) == list(wanted.tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", list(MODELS))
def test_steps_by_graphs_are_the_same_bit_for_bit(model, dtype, tmp_path):
    """Around the windows several times, with rows that end and begin in between."""
    folder = write(MODELS[model], tmp_path)
    evaluator = Evaluator(folder, framework="torch", dtype=dtype, device=DEVICE)
    runner, rng = evaluator._model.runners[0], np.random.default_rng(0)
    rows, capacity = 5, 300
    by_graphs = runner.start_decoding(rows, capacity)
    plain = DecodingState.start(runner.model, rows, capacity)
    assert isinstance(by_graphs, GraphedDecoding)
    pool = runner.open_pool(2, capacity)
    read = rng.integers(BASE.vocab_size, size=40)
    lengths, start = np.array([15, 25]), np.array([-1, -1])
    _, pool = runner.read(pool, read, lengths, start, np.array([0, 1]))
    for step in range(200):
        if step % 7 == 0:
            chosen = rng.permutation(rows)[:2]
            sources = np.array([-1, step % 2])
            if step == 0:
                chosen, sources = np.arange(rows), np.full(rows, -1)
            by_graphs, plain = (
                runner.insert_rows(state, chosen, pool, sources) for state in (by_graphs, plain)
            )
        tokens = rng.integers(BASE.vocab_size, size=rows)
        active = np.ones(rows, np.int64)
        found, by_graphs = runner.decode_step(by_graphs, tokens, active)
        wanted, plain = runner.decode_step(plain, tokens, active)
        assert torch.equal(found, wanted), step


def logprobs(evaluator, texts):
    return np.concatenate([score.logprobs for score in evaluator.score(texts)])


def rms(errors):
    return np.sqrt(np.mean(errors**2))
