"""Every kind of task gives the numbers and texts that lm-eval's own hf model gives."""

from pydoc_data.topics import topics

import pytest
from lm_eval.models.huggingface import HFLM
from slow import slow
from symbol_models import evaluate, write_symbol_checkpoint

from griffin_eval.lm.model import GriffinLM

PYTHON = "\n\n".join(topics[name] for name in sorted(topics))
NEEDLES = {"lengths": [300, 400], "depths": [50], "samples": 2}
BOOKS = {"entries": [3, 6], "samples": 1, "queries": 1, "candidates": 2}
# The metadata of a task, and how far its numbers may differ.
TASKS = {
    "griffin_longctx": (
        {"contexts": [64, 200], "targets": 1, "span": 40, "max_tokens": 700},
        {"rel": 1e-4},
    ),
    "griffin_extrapolation": (
        {"train_length": 100, "multiples": [2, 4], "targets": 2, "span": 30, "memories": False},
        {"abs": 2e-5},
    ),
    "griffin_phonebook": (BOOKS, {"abs": 1e-3}),
    "griffin_phonebook_rank": (BOOKS, {"abs": 1e-3}),
    "griffin_phonebook_absent": (BOOKS, {"abs": 1e-3}),
    "griffin_phonebook_counterfactual": (BOOKS, {"abs": 1e-3}),
    "griffin_phonebook_jelassi": (BOOKS, {"abs": 1e-3}),
    "griffin_passkey": (NEEDLES, {"abs": 0}),
    "griffin_association": (NEEDLES, {"abs": 0}),
    "griffin_selective_copying": ({"lengths": [24, 40], "samples": 3}, {"abs": 0}),
    "griffin_induction_heads": ({"lengths": [12, 50], "samples": 8}, {"abs": 0}),
}
QUICKLY = ("griffin_longctx", "griffin_extrapolation", "griffin_phonebook_rank", "griffin_passkey")


@pytest.fixture(scope="module")
def symbols(tmp_path_factory):
    """Write a checkpoint whose tokens are the symbols of the synthetic tasks."""
    folder = tmp_path_factory.mktemp("symbols")
    write_symbol_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """Write three texts of a few thousand tokens each."""
    folder = tmp_path_factory.mktemp("texts")
    for index in range(3):
        text = PYTHON[index * 12_000 : (index + 1) * 12_000]
        (folder / f"{index}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("task", "framework"),
    [
        (task, framework) if task in QUICKLY and framework == "torch" else slow(task, framework)
        for task in TASKS
        for framework in ("torch", "jax")
    ],
)
def test_numbers_and_samples_are_those_of_hf(task, framework, checkpoint, symbols, document):
    metadata, tolerance = TASKS[task]
    of_symbols = task in ("griffin_selective_copying", "griffin_induction_heads")
    folder = str(symbols if of_symbols else checkpoint)
    metadata = metadata | {"pretrained": folder, "document": str(document)}
    ours = GriffinLM(folder, framework=framework, max_batch_size=8)
    theirs = HFLM(pretrained=folder, dtype="float32", device="cpu", max_length=8192)
    found = evaluate(ours, task, metadata)
    expected = evaluate(theirs, task, metadata)
    for name, metrics in expected["results"].items():
        assert metrics.keys() == found["results"][name].keys()
        for metric, value in metrics.items():  # some are text, such as "<4"
            mine = found["results"][name][metric]
            number = isinstance(value, float)
            assert mine == (pytest.approx(value, **tolerance) if number else value), metric
    for name, samples in expected["samples"].items():
        for one, other in zip(found["samples"][name], samples, strict=True):
            assert one["arguments"] == other["arguments"]
            if isinstance(other["filtered_resps"][0], str):
                assert one["filtered_resps"] == other["filtered_resps"]
