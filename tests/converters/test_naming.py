"""The naming tables are reversible, complete for every preset, and sufficient to infer configs."""

import dataclasses
import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_oracles import GOLDEN
from slow import fast

from griffin_eval.config import PRESETS, GriffinConfig
from griffin_eval.converters.configs.from_shapes import (
    UNSEEN,
    ask_for,
    complete_fields,
    fields_from_shapes,
)
from griffin_eval.converters.formats import FORMATS, limits, refusals
from griffin_eval.converters.naming import ops
from griffin_eval.converters.naming.deepmind import DEEPMIND_FLAX, DEEPMIND_TORCH
from griffin_eval.converters.naming.tables import (
    CANONICAL,
    CANONICAL_PATHS,
    bind,
    canonical_shapes,
)
from griffin_eval.converters.tensors import in_memory
from griffin_eval.errors import CheckpointError
from griffin_eval.layout import param_specs

FAMILIES = ["griffin-100m", "hawk-3b", "mqa-6b", "recurrentgemma-2b"]  # one preset for each family
TABLES = {
    "canonical": CANONICAL,
    "paths": CANONICAL_PATHS,
    "flax": DEEPMIND_FLAX,
    "torch": DEEPMIND_TORCH,
}
OPS = [op for op in vars(ops).values() if isinstance(op, ops.Op)]
TINY = GriffinConfig(
    vocab_size=11,
    width=8,
    mlp_width=12,
    num_heads=2,
    num_layers=5,
    lru_width=10,
    gate_blocks=2,
    visible_keys=4,
)


@given(data=st.data())
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_operation_is_undone_by_its_inverse(op, data):
    n, m = (data.draw(st.integers(1, 5)) for _ in range(2))
    shape = {2: (n, m), 3: (2, n, m), 4: (2, 1, 1, n)}[op.rank or 2]
    if op is ops.LAST_AXIS:
        shape = (n, 1, m, 1)
    foreign = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    canonical = op.to_canonical(in_memory(foreign))
    np.testing.assert_array_equal(op.to_foreign(*canonical).numpy(), foreign)
    assert tuple(c.shape for c in canonical) == tuple(op.canonical_shapes(shape))
    assert tuple(op.foreign_shape(*(c.shape for c in canonical))) == shape


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_changes_of_every_16_bit_number(dtype):
    """A difference is rounded once, a product to one ulp; long doubles hold both exactly."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        values = values[np.isfinite(values)]
        wide = values.astype(np.longdouble)
        found, product = (
            ops.Change(*change).apply(values) for change in (("minus one",), ("scale by", 0.3))
        )
        nearest = np.abs(found.astype(np.longdouble) - (wide - 1))
        for towards in (-np.inf, np.inf):
            beside = np.nextafter(found, np.array(towards, dtype)).astype(np.longdouble)
            assert np.all(nearest <= np.abs(beside - (wide - 1)))
            beside = np.nextafter(product, np.array(towards, dtype)).astype(np.longdouble)
            assert np.all(np.sign(towards) * (beside - wide * np.longdouble(0.3)) >= 0)
    kept = (values >= 0.5) & (values <= 2)
    assert np.array_equal(found[kept].astype(np.float64), values[kept].astype(np.float64) - 1)


def test_factors_are_of_the_width():
    assert ops.Change("scale by", "sqrt(width)").of(2560).factor == math.sqrt(2560)
    assert ops.Change("scale by", "1/sqrt(width)").of(2560).factor == 1 / math.sqrt(2560)
    assert ops.Change("scale by", 3.0).of(2560).factor == 3.0


@pytest.mark.parametrize("preset", fast(FAMILIES, PRESETS))
@pytest.mark.parametrize("table", TABLES)
def test_tables_cover_every_preset_exactly(preset, table):
    config = PRESETS[preset]
    bindings = bind(TABLES[table], config)
    assert sorted(s.name for b in bindings for s in b.canonical) == sorted(param_specs(config))
    assert len({b.foreign for b in bindings}) == len(bindings)
    shapes = canonical_shapes(TABLES[table], {b.foreign: b.shape for b in bindings})
    assert shapes == {name: spec.shape for name, spec in param_specs(config).items()}


@pytest.mark.parametrize(
    ("preset", "count"), [("recurrentgemma-2b", 432), ("recurrentgemma-9b", 628)]
)
def test_number_of_tensors_is_deepminds(preset, count):
    assert len(bind(DEEPMIND_FLAX, PRESETS[preset])) == count


@pytest.mark.parametrize("preset", ["recurrentgemma-2b", "hawk-7b"])
@pytest.mark.parametrize(
    ("library", "table"), [("deepmind-jax", DEEPMIND_FLAX), ("deepmind-torch", DEEPMIND_TORCH)]
)
def test_names_and_shapes_are_those_of_deepminds_own_models(library, table, preset):
    layouts = json.loads((GOLDEN / "layouts.json").read_text())[library]
    config = PRESETS[preset]
    theirs = dataclasses.replace(config, gate_blocks=config.num_heads)
    found = {b.foreign.replace("/", "."): list(b.shape) for b in bind(table, theirs)}
    assert found == layouts[preset]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("preset", fast(FAMILIES, PRESETS))
def test_a_preset_is_recovered_from_shapes_and_its_name(preset, table):
    config = PRESETS[preset]
    found = {b.foreign: b.shape for b in bind(TABLES[table], config)}
    known = fields_from_shapes(canonical_shapes(TABLES[table], found), "here")
    assert GriffinConfig(**complete_fields(known, {}, preset, "here")[0]) == config
    unseen = {name: getattr(config, name) for name in UNSEEN}
    inferred = GriffinConfig(**complete_fields(known, unseen, None, "here")[0])
    assert param_specs(inferred) == param_specs(config)
    if "global_attention" not in config.block_pattern:  # shapes do not tell it from local attention
        assert inferred.block_types == config.block_types
    assert f"preset {preset}" in ask_for(["visible_keys"], known, "here")
    others = {p for p in PRESETS if PRESETS[p].block_types != config.block_types}
    for other in others & {f"{family}-{preset.split('-')[1]}" for family in ("hawk", "mqa")}:
        with pytest.raises(CheckpointError, match="its blocks are of other types"):
            complete_fields(known, {}, other, "here")


def test_what_no_shape_says_is_asked_for():
    found = {b.foreign: b.shape for b in bind(DEEPMIND_FLAX, PRESETS["recurrentgemma-2b"])}
    known = fields_from_shapes(canonical_shapes(DEEPMIND_FLAX, found), "here")
    fields, _ = complete_fields(known, {"logits_soft_cap": 30.0}, None, "here")
    message = ask_for([name for name in UNSEEN if name not in fields], known, "here")
    assert "visible_keys, embedding_scale:" in message and "logits_soft_cap" not in message
    assert "preset recurrentgemma-2b" in message
    with pytest.raises(CheckpointError, match="width is 2560, not 4096"):
        complete_fields(known, {}, "recurrentgemma-9b", "here")
    with pytest.raises(CheckpointError, match="none can be inferred"):
        fields_from_shapes({"weight": (3, 4)}, "here")


DEEPMIND = ("deepmind-flax", "deepmind-torch")
LIMITS = [  # a field, the formats that cannot store it, and the reason
    ({}, (), ""),
    ({"lru_width": 10}, ("hf",), "lru_width=10"),
    ({"embedding_scale": False}, ("hf",), "embedding_scale=False"),
    ({"logits_soft_cap": 0.0}, ("hf",), "logits_soft_cap=0.0"),
    ({"block_pattern": ("recurrent",)}, ("hf",), "block_pattern=('recurrent',)"),
    ({"block_pattern": ("global_attention",)}, ("hf", *DEEPMIND), "block_pattern="),
    ({"gate_blocks": 4}, ("hf", *DEEPMIND), "gate_blocks=4"),
    ({"complex_gates": True}, ("hf", "deepmind-torch"), "complex_gates=True: its recurrence is r"),
    ({"num_kv_heads": 2}, DEEPMIND, "num_kv_heads=2: it has one head"),
    ({"hidden_activation": "silu"}, DEEPMIND, "hidden_activation='silu': its act"),
    ({"head_dim": 8}, DEEPMIND, "head_dim=8: its heads have"),
    ({"absent_biases": ("o_proj",)}, ("hf", *DEEPMIND), "absent_biases=('o_proj',)"),
    ({"lru_constant": 4.0}, ("hf", *DEEPMIND), "lru_constant=4.0: its const"),
    ({"attention_bias": True}, DEEPMIND, "attention_bias=True: its queries"),
    ({"conv_width": 3}, DEEPMIND, "conv_width=3"),
    ({"norm_eps": 1e-5}, DEEPMIND, "norm_eps=1e-05"),
    ({"rope_base": 1e6}, DEEPMIND, "rope_base="),
    ({"rope_fraction": 1.0}, DEEPMIND, "rope_fraction=1.0"),
]


def test_refusal_matrix():
    for changes, refused_by, reason in LIMITS:
        config = dataclasses.replace(dataclasses.replace(TINY, lru_width=8), **changes)
        for name, target in FORMATS.items():
            found = refusals(config, target)
            assert len(found) == (name in refused_by), (changes, name)
            assert all(text.startswith(reason) for text in found), (changes, name)
    assert not limits(FORMATS["griffin"]) and len(limits(FORMATS["hf"])) == 10
