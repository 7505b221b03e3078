"""The CG-LRU of appendix B in both twins, against the reference and DeepMind's layer."""

import functools
import itertools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import parity_oracles
import parity_reference
import pytest
import rglru_torch
import torch
from flax import nnx
from parity import BASE, PAPER, relative_error, tokens, weights
from parity_oracles import DeepMindJax, relaxed_jax
from parity_twins import TWINS, leaves, twin
from recurrentgemma.jax import layers as deepmind_layers
from recurrentgemma.jax import modules as deepmind_modules
from slow import fast, slow
from torch_gradients import pulled_back
from xla_options import QUICK_COMPILE

from griffin_eval.config import HAWK
from griffin_eval.kernels.rglru import plain_scan_jax, plain_scan_torch, reference
from griffin_eval.layout import ParamScope, param_specs
from griffin_eval.model_jax import layers as jax_layers
from griffin_eval.model_jax import layouts as jax_layouts
from griffin_eval.model_torch import layers as torch_layers
from griffin_eval.model_torch import layouts as torch_layouts

CONFIG = replace(BASE, complex_gates=True, lru_width=36, gate_blocks=3)
PREFIX = "model.layers.0.temporal_block.rg_lru."
SPECS = param_specs(CONFIG)
# What the layout calls the fields of the reference's Gates, in their order.
NAMES = (
    "recurrent_param",
    "input_gate_weight",
    "input_gate_bias",
    "recurrent_gate_weight",
    "recurrent_gate_bias",
    "imaginary_param",
)
LONG, SHORT = 14, 5  # steps: two passes of the scan, and a plain loop
PRECISIONS = ("float32", "float64")
each_twin = pytest.mark.parametrize("name", TWINS)
each_precision = pytest.mark.parametrize("dtype", PRECISIONS)

# At most ten times the largest error seen of either twin.
TOLERANCES = {
    "float32": 3e-6,
    "float64": 5e-15,
    "gradients, float32": 1e-5,
    "gradients, float64": 1.5e-14,
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


# The scan of complex numbers, as a function of real ones: whatever a framework calls the gradient
# of a complex number, that of its parts is the same.


def parts(length, dtype, seed=0):
    """Real and imaginary parts of a, x and h0, [2, T, 5] and [2, 5]; |a| from 0 to 1, any angle."""
    rng = np.random.default_rng([seed, length])
    radius = rng.uniform(0, 1, (2, length, 5)) ** rng.choice([0.01, 1.0], (2, 1, 5))
    radius[rng.random(radius.shape) < 0.1] = 0.0
    angle = rng.uniform(-np.pi, np.pi, radius.shape)
    x = rng.standard_normal((2, *radius.shape))
    h0 = rng.standard_normal((2, 2, 5))
    found = (radius * np.cos(angle), radius * np.sin(angle), *x, *h0)
    return tuple(value.astype(dtype) for value in found)


def reference_scan(a_re, a_im, x_re, x_im, h_re, h_im):
    h, _ = reference.linear_scan(a_re + 1j * a_im, x_re + 1j * x_im, h_re + 1j * h_im)
    return h.real, h.imag


def loop_in_torch(*arrays):
    a, x, h0 = (torch.complex(*arrays[i : i + 2]) for i in (0, 2, 4))
    h, _ = rglru_torch.linear_scan(a, x, h0)
    return h.real, h.imag


def torch_scan(*arrays):
    a, x, h0 = (torch.complex(*arrays[i : i + 2]) for i in (0, 2, 4))
    h = plain_scan_torch.linear_scan(a, x, h0)
    return h.real, h.imag


def jax_scan(*arrays):
    a, x, h0 = (jax.lax.complex(*arrays[i : i + 2]) for i in (0, 2, 4))
    h = plain_scan_jax.linear_scan(a, x, h0)
    return h.real, h.imag


def pull_back(function, arrays, cotangents):
    """Values of a function of JAX arrays, and its gradients."""

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def run(arrays, cotangents):
        values, back = jax.vjp(function, *arrays)
        return values, back(cotangents)

    found = run(*(tuple(map(jnp.asarray, given)) for given in (arrays, cotangents)))
    return [[np.asarray(v) for v in vs] for vs in found]


def scanned(name, arrays, cotangents):
    if name == "jax":
        with jax.enable_x64(arrays[0].dtype == np.float64):
            return pull_back(jax_scan, arrays, cotangents)
    arrays = [torch.tensor(v, requires_grad=True) for v in arrays]
    values = torch_scan(*arrays)
    gradients = torch.autograd.grad(values, arrays, [torch.from_numpy(c) for c in cotangents])
    return [[v.detach().numpy() for v in vs] for vs in (values, gradients)]


@pytest.mark.parametrize(
    ("name", "length", "dtype"),
    [
        case
        if case[:2] in (("torch", 1), ("torch", 9)) or case == ("jax", 9, "float64")
        else slow(*case)
        for case in itertools.product(TWINS, (1, 8, 9, 23), PRECISIONS)
    ],
)
def test_scan_and_its_gradients_equal_the_loop(name, length, dtype, record_parity):
    wide, cotangents = parts(length, "float64"), parts(length, "float64", seed=1)[2:4]
    values, gradients = pulled_back(loop_in_torch, wide, cotangents)
    for ours, right in zip(values, reference_scan(*wide), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-13, atol=1e-13)
    narrow = [[v.astype(dtype) for v in vs] for vs in (wide, cotangents)]
    found = scanned(name, *narrow)
    assert found[0][0].dtype == dtype
    check(record_parity, f"{name} scan - loop", dtype, found[0], values)
    check(record_parity, f"{name} scan - loop", f"gradients, {dtype}", found[1], gradients)


# The layer, in any layout


class Case(NamedTuple):
    """Tokens as they lie: positions [B, T] in their documents, and as the reference has them."""

    positions: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray | None = None

    @property
    def padding(self):
        batch, time = self.positions.shape
        read = np.zeros((batch, time), bool)
        for s, length in enumerate(self.lengths):
            row, first = (s, 0) if self.starts is None else (0, self.starts[s])
            read[row, first : first + length] = True
        return ~read


def rows(time, first, lengths, resets=()):
    positions = np.array(first)[:, None] + np.arange(time)
    for row, start in resets:
        positions[row, start:] = np.arange(time - start)
    return Case(positions, np.array(lengths))


def packed(time, first, lengths):
    starts = np.cumsum([0, *lengths[:-1]])
    positions = np.full((1, time), 99)
    for start, length, before in zip(starts, lengths, first, strict=True):
        positions[0, start : start + length] = before + np.arange(length)
    return Case(positions, np.array(lengths), starts)


CASES = {
    "resets": rows(LONG, [0, 0], [LONG, LONG], [(0, 6), (0, 7), (1, 11)]),
    "ragged, going on": rows(LONG, [9, 0, 5, 4], [LONG, 9, 0, 13], [(0, 11), (3, 12)]),
    "few steps": rows(SHORT, [0, 2], [SHORT, 3], [(1, 1)]),
    "one step": rows(1, [0, 7], [1, 1]),
    "packed": packed(LONG, [4, 0, 3, 0, 8], [4, 0, 5, 2, 0]),
    "packed, no padding": packed(LONG, [0, 5], [6, 8]),
}


def layer_inputs(case, seed=0):
    """The fields of Gates, x and h0, in float64; θ turns by half a circle at most."""
    rng = np.random.default_rng(seed)
    gates = {name: 0.7 * rng.standard_normal(SPECS[PREFIX + name].shape) for name in NAMES}
    gates["recurrent_param"] = rng.uniform(-5, 1, gates["recurrent_param"].shape)
    gates["imaginary_param"] = rng.uniform(-np.pi, np.pi, gates["imaginary_param"].shape)
    x = rng.standard_normal((*case.positions.shape, CONFIG.lru_width))
    h0 = rng.standard_normal((len(case.lengths), CONFIG.lru_width))
    return (*gates.values(), x, h0)


def cotangents(case, *like):
    """Of every h_t that means something, and of the last states."""
    rng = np.random.default_rng(1)
    found = [rng.standard_normal(x.shape) for x in like]
    found[0][case.padding] = 0.0
    return found


@functools.cache
def expected(name):
    """Return every h_t and the last states, and their gradients by torch, in float64."""
    case = CASES[name]

    def layer(module, *arrays):
        *gates, x, h0 = arrays
        layout = {"resets": case.positions == 0, "lengths": case.lengths, "starts": case.starts}
        return module.rglru(x, reference.Gates(*gates), h0, **layout)

    inputs = layer_inputs(case)
    in_torch = functools.partial(layer, rglru_torch)
    values, gradients = pulled_back(in_torch, inputs, cotangents(case, *inputs[-2:]))
    for ours, right in zip(values, layer(reference, *inputs), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-12, atol=1e-13)
    return values, gradients


def torch_layer(case, *arrays):
    *gates, x, h0 = arrays
    values = dict(zip(NAMES, gates, strict=True))
    unit = torch_layers.RGLRU(
        CONFIG, ParamScope(SPECS, lambda s: values[s.name[len(PREFIX) :]], PREFIX)
    )
    lengths = torch.from_numpy(case.lengths)
    packs = case.starts is not None
    layout = (
        torch_layouts.pack(
            lengths, x.shape[1], 4, torch_layouts.PoolRows(lengths, lengths, lengths)
        )
        if packs
        else torch_layouts.PaddedLayout(lengths)
    )
    positions, padding = torch.from_numpy(case.positions), torch.from_numpy(case.padding)
    none = torch.zeros(*x.shape[:2], 0)
    return unit(x, torch_layouts.StepContext(positions, positions, padding, none, none, layout), h0)


def jax_layer(case, *arrays):
    *gates, x, h0 = arrays
    values = {name: nnx.Param(gate) for name, gate in zip(NAMES, gates, strict=True)}
    unit = jax_layers.RGLRU(
        CONFIG, ParamScope(SPECS, lambda s: values[s.name[len(PREFIX) :]], PREFIX)
    )
    lengths = jnp.asarray(case.lengths, jnp.int32)
    packs = case.starts is not None
    layout = (
        jax_layouts.pack(lengths, x.shape[1], 4, jax_layouts.PoolRows(lengths, lengths, lengths))
        if packs
        else jax_layouts.PaddedLayout(lengths)
    )
    positions, padding = jnp.asarray(case.positions, jnp.int32), jnp.asarray(case.padding)
    none = jnp.zeros((*x.shape[:2], 0))
    return unit(x, jax_layouts.StepContext(positions, positions, padding, none, none, layout), h0)


def computed(name, case, arrays, cotangents):
    """Values and gradients of a twin's layer."""
    if name == "jax":
        with jax.enable_x64(arrays[0].dtype == np.float64):
            return pull_back(functools.partial(jax_layer, case), arrays, cotangents)
    arrays = [torch.tensor(v, requires_grad=True) for v in arrays]
    values = torch_layer(case, *arrays)
    gradients = torch.autograd.grad(values, arrays, [torch.from_numpy(c) for c in cotangents])
    return [[v.detach().numpy() for v in vs] for vs in (values, gradients)]


@pytest.mark.parametrize("name", fast(["torch"], TWINS))
@pytest.mark.parametrize("case", CASES)
@each_precision
def test_layer_and_its_gradients_equal_the_reference(name, case, dtype, record_parity):
    inputs = layer_inputs(CASES[case])
    narrow = [v.astype(dtype) for v in inputs]
    wanted = [v.astype(dtype) for v in cotangents(CASES[case], *inputs[-2:])]
    values, gradients = computed(name, CASES[case], narrow, wanted)
    right_values, right_gradients = expected(case)
    assert all(v.dtype == dtype for v in values + gradients)
    read = ~CASES[case].padding
    pair = f"{name} - equations"
    check(record_parity, pair, dtype, values[0][read], right_values[0][read])
    check(record_parity, pair, dtype, values[1], right_values[1])
    check(record_parity, pair, f"gradients, {dtype}", gradients, right_gradients)


@each_twin
def test_padding_leaves_the_state_bit_for_bit_whatever_it_holds(name):
    case = CASES["ragged, going on"]
    arrays = [v.astype("float32") for v in layer_inputs(case)]
    *_, x, h0 = arrays
    x[case.padding] = np.nan
    if name == "jax":
        layer = jax.jit(functools.partial(jax_layer, case), compiler_options=QUICK_COMPILE)
        _, last = layer(*map(jnp.asarray, arrays))
    else:
        _, last = torch_layer(case, *map(torch.from_numpy, arrays))
    np.testing.assert_array_equal(np.asarray(last)[2], h0[2])  # of a row that reads nothing
    _, right = expected("ragged, going on")[0]
    assert relative_error(np.asarray(last), right) < TOLERANCES["float32"]


# DeepMind's layer, which with a cache takes the real part of a_t, so only without


def deepmind_layer(positions, *arrays):
    a_param, in_w, in_b, a_w, a_b, a_imag_param, x = arrays
    params = {
        "a_param": a_param,
        "a_imag_param": a_imag_param,
        "input_gate": {"w": in_w, "b": in_b},
        "a_gate": {"w": a_w, "b": a_b},
    }
    layer = deepmind_layers.RGLRU(CONFIG.lru_width, CONFIG.gate_blocks, only_real=False)
    return layer.apply({"params": params}, x, jnp.asarray(positions))


@functools.cache
def deepminds(dtype):
    """Of the case with resets: values, and gradients of all but h0."""
    case = CASES["resets"]
    *inputs, h0 = (v.astype(dtype) for v in layer_inputs(case))
    wanted = tuple(v.astype(dtype) for v in cotangents(case, inputs[-1], h0))
    layer = functools.partial(deepmind_layer, case.positions)
    scan = functools.partial(deepmind_layers.scan.linear_scan, acc_float_dtype=jnp.dtype(dtype))
    with (
        jax.enable_x64(dtype == "float64"),
        relaxed_jax(),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(deepmind_layers.scan, "linear_scan", scan)  # its own is float32 throughout
        return pull_back(layer, inputs, wanted)


@pytest.mark.parametrize("dtype", fast(["float64"], PRECISIONS))
@each_twin
def test_layer_and_its_gradients_equal_deepminds(name, dtype, record_parity):
    case = CASES["resets"]
    inputs = [v.astype(dtype) for v in layer_inputs(case)]
    wanted = [v.astype(dtype) for v in cotangents(case, *inputs[-2:])]
    values, gradients = computed(name, case, inputs, wanted)
    right_values, right_gradients = deepminds(dtype)
    pair = f"{name} - deepmind-jax"
    check(record_parity, pair, dtype, values, right_values)
    check(record_parity, pair, f"gradients, {dtype}", gradients[:-1], right_gradients)
    assert not gradients[-1].any()  # a document starts with nothing


# The whole model


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
