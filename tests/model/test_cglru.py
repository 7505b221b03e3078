"""Models with the CG-LRU of appendix B, against the equations and DeepMind's.

tests/kernels/test_kernels.py has the operator itself in every layout, and its gradients.
"""

from dataclasses import replace

import numpy as np
import parity_oracles
import parity_reference
import pytest
from parity import BASE, PAPER, relative_error, tokens, weights
from parity_oracles import DeepMindJax
from parity_twins import TWINS, leaves, twin
from recurrentgemma.jax import modules as deepmind_modules
from slow import fast, slow

from griffin_eval.config import HAWK
from griffin_eval.kernels.rglru import reference
from griffin_eval.layout import param_specs

NAMES = (  # in the layout, of the fields of the reference's Gates, in their order
    "recurrent_param",
    "input_gate_weight",
    "input_gate_bias",
    "recurrent_gate_weight",
    "recurrent_gate_bias",
    "imaginary_param",
)
PRECISIONS = ("float32", "float64")
each_twin = pytest.mark.parametrize("name", TWINS)

# At most ten times the largest error seen of either twin.
TOLERANCES = {
    "logits, float32": 1.3e-5,
    "logits, float64": 3e-14,
    "model, gradients, float32": 6e-5,
    "model, gradients, float64": 1.5e-13,
    "hidden": 8e-6,
}


def check(record_parity, pair, quantity, found, expected):
    """Asserts that arrays, or sequences of them, agree within a tolerance; of the table above."""
    if isinstance(found, np.ndarray):
        found, expected = [found], [expected]
    error = max(relative_error(a, b) for a, b in zip(found, expected, strict=True))
    record_parity(f"CG-LRU: {pair}", quantity, error, TOLERANCES[quantity])


# Models of one and of two layers, since complex gates do not touch attention.
COMPLEX = {
    "one layer": replace(BASE, complex_gates=True, block_pattern=HAWK, num_layers=1),
    "hawk": replace(PAPER, complex_gates=True, block_pattern=HAWK, num_layers=2, gate_blocks=12),
}
LENGTH = 2 * BASE.visible_keys + 3


def rg_lru_of_the_equations(p, x, cut, constant):
    assert not cut and constant == 8
    first = np.arange(len(x))[None] == 0
    gates = reference.Gates(*(p[name] for name in NAMES))
    return reference.rglru(x[None], gates, resets=first)[0][0]


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("one layer", "float32"),
        slow("one layer", "float64"),
        slow("hawk", "float32"),
        slow("hawk", "float64"),
    ],
)
def test_logits_equal_the_equations(model, dtype, record_parity, monkeypatch):
    monkeypatch.setattr(parity_reference, "rg_lru", rg_lru_of_the_equations)
    config = COMPLEX[model]
    ids = tokens(config, 3, LENGTH)
    right = np.stack([parity_reference.reference_logits(config, weights(config), t) for t in ids])
    for name in TWINS:
        found = twin(name, config, dtype).logits(ids)
        check(record_parity, f"{name} - equations", f"logits, {dtype}", found, right)


@pytest.mark.parametrize("dtype", fast(["float64"], PRECISIONS))
def test_twins_have_the_same_gradients(dtype, record_parity):
    config = COMPLEX["one layer"]
    resets = np.zeros((2, LENGTH), bool)
    resets[0, [6, 7, 15]] = True
    args = tokens(config, 2, LENGTH), tokens(config, 2, LENGTH, seed=1), resets
    found, right = (twin(name, config, dtype).gradients(*args) for name in TWINS)
    assert all(np.abs(gradient).max() > 1e-4 for gradient in right.values())
    names = sorted(right)
    quantity = f"model, gradients, {dtype}"
    check(
        record_parity,
        "torch - jax",
        quantity,
        [found[n] for n in names],
        [right[n] for n in names],
    )


class ComplexBlock(deepmind_modules.ResidualBlock):
    """DeepMind's block with an option that its model never sets."""

    lru_only_real: bool = False


@pytest.mark.slow
def test_logits_and_gradients_equal_deepminds(record_parity, monkeypatch):
    monkeypatch.setattr(deepmind_modules, "ResidualBlock", ComplexBlock)
    ours, theirs = "rg_lru.imaginary_param", "rg_lru.a_imag_param"
    row = (f"recurrent_block.{theirs}", lambda a: a)
    monkeypatch.setitem(parity_oracles._BLOCK, f"temporal_block.{ours}", row)
    config = COMPLEX["one layer"]
    oracle = DeepMindJax(config, weights(config))
    resets = np.zeros((2, LENGTH), bool)
    resets[0, [6, 7, 15]] = True
    ids, targets = tokens(config, 2, LENGTH), tokens(config, 2, LENGTH, seed=1)
    logits, right = oracle.logits(ids, resets), oracle.gradients(ids, targets, resets)
    for name in TWINS:
        model, pair = twin(name, config), f"{name} - deepmind-jax"
        check(record_parity, pair, "logits, float32", model.logits(ids, resets=resets), logits)
        found = model.gradients(ids, targets, resets)
        quantity = "model, gradients, float32"
        names = sorted(right)
        check(record_parity, pair, quantity, [found[n] for n in names], [right[n] for n in names])


@each_twin
def test_chunks_ragged_rows_and_packed_rows_change_nothing(name, record_parity):
    config = COMPLEX["one layer"]
    model, ids = twin(name, config), tokens(config, 3, LENGTH)
    lengths = np.array([LENGTH, 11, 0])
    whole, end = model.step(ids, lengths, model.init_state(3))

    state, at, parts, packs = model.init_state(3), 0, [], model.init_state(3)
    for cut in (9, 1, 9):
        counts = np.clip(lengths - at, 0, cut)
        # JAX compiles one program, for chunks of 9 tokens.
        width = cut if name == "torch" else 9
        chunk = np.zeros((3, width), ids.dtype)
        chunk[:, :cut] = ids[:, at : at + cut]
        hidden, state = model.step(chunk, counts, state)
        parts.append(hidden[:, :cut])
        flat = np.concatenate([row[at : at + n] for row, n in zip(ids, counts, strict=True)])
        padded = np.pad(flat, (0, 2 * width + 1 - len(flat)))
        packed_hidden, packs = model.step_packed(padded, counts, packs, 4)
        right = np.concatenate([row[at : at + n] for row, n in zip(whole, counts, strict=True)])
        pair = f"{name} packed - whole"
        check(record_parity, pair, "hidden", packed_hidden[0, : len(flat)], right)
        at += cut
    found = np.concatenate(parts, 1)
    for row, n in enumerate(lengths):
        check(record_parity, f"{name} chunks - whole", "hidden", found[row, :n], whole[row, :n])
    check(record_parity, f"{name} chunks - whole", "hidden", leaves(state), leaves(end))
    check(record_parity, f"{name} packed - whole", "hidden", leaves(packs), leaves(end))


@pytest.mark.parametrize("name", fast(["torch"], TWINS))
def test_bfloat16_keeps_states_and_both_parameters_in_float32(name):
    config = COMPLEX["one layer"]
    model, ids = twin(name, config, "bfloat16"), tokens(config, 3, LENGTH)
    hidden, state = model.step(ids, np.full(3, LENGTH), model.init_state(3))
    assert str(state.layers[0].h.dtype).endswith("float32")
    assert str(state.layers[0].conv.dtype).endswith("bfloat16")
    wide, _ = twin(name, config).step(ids, np.full(3, LENGTH), twin(name, config).init_state(3))
    assert 0 < relative_error(hidden, wide) < 0.1
    for param, spec in param_specs(config).items():
        assert spec.keep_float32 == param.endswith(("recurrent_param", "imaginary_param"))
