"""Gradients of the whole model with each implementation of the RG-LRU, against float64."""

import functools
from dataclasses import replace

import pytest
from jax.experimental.pallas import tpu as pltpu
from parity import BASE, HAWK, MODELS, weights
from parity_gradients import WHOLE, batch, compare_gradients
from parity_twins import TWINS, twin
from slow import slow

from griffin_eval.kernels.rglru import api, tpu_jax, triton_torch
from griffin_eval.model_jax import layers as jax_layers
from griffin_eval.model_torch import layers as torch_layers

LAYERS = {"torch": torch_layers, "jax": jax_layers}
IMPLEMENTATIONS = {
    ("torch", "cpu"): functools.partial(api.rglru, impl="cpu"),
    ("torch", "plain"): functools.partial(api.rglru, impl="plain"),
    ("torch", "triton"): triton_torch.rglru,
    ("jax", "cpu"): functools.partial(api.rglru, impl="cpu"),
    ("jax", "plain"): functools.partial(api.rglru, impl="plain"),
    ("jax", "tpu"): functools.partial(tpu_jax.rglru, interpret=pltpu.InterpretParams()),
}


CONFIGS = {
    "one layer": replace(BASE, block_pattern=HAWK, num_layers=1),
    "recurrent last": MODELS["recurrent last"],
}
QUICKLY = [
    slow(*one, model) if one[1] == "tpu" or model != "one layer" else (*one, model)
    for one in IMPLEMENTATIONS
    for model in CONFIGS
]


@pytest.mark.parametrize(("framework", "name", "model"), QUICKLY)
def test_gradients_of_the_model_are_those_in_float64(
    framework, name, model, monkeypatch, record_parity
):
    if (framework, name) == ("torch", "triton"):
        pytest.importorskip("triton")
        from triton_interpreter import interpreted_kernels

        monkeypatch.setattr(triton_torch, "_kernels", interpreted_kernels)
    config, calls = CONFIGS[model], []

    def rglru(x, *args, c, **kwargs):
        assert c == 8
        calls.append(x.shape)
        return IMPLEMENTATIONS[framework, name](x, *args, **kwargs)

    # Those of torch for both: in float64 the twins' gradients are equal.
    expected = twin("torch", config, "float64").gradients(*batch(config), WHOLE)
    monkeypatch.setattr(LAYERS[framework], "rglru", rglru)
    found = TWINS[framework](config, weights(config)).gradients(*batch(config), WHOLE)
    assert len(calls) >= config.block_types.count("recurrent")
    pair = f"{framework} {name} - float64"
    compare_gradients(record_parity, pair, "gradients of the model", found, expected)
