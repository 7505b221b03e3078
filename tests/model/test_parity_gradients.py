"""Gradients of the mean cross-entropy with respect to every parameter."""

from dataclasses import replace

import numpy as np
import pytest
from parity import BASE, HAWK, MODELS, compare, weights
from parity_gradients import LENGTH, WHOLE, batch, compare_gradients
from parity_reference import reference_logits
from parity_twins import TWINS, twin
from recorded_oracles import Recorded, with_recurrent_param
from slow import slow

PATTERNS = [
    "attention first",
    slow("complex gates"),
    slow("paper griffin"),
    slow("global attention among others"),
    slow("every field changed"),
]
PACKED = np.zeros((2, LENGTH), bool)
PACKED[0, [6, 7, 15]] = True


@pytest.mark.parametrize(
    ("model", "resets", "names"),
    [
        ("attention first", WHOLE, ("transformers", "deepmind-torch", "deepmind-jax")),
        ("attention first", PACKED, ("deepmind-torch", "deepmind-jax")),
        slow("attention last", WHOLE, ("transformers", "deepmind-torch", "deepmind-jax")),
        slow("recurrent last", WHOLE, ("transformers", "deepmind-torch")),
        slow("paper griffin", WHOLE, ("deepmind-torch", "deepmind-jax")),
        slow("paper griffin", PACKED, ("deepmind-torch", "deepmind-jax")),
        slow("grouped queries", WHOLE, ("transformers",)),
    ],
    ids=[
        "attention first",
        "attention first, packed documents",
        "attention last",
        "recurrent last",
        "paper griffin",
        "packed documents",
        "grouped",
    ],
)
def test_gradients_equal_the_oracles(model, resets, names, record_parity):
    config = MODELS[model]
    args = (*batch(config), resets)
    expected = {name: Recorded(name, config).gradients(*args) for name in names}
    found = {ours: twin(ours, config).gradients(*args) for ours in TWINS}
    for name, gradients in expected.items():
        for ours in TWINS:
            compare_gradients(
                record_parity, f"{ours} - {name}", "gradients", found[ours], gradients
            )


@pytest.mark.parametrize("dtype", [slow("float32"), "float64"])
@pytest.mark.parametrize("model", PATTERNS)
def test_gradients_of_the_twins_are_equal(model, dtype, record_parity):
    config = MODELS[model]
    found, expected = (
        twin(name, config, dtype).gradients(*batch(config), PACKED) for name in TWINS
    )
    compare_gradients(record_parity, "torch - jax", f"gradients, {dtype}", found, expected)


@pytest.mark.parametrize("model", PATTERNS)
def test_gradients_are_the_slope_of_the_equations(model, record_parity):
    config = MODELS[model]
    ids, targets = batch(config)
    values = weights(config)
    rng = np.random.default_rng(0)
    direction = {name: rng.standard_normal(v.shape) for name, v in values.items()}

    def loss(step):
        moved = {name: v + step * direction[name] for name, v in values.items()}
        logits = np.stack([reference_logits(config, moved, row) for row in ids])
        log_p = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
        return -np.take_along_axis(log_p, targets[:, :, None], -1).mean()

    step = 1e-5
    expected = (loss(step) - loss(-step)) / (2 * step)
    for ours in TWINS:
        gradients = twin(ours, config, "float64").gradients(ids, targets, WHOLE)
        slope = sum((gradients[name] * direction[name]).sum() for name in values)
        compare(record_parity, f"{ours} - equations", "slope", np.array(slope), np.array(expected))


def test_the_derivative_of_the_square_root_is_bounded_like_the_oracle_s(record_parity):
    # At this Λ the derivative of sqrt(1 - a^2) would be 1.5 times the bound.
    config = replace(BASE, block_pattern=HAWK, num_layers=1)
    values = with_recurrent_param(weights(config), -18.0)
    expected = Recorded("transformers", config, -18.0).gradients(*batch(config), WHOLE)
    name = "model.layers.0.temporal_block.rg_lru.recurrent_param"
    for ours in TWINS:
        found = TWINS[ours](config, values).gradients(*batch(config), WHOLE)
        quantity = "gradient of Λ, bounded"
        compare(record_parity, f"{ours} - transformers", quantity, found[name], expected[name])


@pytest.mark.parametrize("ours", TWINS)
def test_gradients_are_finite_where_nothing_is_forgotten(ours):
    config = replace(BASE, block_pattern=HAWK, num_layers=1)
    values = with_recurrent_param(weights(config), -200.0)  # softplus underflows: a is 1
    gradients = TWINS[ours](config, values).gradients(*batch(config), WHOLE)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
