"""The config's validation and presets, and the table of parameters, against the public models."""

import json
import math
import runpy
from dataclasses import fields, replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from parity import BASE, configs
from slow import examples

from griffin_eval.config import GRIFFIN, HAWK, LOCAL_MQA, MQA, PRESETS, GriffinConfig
from griffin_eval.initializers import initial_value
from griffin_eval.layout import param_specs, parameter_count
from griffin_eval.model_jax import griffin as jax_griffin
from griffin_eval.model_torch import griffin as torch_griffin
from griffin_eval.sharding.split import split_over

RECURRENTGEMMA_2B, RECURRENTGEMMA_9B = (PRESETS[f"recurrentgemma-{n}"] for n in ("2b", "9b"))


GOLDEN = Path(__file__).parent.parent / "golden"
LAYOUTS = json.loads((GOLDEN / "layouts.json").read_text())


@pytest.mark.slow
def test_recorded_layouts_are_those_of_the_libraries():
    assert runpy.run_path(str(GOLDEN / "make_layouts.py"))["layouts"]() == LAYOUTS


@pytest.mark.parametrize(
    ("preset", "tensors"), [("recurrentgemma-2b", 484), ("recurrentgemma-9b", 704)]
)
def test_recurrentgemma_has_the_tensors_of_transformers(preset, tensors):
    expected = LAYOUTS["transformers"][preset]
    specs = param_specs(PRESETS[preset])
    assert {name: list(spec.shape) for name, spec in specs.items()} == expected
    assert len(expected) == tensors


@pytest.mark.parametrize(
    ("preset", "tensors"),
    [
        ("recurrentgemma-2b", 432),
        ("recurrentgemma-9b", 628),
        ("griffin-7b", None),
        ("hawk-7b", None),
    ],
)
def test_presets_are_deepmind_s(preset, tensors):
    config = PRESETS[preset]
    assert LAYOUTS["deepmind-config"][preset] == {
        "vocab_size": config.vocab_size,
        "width": config.width,
        "mlp_expanded_width": config.mlp_width,
        "num_heads": config.num_heads,
        "block_types": [kind.removeprefix("local_") for kind in config.block_types],
        "embeddings_scale_by_sqrt_dim": config.embedding_scale,
        "attention_window_size": config.visible_keys - 1,
        "logits_soft_cap": config.logits_soft_cap,
        "lru_width": config.lru_width,
    }
    if preset.endswith("7b"):
        # Their code has as many gate blocks as heads, the paper (section 2.4) has 16.
        assert config.gate_blocks == 16
        config = replace(config, gate_blocks=config.num_heads)
    shapes = LAYOUTS["deepmind-jax"][preset]
    assert parameter_count(config) == sum(map(math.prod, shapes.values()))
    assert tensors in (None, len(shapes))


def test_recurrentgemma_2b_has_the_published_parameters():
    total = parameter_count(RECURRENTGEMMA_2B)
    body = parameter_count(RECURRENTGEMMA_2B, embedding=False)
    assert [round(n / 1e9, 1) for n in (total, body, total - body)] == [2.7, 2.0, 0.7]


def test_presets_follow_table_2():
    assert len(PRESETS) == 7 + 6 + 6 + 2  # only Griffin was trained at 14B
    for name, config in PRESETS.items():
        assert config.mlp_width == 3 * config.width
        assert config.head_size == (256 if name.startswith("recurrentgemma") else 128)
        pattern = {"hawk": HAWK, "mqa": MQA}.get(name.split("-")[0], GRIFFIN)
        assert config.block_pattern == pattern
        assert config.gate_blocks == (config.num_heads if "gemma" in name else 16)
        assert config.logits_soft_cap == (30.0 if "gemma" in name else 0.0)
        # DeepMind's window 2048 and 1024, which let a query see one key more
        assert config.visible_keys == (2049 if "gemma" in name else 1025)


def test_embeddings_are_multiplied_by_a_bfloat16():
    assert RECURRENTGEMMA_2B.embedding_multiplier == 50.5  # not 50.596
    assert RECURRENTGEMMA_9B.embedding_multiplier == 64.0
    assert PRESETS["griffin-7b"].embedding_multiplier == 1.0
    for width in range(2, 9000, 2):
        expected = float(np.float32(np.sqrt(width)).astype(ml_dtypes.bfloat16))
        assert (
            replace(BASE, width=width, num_heads=1, rope_fraction=1.0).embedding_multiplier
            == expected
        )


BAD = {
    **{
        name: (0, -1, 1.5, True, None)
        for name in ("vocab_size", "width", "mlp_width", "num_heads", "num_layers", "lru_width")
        + ("num_kv_heads", "gate_blocks", "visible_keys", "conv_width")
    },
    "block_pattern": ((), ("attention",), ("recurrent", "local")),
    "norm_eps": (0.0, -1e-6, math.nan, math.inf),
    "rope_base": (1.0, -10.0, math.nan),
    "logits_soft_cap": (-1.0, math.nan, math.inf),
    "rope_fraction": (0.0, -0.5, 1.5, 0.01, 3 / 16, math.nan),
    "complex_gates": (None, 1, "no"),
    "tie_embeddings": (None, 0, "yes"),
    "attention_bias": (None, 0, "yes"),
    "head_dim": (0, -1, 1.5, True),
    "lru_constant": (0.0, -8.0, math.nan, "8"),
    "absent_biases": (None, "o_proj", ("q_proj",)),
    "hidden_activation": (None, "relu", ["gelu"], "GELU"),
}


def test_a_bad_field_is_named_with_its_value():
    for name, values in BAD.items():
        for value in values:
            with pytest.raises(ValueError, match="invalid GriffinConfig") as error:
                replace(BASE, **{name: value})
            assert name in str(error.value) and str(value) in str(error.value), (name, value)


def test_integers_beyond_a_float_are_named():
    names = [n for n, values in BAD.items() if any(type(v) in (int, float) for v in values)]
    with pytest.raises(ValueError, match="invalid GriffinConfig") as error:
        replace(BASE, **dict.fromkeys(names, 10**400))
    assert all(f"{name} must be" in str(error.value) for name in names)


def test_all_bad_fields_are_listed_together():
    names = [name for name in BAD if name != "rope_fraction"]  # checked once the others are good
    with pytest.raises(ValueError) as error:
        replace(BASE, **{name: BAD[name][0] for name in names})
    assert all(name in str(error.value) for name in names)
    with pytest.raises(ValueError) as error:
        replace(BASE, num_heads=3, num_kv_heads=2, gate_blocks=5)
    assert "num_heads (3) must divide width (32) without a head_dim" in str(error.value)
    assert "num_kv_heads (2) must divide num_heads (3)" in str(error.value)
    assert "gate_blocks (5) must divide lru_width (32)" in str(error.value)


# Refused where there is attention: an odd number of rotated dimensions, heads that do not divide
# the width or are more than it, or that heads of keys do not divide.
OF_ATTENTION = (
    {"width": 20, "num_heads": 2},
    {"width": 10, "num_heads": 1},
    {"width": 32, "num_heads": 3},
    {"width": 16, "num_heads": 32},
    {"num_heads": 2, "num_kv_heads": 4},
    {"rope_fraction": 3 / 16},
)


@pytest.mark.parametrize("changes", OF_ATTENTION)
def test_a_model_without_attention_is_not_held_to_its_rules(changes):
    hawk = replace(BASE, block_pattern=("recurrent",), **changes)
    assert not hawk.attends and param_specs(hawk)
    # A pattern with attention that the layers do not reach.
    assert not replace(BASE, num_layers=2, **changes).attends
    for pattern in (GRIFFIN, MQA, LOCAL_MQA):
        with pytest.raises(ValueError, match="num_heads|rope_fraction"):
            replace(BASE, block_pattern=pattern, **changes)
    with pytest.raises(ValueError, match="gate_blocks"):
        replace(hawk, gate_blocks=5)


def test_a_model_without_attention_is_split_by_what_it_has():
    hawk = replace(BASE, block_pattern=("recurrent",), num_heads=3)
    assert (
        split_over(hawk, 2).whole.keys() == split_over(replace(hawk, num_heads=2), 2).whole.keys()
    )
    assert "heads" not in split_over(hawk, 2).whole


def test_activations_have_one_name():
    """transformers' further names of a function, by their values in float64."""
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    names = ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh", "gelu_python", "swish")
    for name in names:
        config = replace(BASE, hidden_activation=name)
        assert config.hidden_activation in ("gelu_pytorch_tanh", "gelu", "silu")
        expected = ACT2FN[config.hidden_activation](x)
        torch.testing.assert_close(ACT2FN[name](x), expected, rtol=0, atol=1e-10)
    assert replace(BASE, hidden_activation="gelu_new") == BASE


def test_every_field_is_validated():
    boolean = {"embedding_scale"}
    assert {field.name for field in fields(GriffinConfig)} == BAD.keys() | boolean


def test_lambda_begins_as_the_paper_says():
    name = "model.layers.0.temporal_block.rg_lru.recurrent_param"
    spec = param_specs(replace(PRESETS["griffin-7b"], num_layers=1))[name]
    values = initial_value(spec, seed=0).astype(float)
    a = 1 / (1 + np.exp(values))  # sigmoid(-Λ)
    uniform = (np.sort(a**8) - 0.9) / (0.999 - 0.9)
    assert 0 <= uniform[0] and uniform[-1] <= 1 + 1e-4
    # Kolmogorov-Smirnov: the largest distance of the quantiles from the uniform ones
    assert np.abs(uniform - np.arange(1, a.size + 1) / a.size).max() < 1.63 / math.sqrt(a.size)


def test_initial_deviations_are_lecun_s_and_the_last_of_each_branch_shrinks():
    config = replace(PRESETS["griffin-100m"], vocab_size=500, num_layers=3)
    specs = param_specs(config)
    W, L, E, gate = config.width, config.lru_width, config.mlp_width, config.lru_width // 16
    last = 2 / config.num_layers
    expected = {
        "model.embed_tokens.weight": 1 / W,
        "model.layers.0.temporal_block.linear_x.weight": 1 / W,
        "model.layers.0.temporal_block.linear_out.weight": last / L,
        "model.layers.0.temporal_block.conv_1d.weight": 0.01 / 4,
        "model.layers.0.temporal_block.rg_lru.input_gate_weight": 1 / gate,
        "model.layers.0.temporal_block.rg_lru.recurrent_gate_weight": 1 / gate,
        "model.layers.2.temporal_block.k_proj.weight": 1 / W,
        "model.layers.2.temporal_block.o_proj.weight": last / W,
        "model.layers.0.mlp_block.up_proj.weight": 1 / W,
        "model.layers.0.mlp_block.down_proj.weight": last / E,
    }
    for name, variance in expected.items():
        assert initial_value(specs[name], 0).var() == pytest.approx(variance, rel=0.1), name
    for name, spec in specs.items():
        if name.endswith("bias") or "norm" in name:
            assert not initial_value(spec, 0).any()


@settings(max_examples=examples(12))
@given(configs())
def test_any_valid_config_has_a_layout_and_builds_both_twins(config):
    specs = param_specs(config)
    assert list(specs) == [spec.name for spec in specs.values()]
    assert len(config.block_types) == config.num_layers
    assert all(len(spec.axes) == len(spec.shape) for spec in specs.values())
    assert parameter_count(config) == sum(math.prod(spec.shape) for spec in specs.values())

    asked = []
    torch_griffin.Griffin(config, lambda spec: asked.append(spec.name) or _parameter(spec))
    assert sorted(asked) == sorted(specs)  # each once
    torch_count = sum(p.numel() for p in torch_griffin.initialize(config).parameters())
    jax_model = jax_griffin.initialize(config)
    jax_count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(jax_model, nnx.Param)))
    assert torch_count == jax_count == parameter_count(config)


def _parameter(spec):
    return torch.nn.Parameter(torch.zeros(spec.shape))
