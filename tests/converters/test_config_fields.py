"""Config fields that differ between trainers: formats that store them, and refusals by name."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from parity import MODELS, tokens, weights
from parity_twins import TWINS, to_numpy
from peers import recurrent_gemma
from safetensors.numpy import load_file, save_file
from slow import slow
from tiny_checkpoints import CONFIG, write_griffin, write_source

import griffin_eval
from griffin_eval.analysis.half_lives import decay_rates, measure
from griffin_eval.api import load
from griffin_eval.config import ADDED, BIASED
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import CheckpointError
from griffin_eval.layout import param_specs

CHANGED = MODELS["every field changed"]
# The changed fields that transformers supports.
THEIRS = dataclasses.replace(
    CONFIG,
    num_kv_heads=2,
    head_dim=12,
    attention_bias=True,
    hidden_activation="gelu",
    tie_embeddings=False,
)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.14"),
    reason="its attention takes two key-value heads for one of twice the size",
)
def test_transformers_and_both_models_read_one_folder(tmp_path):
    write_source(tmp_path / "model", THEIRS)
    model, report = recurrent_gemma().from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids = tokens(THEIRS, 2, 19)
    expected = to_numpy(model(input_ids=torch.from_numpy(ids).long()).logits)
    checkpoint = Checkpoint(tmp_path / "model")
    assert checkpoint.config == THEIRS
    values = {name: checkpoint.numpy(name) for name in param_specs(THEIRS)}
    for twin in TWINS.values():
        found = twin(checkpoint.config, values).logits(ids)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("config", "formats"),
    [
        (THEIRS, ["griffin", "griffin-orbax", "griffin", "hf"]),
        (CHANGED, ["griffin-orbax", "griffin"]),
    ],
    ids=["transformers", "every field"],
)
def test_formats_that_hold_them_keep_config_and_bits(config, formats, tmp_path):
    folder = write_griffin(tmp_path / "source", config)
    for number, target in enumerate(formats):
        source, folder = folder, tmp_path / f"{number}"
        griffin_eval.convert(source, folder, to=target)
        assert Checkpoint(folder).config == config
    for name, value in load_file(folder / "model.safetensors").items():
        assert value.tobytes() == weights(config)[name].tobytes()


def test_a_config_from_before_these_fields_means_their_defaults(tmp_path):
    folder = write_griffin(tmp_path / "source", CONFIG)
    raw = json.loads((folder / "config.json").read_text())
    older = {key: value for key, value in raw.items() if key not in ADDED}
    assert len(older) == len(raw) - len(ADDED)
    (folder / "config.json").write_text(json.dumps(older))
    assert Checkpoint(folder).config == CONFIG
    others = {"transformers_version": "5", "eos_token_id": [1, 2]}
    (folder / "config.json").write_text(json.dumps(raw | others))
    assert Checkpoint(folder).config == CONFIG
    (folder / "config.json").write_text(json.dumps(raw | {"qk_norm": True}))
    with pytest.raises(CheckpointError, match="has qk_norm, which this version does not know"):
        Checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(raw | {"hidden_activation": "relu"}))
    with pytest.raises(CheckpointError, match="hidden_activation must be one of gelu_pytorch_tanh"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 20, "num_heads": 2, "gate_blocks": 2, "lru_width": 20},
        slow({"width": 20, "num_heads": 3, "gate_blocks": 3, "lru_width": 24}),
        slow({"width": 8, "num_heads": 16, "gate_blocks": 16, "lru_width": 16}),
        slow({"rope_base": 500.0, "rope_fraction": 1.0, "num_kv_heads": 2, "head_dim": 5}),
    ],
)
def test_a_model_without_attention_needs_no_heads(changes, tmp_path):
    """Every format that stores such a model works, and so do both frameworks."""
    config = dataclasses.replace(CONFIG, block_pattern=("recurrent",), **changes)
    arrays, base = weights(config), write_griffin(tmp_path / "base", config)
    given = {"embedding_scale": True, "logits_soft_cap": 30.0}
    for target in ("griffin-orbax", "deepmind-flax", "deepmind-torch"):
        out = tmp_path / target
        griffin_eval.convert(base, out, to=target)
        assert Checkpoint(out).config == config
        (out / "config.json").unlink()
        opened = griffin_eval.open_checkpoint(out, **given)
        for name, value in arrays.items():
            assert opened.numpy(name).tobytes() == value.tobytes()
    scores = [
        griffin_eval.Evaluator(base, framework=framework).score([[1, 2, 3, 4]])
        for framework in ("torch", "jax")
    ]
    assert scores[0][0].total == pytest.approx(scores[1][0].total, rel=1e-5)


def test_one_model_has_one_config():
    assert dataclasses.replace(CONFIG, head_dim=CONFIG.head_size) == CONFIG
    one, other = (
        dataclasses.replace(CONFIG, absent_biases=names)
        for names in (("o_proj", "linear_x", "o_proj"), ["linear_x", "o_proj"])
    )
    assert one == other and hash(one) == hash(other)


@pytest.mark.parametrize("framework", ["torch", slow("jax")])
def test_half_lives_know_the_constant_and_absent_biases(framework, tmp_path):
    config = dataclasses.replace(CHANGED, num_layers=2, absent_biases=BIASED)
    other = dataclasses.replace(config, absent_biases=())
    folder = write_griffin(tmp_path / "absent", config)
    write_griffin(tmp_path / "zeros", other)
    drawn = weights(config)
    zeros = {n: drawn.get(n, np.zeros(s.shape, np.float32)) for n, s in param_specs(other).items()}
    save_file(zeros, tmp_path / "zeros" / "model.safetensors")
    ids = tokens(config, 1, 30)[0]
    found, right = (
        measure(Checkpoint(each), ids, framework=framework, model=load(each, framework=framework))
        for each in (folder, tmp_path / "zeros")
    )
    for mine, theirs in zip(found, right, strict=True):
        np.testing.assert_allclose(mine.mean_gate, theirs.mean_gate, rtol=1e-5)
    name = "model.layers.0.temporal_block.rg_lru.recurrent_param"
    rate = 5 * np.logaddexp(0, drawn[name].astype(np.float64))
    np.testing.assert_allclose(decay_rates(Checkpoint(folder))[0].rate, rate)
