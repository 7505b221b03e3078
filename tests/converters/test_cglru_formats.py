"""Checkpoints of models with the CG-LRU, and values computed from their configs."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import traverse_util
from parity import BASE, tokens, weights
from parity_twins import TWINS, twin
from peers import deepmind_with_complex_gates
from slow import fast
from tiny_checkpoints import write_griffin
from xla_options import QUICK_COMPILE

from griffin_eval import verify
from griffin_eval.analysis.half_lives import decay_rates, measure
from griffin_eval.api import load
from griffin_eval.config import PRESETS
from griffin_eval.converters.checkpoint import Checkpoint, Overrides
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.naming.deepmind import DEEPMIND_FLAX
from griffin_eval.converters.naming.tables import bind
from griffin_eval.converters.plan import make_plan
from griffin_eval.errors import CheckpointError
from griffin_eval.initializers import initial_value
from griffin_eval.layout import param_specs

CONFIG = replace(BASE, complex_gates=True, num_layers=4)
REAL = replace(CONFIG, complex_gates=False)
UNSAID = Overrides(
    visible_keys=CONFIG.visible_keys,
    embedding_scale=CONFIG.embedding_scale,
    logits_soft_cap=CONFIG.logits_soft_cap,
)


@pytest.fixture(scope="module")
def griffin(tmp_path_factory):
    """Write a model with the CG-LRU in canonical names."""
    return write_griffin(tmp_path_factory.mktemp("griffin"), CONFIG)


@pytest.fixture(scope="module")
def flax(griffin, tmp_path_factory):
    return to("deepmind-flax", griffin, tmp_path_factory.mktemp("flax") / "out")


def to(target, source, destination, **options):
    convert_checkpoint(make_plan(Checkpoint(source), FORMATS[target], **options), destination)
    return destination


def test_flax_names_and_shapes_are_deepminds_own(monkeypatch):
    deepmind = deepmind_with_complex_gates(monkeypatch)
    with deepmind.relaxed_jax():
        ids = jax.numpy.zeros((1, 3), "int32")
        model = deepmind.deepmind_jax.Griffin(deepmind.deepmind_config(CONFIG))
        params = jax.eval_shape(model.init, jax.random.key(0), ids, ids)["params"]
    flat = traverse_util.flatten_dict(params, sep="/")
    shapes = {name: leaf.shape for name, leaf in flat.items()}
    assert {b.foreign: b.shape for b in bind(DEEPMIND_FLAX, CONFIG)} == shapes
    assert shapes["blocks.0/recurrent_block/rg_lru/a_imag_param"] == (CONFIG.lru_width // 2,)


def test_there_and_back_is_bit_exact(griffin, flax, tmp_path):
    back = to("griffin", flax, tmp_path / "back")
    assert Checkpoint(back).config == Checkpoint(flax).config == CONFIG
    assert verify(griffin, back).same
    once = to("griffin", griffin, tmp_path / "once")
    files = [folder / "model.safetensors" for folder in (once, back)]
    assert files[0].read_bytes() == files[1].read_bytes()
    orbax = to("griffin-orbax", flax, tmp_path / "orbax")
    assert verify(griffin, orbax).same


@pytest.mark.ci
def test_deepminds_jax_restores_it_and_computes_the_same(flax, monkeypatch):
    import orbax.checkpoint as ocp

    deepmind = deepmind_with_complex_gates(monkeypatch)
    ids = tokens(CONFIG, 2, 9)
    model = deepmind.deepmind_jax.Griffin(
        deepmind.deepmind_config(CONFIG), gradient_checkpointing=False
    )
    with deepmind.relaxed_jax():
        params = ocp.PyTreeCheckpointer().restore(flax)

        @jax.jit(compiler_options=QUICK_COMPILE)
        def logits(params, ids):
            at = jax.numpy.tile(jax.numpy.arange(9), (2, 1))
            return model.apply({"params": params}, ids, at, return_cache=False)[0]

        theirs = np.asarray(logits(params, ids))
    for name in TWINS:
        ours = twin(name, CONFIG).logits(ids)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * np.abs(theirs).max())


def test_shapes_say_that_it_is_complex(flax, tmp_path):
    folder = to("deepmind-flax", flax, tmp_path / "bare")
    (folder / "config.json").unlink()
    assert Checkpoint(folder, UNSAID).config == CONFIG
    with pytest.raises(CheckpointError, match="complex_gates is True, not False"):
        Checkpoint(folder, replace(UNSAID, preset="recurrentgemma-2b"))


# Values computed from the config


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"lru_width": 33, "gate_blocks": 3}, r"lru_width \(33\) must be even with complex_gates"),
        ({"gate_blocks": 32}, r"gate_blocks \(32\) must divide half of lru_width \(32\)"),
    ],
)
def test_a_width_that_cannot_be_halved_is_refused(fields, problem):
    replace(REAL, **fields)  # valid without complex gates
    with pytest.raises(ValueError, match=problem):
        replace(CONFIG, **fields)


def test_theta_begins_as_deepminds():
    name = "model.layers.0.temporal_block.rg_lru.imaginary_param"
    spec = param_specs(replace(PRESETS["griffin-7b"], complex_gates=True, num_layers=1))[name]
    ours = np.sort(initial_value(spec, seed=0))
    layers = pytest.importorskip("recurrentgemma.jax.layers")
    draw = layers.rnn_imag_param_init(max_rad=0.1)
    theirs = np.sort(np.asarray(draw(jax.random.key(0), spec.shape)))
    assert spec.shape == theirs.shape == (5632 // 2,) and ours.dtype == np.float32
    assert 0 <= ours[0] < ours[-1] <= np.float32(math.pi / 10)
    # Kolmogorov-Smirnov statistic: largest distance of the quantiles from uniform quantiles
    uniform = np.arange(1, ours.size + 1) / ours.size
    for values in (ours, theirs):
        assert np.abs(values / (math.pi / 10) - uniform).max() < 1.63 / math.sqrt(ours.size)


@pytest.mark.parametrize("framework", fast(["torch"], TWINS))
def test_half_lives_are_of_complex_channels(griffin, framework):
    from importlib import import_module

    checkpoint, ids, params = Checkpoint(griffin), tokens(CONFIG, 1, 12)[0], weights(CONFIG)
    model = load(checkpoint, framework=framework)
    found = measure(checkpoint, ids, framework=framework, model=model)
    assert [layer.number for layer in found] == [0, 1, 3]
    trace = import_module(f"griffin_eval.analysis.gates_{framework}")
    (values,) = trace.layer_values(model, ids, 12)
    inputs = [layer["x"] for layer in values if "x" in layer]
    for layer, x, unmeasured in zip(found, inputs, decay_rates(checkpoint), strict=True):
        lru = f"model.layers.{layer.number}.temporal_block.rg_lru."
        right = 8 * np.log1p(np.exp(params[lru + "recurrent_param"].astype(float)))
        assert right.shape == (CONFIG.lru_width // 2,)
        np.testing.assert_allclose(unmeasured.rate, right, rtol=1e-12)
        gates = zip(
            np.split(x[1:], CONFIG.gate_blocks, 1),
            params[lru + "recurrent_gate_weight"],
            params[lru + "recurrent_gate_bias"],
            strict=True,
        )
        mean = np.concatenate([1 / (1 + np.exp(-(x @ w + b))) for x, w, b in gates], 1).mean(0)
        np.testing.assert_allclose(layer.mean_gate, mean, rtol=1e-5)
        assert layer.histogram.sum() == 11 * right.size
