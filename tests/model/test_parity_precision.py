"""What runs in which precision: bfloat16 models, and positions far into a document."""

from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from parity import BASE, HAWK, MODELS, PAPER, compare, relative_error, tokens, weights
from parity_reference import reference_logits, rg_lru
from parity_twins import TWINS, leaves, to_numpy, twin
from slow import slow

from griffin_eval.kernels.linear import cpu_torch
from griffin_eval.layout import param_specs
from griffin_eval.model_jax import layers as jax_layers
from griffin_eval.model_jax import layouts as jax_layouts
from griffin_eval.model_torch import layers as torch_layers
from griffin_eval.model_torch import layouts as torch_layouts

LONG = 2 * BASE.visible_keys + 3


def rounded(values, *, keep="recurrent_param"):
    """Return the weights that a bfloat16 model has: all rounded but Λ."""
    return {
        name: v if name.endswith(keep) else v.astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, v in values.items()
    }


@pytest.mark.parametrize(
    ("ours", "model"),
    [
        ("torch", "attention last"),
        ("torch", "paper griffin"),
        ("torch", "complex gates"),
        ("jax", "attention first"),
        slow("jax", "attention last"),
        slow("jax", "paper griffin"),
    ],
)
def test_bfloat16_logits_stay_near_the_equations(ours, model, record_parity):
    config = MODELS[model]
    values, ids = rounded(weights(config)), tokens(config, 2, LONG)
    expected = np.stack([reference_logits(config, values, row) for row in ids])
    found = twin(ours, config, "bfloat16").logits(ids)
    assert found.dtype == np.float32
    compare(record_parity, f"{ours} - equations", "logits, bfloat16", found, expected)


@pytest.mark.parametrize("ours", TWINS)
def test_a_bfloat16_model_keeps_lambda_and_the_recurrent_state_in_float32(ours):
    config = MODELS["attention first"]
    model = twin(ours, config, "bfloat16")
    initial = model.init_state(2)
    # The program of JAX is that of the test above.
    _, state = model.step(tokens(config, 2, LONG), [LONG, LONG], initial)
    for layers in (initial.layers, state.layers):
        assert str(layers[1].h.dtype).endswith("float32")
        assert str(layers[1].conv.dtype).endswith("bfloat16")
        assert str(layers[0].k.dtype).endswith("bfloat16")
    recurrent = model.model.model.layers[1].temporal_block.rg_lru
    assert str(recurrent.recurrent_param.dtype).endswith("float32")
    assert str(recurrent.input_gate_weight.dtype).endswith("bfloat16")


def test_the_parameters_of_the_recurrence_are_kept_in_float32():
    for name, spec in param_specs(MODELS["complex gates"]).items():
        assert spec.keep_float32 == name.endswith(("recurrent_param", "imaginary_param")), name


def first_layer(ours, config, values):
    """Return the first layer of a bfloat16 model, and a function that makes arrays bfloat16."""
    layer = TWINS[ours](config, values, "bfloat16").model.model.layers[0]
    if ours == "torch":
        return layer, lambda x: torch.tensor(x).bfloat16()
    return layer, lambda x: jnp.asarray(x, jnp.bfloat16)


def one_document(ours, length):
    """Return the layout of a batch of one row, a document from its start."""
    if ours == "torch":
        zeros, positions = torch.zeros(1, length, 1), torch.arange(length)[None]
        layout = torch_layouts.PaddedLayout(torch.tensor([length]))
        return torch_layouts.StepContext(positions, positions, positions < 0, zeros, zeros, layout)
    zeros, positions = jnp.zeros((1, length, 1)), jnp.arange(length, dtype=jnp.int32)[None]
    layout = jax_layouts.PaddedLayout(jnp.array([length]))
    return jax_layouts.StepContext(positions, positions, positions < 0, zeros, zeros, layout)


def assert_rounded_once(found, expected):
    """half a unit in the last of 8 bits, and a hair for float32 itself."""
    assert str(found.dtype).endswith("bfloat16")
    error = np.abs(to_numpy(found).astype(float) - expected)
    assert (error <= 2**-8 * 1.01 * np.abs(expected) + 1e-6).all()


HAWK_LAYER = replace(BASE, block_pattern=HAWK, num_layers=1)


def bfloat16_noise(*shape):
    x = np.random.default_rng(0).standard_normal(shape)
    return x.astype(ml_dtypes.bfloat16).astype(float)


@pytest.mark.parametrize("ours", TWINS)
def test_the_recurrence_of_a_bfloat16_model_is_computed_in_float32(ours, record_parity):
    values = rounded(weights(HAWK_LAYER, slow=-9.0))
    x = bfloat16_noise(200, HAWK_LAYER.lru_width)
    prefix = "model.layers.0.temporal_block.rg_lru."
    params = {n.removeprefix(prefix): v.astype(float) for n, v in values.items() if prefix in n}
    expected = rg_lru(params, x)

    layer, narrow = first_layer(ours, HAWK_LAYER, values)
    h0 = torch.zeros(1, x.shape[1]) if ours == "torch" else jnp.zeros((1, x.shape[1]))
    y, h = layer.temporal_block.rg_lru(narrow(x[None]), one_document(ours, len(x)), h0)
    assert str(h.dtype).endswith("float32")
    pair, quantity = f"{ours} - equations", "state of a bfloat16 RG-LRU"
    compare(record_parity, pair, quantity, to_numpy(h)[0], expected[-1])
    assert_rounded_once(y[0], expected)

    # Had Λ been rounded as well, it would show.
    params["recurrent_param"] = params["recurrent_param"].astype(ml_dtypes.bfloat16).astype(float)
    assert relative_error(rg_lru(params, x)[-1], expected[-1]) > 1e-3


@pytest.mark.parametrize("rows", [7, 16_384])
@pytest.mark.parametrize("ours", TWINS)
def test_logits_of_a_bfloat16_model_are_accumulated_in_float32(ours, rows, monkeypatch):
    monkeypatch.setattr(cpu_torch, "ROWS", rows)
    model = twin(ours, PAPER, "bfloat16").model
    hidden = bfloat16_noise(5, PAPER.width)
    narrow = (
        torch.tensor(hidden).bfloat16() if ours == "torch" else jnp.asarray(hidden, jnp.bfloat16)
    )
    expected = hidden @ rounded(weights(PAPER))["model.embed_tokens.weight"].astype(float).T
    found = to_numpy(model.logits(narrow))
    assert relative_error(found, expected) < 1e-6


FAR = np.array([[0, 1, 255, 256, 65_535, 1_000_000, 16_777_217, 123_456_789, 2**31 - 1]])


def exact_rotation(rotary_dim, base):
    wide = np.longdouble
    frequency = wide(base) ** -(np.arange(0, rotary_dim, 2).astype(wide) / rotary_dim)
    angle = FAR[:, :, None].astype(wide) * frequency
    return np.cos(angle).astype(float), np.sin(angle).astype(float)


def rotation(ours, dtype):
    if ours == "torch":
        return torch_layers.rotation(torch.from_numpy(FAR), 128, 10_000.0, getattr(torch, dtype))
    return jax_layers.rotation(jnp.asarray(FAR, jnp.int32), 128, 10_000.0, jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ours", TWINS)
def test_rotations_are_exact_at_any_position(ours, dtype, record_parity):
    found = rotation(ours, dtype)
    for array, expected in zip(found, exact_rotation(128, 10_000.0), strict=True):
        assert str(array.dtype).endswith("float32")
        compare(record_parity, f"{ours} - longdouble", "rotation", to_numpy(array), expected)


@pytest.mark.parametrize("position", [1_000_000, 2**31 - 100])
@pytest.mark.parametrize("ours", TWINS)
def test_a_million_tokens_on_nothing_changes_but_the_position(ours, position, record_parity):
    # The state is zero but for its position: every zero key scores zero wherever it stood, and all
    # else depends on distances alone.
    config = MODELS["attention first"]
    model, ids = twin(ours, config), tokens(config, 2, LONG)
    lengths = [LONG, LONG - 4]
    near, far = (
        model.step(ids, lengths, model.with_position(model.init_state(2), start))
        for start in (1000, position)
    )
    assert leaves(far[1])[0].tolist() == [position + n for n in lengths]
    found, expected = (np.concatenate([h[0], h[1][: LONG - 4]]) for h, _ in (far, near))
    compare(record_parity, f"{ours} far - near", "hidden", found, expected)


def test_a_float32_model_under_autocast():
    """Products of matrices are bfloat16's there, and no array is taken for one of another dtype."""
    model = TWINS["torch"](BASE, weights(BASE)).model.requires_grad_()
    ids = torch.tensor(tokens(BASE, 2, LONG))

    def results(enabled):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            hidden, _ = model.step(ids, torch.full((2,), LONG), model.init_state(2))
            logits = model.logits(hidden).float()
        gradients = torch.autograd.grad(logits.logsumexp(-1).mean(), list(model.parameters()))
        return [v.detach().numpy() for v in (logits, *gradients)]

    (logits, *found), (expected_logits, *expected) = results(True), results(False)
    assert 0 < relative_error(logits, expected_logits) <= 0.05
    for ours, right in zip(found, expected, strict=True):
        assert relative_error(ours, right) <= 0.25
