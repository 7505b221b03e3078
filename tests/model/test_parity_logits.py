"""Logits of full forward passes against the public implementations and the numpy reference."""

import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from parity import (
    BASE,
    MODELS,
    PAPER_DIALECT,
    RECURRENTGEMMA,
    TRANSFORMERS_ONLY,
    compare,
    configs,
    relative_error,
    tokens,
    weights,
)
from parity_reference import reference_logits
from parity_twins import TWINS, twin
from recorded_oracles import Recorded
from safetensors.numpy import save_file
from slow import examples, fast, slow
from xla_options import FULL_COMPILE

from griffin_eval import Evaluator
from griffin_eval.converters.configs.huggingface import to_huggingface

LONG = 2 * BASE.visible_keys + 3
LENGTHS = (1, 2, 3, 5, BASE.visible_keys - 1, BASE.visible_keys, BASE.visible_keys + 1, LONG)

# Every kind of block as the last one, both dialects, and what only one oracle or none can be.
FAST = (
    "attention first",
    "attention last",
    "recurrent last",
    "paper griffin",
    "paper hawk",
    "six taps",
    "one visible key",
    "grouped queries",
    "mqa",
    "global attention among others",
    "complex gates",
)
# JAX compiles every model, and DeepMind's in JAX: few of them in `make test`.
FAST_IN_JAX = ("attention first", "mqa", "grouped queries")
TORCH_ALONE = tuple(model for model in FAST if model not in FAST_IN_JAX)
COVERED = {
    "transformers": RECURRENTGEMMA | TRANSFORMERS_ONLY,
    "deepmind-jax": RECURRENTGEMMA | PAPER_DIALECT,
    "deepmind-torch": RECURRENTGEMMA | PAPER_DIALECT,
}


@functools.cache
def _reference(config, *rows):
    return np.stack([reference_logits(config, weights(config), np.array(row)) for row in rows])


def reference(config, ids):
    return _reference(config, *map(tuple, ids))


def check_every_oracle(model, twins, oracles, record_parity):
    config = MODELS[model]
    ids = tokens(config, 3, LONG)
    expected = {
        name: Recorded(name, config).logits(ids) for name in oracles if model in COVERED[name]
    }
    found = {ours: twin(ours, config).logits(ids, capacity=LONG) for ours in twins}
    for name, logits in expected.items():
        for ours in twins:
            compare(record_parity, f"{ours} - {name}", "logits", found[ours], logits)
    for ours in twins:
        compare(record_parity, f"{ours} - equations", "logits", found[ours], reference(config, ids))


@pytest.mark.parametrize("model", fast(FAST_IN_JAX, MODELS))
def test_logits_equal_every_oracle(model, record_parity):
    check_every_oracle(model, TWINS, COVERED, record_parity)


@pytest.mark.parametrize("model", TORCH_ALONE)
def test_logits_of_torch_equal_the_oracles_in_torch(model, record_parity):
    check_every_oracle(model, ["torch"], ["transformers", "deepmind-torch"], record_parity)


IN_LIBRARIES = [("transformers", "attention first"), ("deepmind-torch", "paper griffin")]


@pytest.mark.parametrize(
    ("ours", "name", "model", "length"),
    [
        (ours, *one, n)
        if ours == "torch" or (one, n) == (IN_LIBRARIES[0], 1)
        else slow(ours, *one, n)
        for ours in TWINS
        for one in IN_LIBRARIES
        for n in LENGTHS
    ],
)
def test_logits_equal_the_oracle_at_every_length(name, model, ours, length, record_parity):
    config = MODELS[model]
    ids = tokens(config, 2, length)
    expected = Recorded(name, config).logits(ids)
    compare(record_parity, f"{ours} - {name}", "logits", twin(ours, config).logits(ids), expected)


@pytest.mark.parametrize("ours", TWINS)
def test_the_likeliest_tokens_are_those_of_transformers(ours, tmp_path):
    """Prompt and answer are longer than the window. The best logit leads by 0.04 at least."""
    config = MODELS["attention first"]
    save_file(weights(config), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(to_huggingface(config)))
    prompts = tokens(config, 4, LONG)
    expected = Recorded("transformers", config).generation(prompts)
    found = Evaluator(str(tmp_path), framework=ours).generate(
        list(prompts), max_new_tokens=expected.shape[1]
    )
    np.testing.assert_array_equal([each.tokens for each in found], expected)


@pytest.mark.parametrize(
    ("ours", "model"),
    [("torch", model) if model in FAST else slow("torch", model) for model in MODELS]
    + [("jax", name) if name == FAST[0] else slow("jax", name) for name in MODELS],
)
def test_float64_logits_equal_the_equations(ours, model, record_parity):
    config = MODELS[model]
    ids = tokens(config, 3, LONG)
    found = twin(ours, config, "float64").logits(ids, capacity=LONG)
    assert found.dtype == np.float64
    compare(record_parity, f"{ours} - equations", "logits, float64", found, reference(config, ids))


def any_config_equals_the_equations(ours, config, record_parity):
    values, ids = weights(config), tokens(config, 1, 12)
    expected = reference_logits(config, values, ids[0])[None]
    found = TWINS[ours](config, values, "float64").logits(ids, capacity=12)
    compare(record_parity, f"{ours} - equations", "logits, any config", found, expected)


@settings(max_examples=examples(12))
@given(config=configs())
def test_any_config_equals_the_equations_in_torch(config, record_parity):
    any_config_equals_the_equations("torch", config, record_parity)


@pytest.mark.slow  # compiles every model
@settings(max_examples=examples(60))
@given(config=configs())
def test_any_config_equals_the_equations_in_jax(config, record_parity):
    any_config_equals_the_equations("jax", config, record_parity)


@pytest.mark.parametrize("ours", TWINS)
def test_memories_of_thousands_of_tokens(ours, record_parity):
    # a within 1e-5 of 1: 1 - a * a in float32 would be off by a percent.
    config = MODELS["paper hawk"]
    values = weights(config, slow=-12.0)
    ids = tokens(config, 2, LONG)
    expected = np.stack([reference_logits(config, values, row) for row in ids])
    found = TWINS[ours](config, values).logits(ids)
    compare(record_parity, f"{ours} - equations", "logits, long memories", found, expected)


def packed(config):
    """Tokens of several documents per row, one of them a single token, and where each starts."""
    ids = tokens(config, 3, LONG)
    resets = np.zeros_like(ids, bool)
    resets[0, [0, 5, 6, 16]] = True
    resets[1, [10]] = True  # the first document needs no reset
    return ids, resets


@pytest.mark.parametrize("name", ["deepmind-jax", "deepmind-torch", "equations"])
@pytest.mark.parametrize(
    "model", fast(["attention first"], ["attention first", "attention last", "paper griffin"])
)
def test_packed_documents_do_not_see_each_other(name, model, record_parity):
    config = MODELS[model]
    ids, resets = packed(config)
    if name == "equations":
        documents = [np.split(row, np.flatnonzero(r)) for row, r in zip(ids, resets, strict=True)]
        expected = np.stack(
            [
                np.concatenate(
                    [reference_logits(config, weights(config), d) for d in row if len(d)]
                )
                for row in documents
            ]
        )
    else:
        expected = Recorded(name, config).logits(ids, resets)
    for ours in TWINS:
        found = twin(ours, config).logits(ids, resets=resets)
        compare(record_parity, f"{ours} - {name}", "logits, packed", found, expected)


@pytest.mark.ci
def test_optimised_compilation_gives_the_same(record_parity):
    # Elsewhere these tests compile JAX quickly, not as users do.
    config = MODELS["recurrent last"]
    ids = tokens(config, 2, LONG)
    found = TWINS["jax"](config, weights(config), compiler_options=FULL_COMPILE).logits(ids)
    compare(record_parity, "jax - equations", "logits", found, reference(config, ids))


@pytest.mark.parametrize(
    "model", fast(["paper griffin", "mqa"], ["recurrent last", "paper griffin", "mqa"])
)
def test_the_weights_of_these_tests_hide_no_parameter(model):
    """Were a parameter ignored, or read as another, the logits would show it."""
    config = MODELS[model]
    values, ids = weights(config), tokens(config, 1, LONG)[0]
    expected = reference_logits(config, values, ids)
    for name in values:
        without = values | {name: np.zeros_like(values[name])}
        assert relative_error(reference_logits(config, without, ids), expected) > 1e-2, name
