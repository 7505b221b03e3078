"""The shipped tables of names: checkpoints laid out as trainers do, and read back.

The layouts are written here in numpy, after the converters and models in each trainer's source. No
trainer's code runs here.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from slow import fast
from typer.testing import CliRunner

from griffin_eval import convert
from griffin_eval.cli.main import app
from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.configs.own import config_json
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.naming import trainers
from griffin_eval.converters.naming.user_table import read_names
from griffin_eval.converters.output.manifest import MANIFEST_FILE
from griffin_eval.converters.overrides import Overrides
from griffin_eval.converters.tensors import torch_tensor
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.layout import param_specs

GRIFFIN = GriffinConfig(
    vocab_size=11,
    width=8,
    mlp_width=12,
    num_heads=2,
    num_layers=5,
    lru_width=8,
    gate_blocks=2,
    visible_keys=5,
)
HAWK = dataclasses.replace(
    GRIFFIN,
    lru_width=12,
    block_pattern=("recurrent",),
    num_layers=2,
    visible_keys=1,
    embedding_scale=False,
    logits_soft_cap=0.0,
    tie_embeddings=False,
    hidden_activation="gelu",
)
HIPPOGRIFF = dataclasses.replace(
    GRIFFIN,
    block_pattern=("local_attention", "recurrent"),
    num_layers=4,
    lru_width=12,
    gate_blocks=1,
    embedding_scale=False,
    logits_soft_cap=0.0,
    norm_eps=1e-30,
    rope_fraction=1.0,
    hidden_activation="gelu",
)
Arrays = dict[str, np.ndarray]


def weights(config: GriffinConfig, dtype) -> Arrays:
    """Return random parameters, with nonzero biases and norms."""
    draw = np.random.default_rng(0)
    return {
        name: draw.normal(size=spec.shape).astype(np.float32).astype(dtype)
        for name, spec in param_specs(config).items()
    }


def nemo(w: Arrays, config: GriffinConfig) -> Arrays:
    out = {
        "model.embedding.word_embeddings.weight": w["model.embed_tokens.weight"],
        "model.decoder.final_layernorm.weight": w["model.final_norm.weight"],
    }
    for i, kind in enumerate(config.block_types):
        theirs, ours = f"model.decoder.layers.{i}.", f"model.layers.{i}."
        block = ours + "temporal_block."
        if kind == "recurrent":
            place = theirs + "recurrent_layer."
            out[place + "linear_in.layer_norm_weight"] = w[ours + "temporal_pre_norm.weight"]
            for part in ("weight", "bias"):
                pair = [w[f"{block}linear_{n}.{part}"] for n in "xy"]
                out[place + f"linear_in.{part}"] = np.concatenate(pair)
                out[place + f"linear_out.{part}"] = w[f"{block}linear_out.{part}"]
                out[place + f"conv_1d.conv_1d.{part}"] = w[f"{block}conv_1d.{part}"]
            out[place + "rg_lru.a_param"] = w[block + "rg_lru.recurrent_param"]
            for gate, name in (("input_gate", "input"), ("a_gate", "recurrent")):
                out[place + f"rg_lru.{gate}.w"] = w[block + f"rg_lru.{name}_gate_weight"]
                out[place + f"rg_lru.{gate}.b"] = w[block + f"rg_lru.{name}_gate_bias"]
            extra = ("linear_in", "linear_out")
        else:
            place = theirs + "self_attention."
            out[place + "linear_qkv.layer_norm_weight"] = w[ours + "temporal_pre_norm.weight"]
            rows = np.concatenate([w[f"{block}{n}_proj.weight"] for n in "qkv"])
            out[place + "linear_qkv.weight"] = rows
            biases = [w[f"{block}{n}_proj.bias"] for n in "qkv"]
            out[place + "linear_qkv.bias"] = np.concatenate(biases)
            out[place + "linear_proj.weight"] = w[block + "o_proj.weight"]
            out[place + "linear_proj.bias"] = w[block + "o_proj.bias"]
            extra = ("linear_qkv", "linear_proj")
        mlp = theirs + "mlp."
        out[mlp + "linear_fc1.layer_norm_weight"] = w[ours + "channel_pre_norm.weight"]
        for part in ("weight", "bias"):
            pair = [w[f"{ours}mlp_block.{n}_proj.{part}"] for n in ("gate", "up")]
            out[mlp + f"linear_fc1.{part}"] = np.concatenate(pair)
            out[mlp + f"linear_fc2.{part}"] = w[f"{ours}mlp_block.down_proj.{part}"]
        for name in (*(place + n for n in extra), mlp + "linear_fc1", mlp + "linear_fc2"):
            out[name + "._extra_state"] = np.arange(7, dtype=np.uint8)
    return out


def trtllm(w: Arrays, config: GriffinConfig) -> Arrays:
    dtype = w["model.embed_tokens.weight"].dtype
    wide = {name: array.astype(np.float32) for name, array in w.items()}
    embedding = wide["model.embed_tokens.weight"]
    out = {
        "lm_head.weight": embedding,
        "transformer.vocab_embedding.weight": embedding * np.float32(config.width**0.5),
        "transformer.ln_f.weight": wide["model.final_norm.weight"] + 1,
    }
    for i, kind in enumerate(config.block_types):
        theirs, ours = f"transformer.layers.{i}.", f"model.layers.{i}."
        block = ours + "temporal_block."
        out[theirs + "input_layernorm.weight"] = wide[ours + "temporal_pre_norm.weight"] + 1
        out[theirs + "post_layernorm.weight"] = wide[ours + "channel_pre_norm.weight"] + 1
        if kind == "recurrent":
            place = theirs + "recurrent."
            for name in ("linear_x", "linear_out"):
                for part in ("weight", "bias"):
                    out[place + f"{name}.{part}"] = wide[f"{block}{name}.{part}"]
            out[place + "linear_y.weight"] = wide[block + "linear_y.weight"]
            out[place + "y_bias"] = wide[block + "linear_y.bias"]
            taps = wide[block + "conv_1d.weight"]
            out[place + "conv1d.weight"] = taps.reshape(config.lru_width, 1, config.conv_width, 1)
            out[place + "conv1d.bias"] = wide[block + "conv_1d.bias"]
            out[place + "rg_lru.recurrent_param"] = wide[block + "rg_lru.recurrent_param"]
            for gate in ("input_gate", "recurrent_gate"):
                for part in ("weight", "bias"):
                    out[place + f"rg_lru.{gate}.{part}"] = wide[block + f"rg_lru.{gate}_{part}"]
        else:
            rows = [wide[f"{block}{n}_proj.weight"] for n in "qkv"]
            out[theirs + "attention.qkv.weight"] = np.concatenate(rows)
            out[theirs + "attention.dense.weight"] = wide[block + "o_proj.weight"]
            out[theirs + "attention.dense.bias"] = wide[block + "o_proj.bias"]
        for name, mine in (("fc", "gate"), ("gate", "up"), ("proj", "down")):
            for part in ("weight", "bias"):
                out[theirs + f"mlp.{name}.{part}"] = wide[f"{ours}mlp_block.{mine}_proj.{part}"]
    return {name: array.astype(dtype) for name, array in out.items()}


def plus_one(w: np.ndarray) -> np.ndarray:
    return (w.astype(np.float64) + 1).astype(w.dtype)


def hippogriff(w: Arrays, config: GriffinConfig) -> Arrays:
    out = {
        "embedding.weight": w["model.embed_tokens.weight"],
        "lm_head.weight": w["model.embed_tokens.weight"],
        "output_norm.gamma": plus_one(w["model.final_norm.weight"]),
    }
    for i in range(config.num_layers // 2):
        theirs = f"backbone.{i}."
        for layer, name in ((2 * i, "smqa"), (2 * i + 1, "time")):
            ours = f"model.layers.{layer}."
            out[theirs + name + "_norm.gamma"] = plus_one(w[ours + "temporal_pre_norm.weight"])
            mlp = theirs + ("smqa_gmlp" if name == "smqa" else "gmlp")
            out[mlp + "_norm.gamma"] = plus_one(w[ours + "channel_pre_norm.weight"])
            pair = [w[f"{ours}mlp_block.{n}_proj.weight"] for n in ("gate", "up")]
            out[mlp + ".grow.weight"] = np.vstack(pair)
            out[mlp + ".shrink.weight"] = w[ours + "mlp_block.down_proj.weight"]
        block, place = f"model.layers.{2 * i}.temporal_block.", theirs + "smqa."
        out[place + "q.weight"] = w[block + "q_proj.weight"]
        out[place + "kv.weight"] = np.vstack([w[f"{block}{n}_proj.weight"] for n in "kv"])
        out[place + "output.weight"] = w[block + "o_proj.weight"]
        block, place = f"model.layers.{2 * i + 1}.temporal_block.", theirs + "time."
        gate_and_x = [w[f"{block}linear_{n}.weight"] for n in "yx"]
        out[place + "input.weight"] = np.vstack(gate_and_x)
        out[place + "conv.weight"] = w[block + "conv_1d.weight"]
        out[place + "conv.bias"] = w[block + "conv_1d.bias"]
        gates = [w[f"{block}rg_lru.{n}_gate_weight"][0] for n in ("recurrent", "input")]
        out[place + "gates.weight"] = np.vstack([gate.T for gate in gates])
        biases = [w[f"{block}rg_lru.{n}_gate_bias"][0] for n in ("recurrent", "input")]
        out[place + "gates.bias"] = np.hstack(biases)
        out[place + "forget_base"] = w[block + "rg_lru.recurrent_param"]
        out[place + "output.weight"] = w[block + "linear_out.weight"]
        out[place + "alpha_log_scale"] = np.log(np.array([8.0])).astype(biases[0].dtype)
    return out


def hawk_pytorch(w: Arrays, config: GriffinConfig) -> Arrays:
    out = {
        "embed_tokens.weight": w["model.embed_tokens.weight"],
        "lm_head.weight": w["lm_head.weight"],
        "norm.weight": plus_one(w["model.final_norm.weight"]),
    }
    for i in range(config.num_layers):
        theirs, ours = f"layers.{i}.", f"model.layers.{i}."
        block, place = ours + "temporal_block.", theirs + "recc."
        out[theirs + "input_norm.weight"] = plus_one(w[ours + "temporal_pre_norm.weight"])
        out[theirs + "post_recurrent_norm.weight"] = plus_one(w[ours + "channel_pre_norm.weight"])
        out[place + "input_xy.weight"] = np.vstack([w[f"{block}linear_{n}.weight"] for n in "xy"])
        out[place + "resid_proj.weight"] = w[block + "linear_out.weight"]
        out[place + "conv1d.w"] = w[block + "conv_1d.weight"][:, 0].T
        out[place + "conv1d.b"] = w[block + "conv_1d.bias"]
        out[place + "rg_lru_a_param"] = w[block + "rg_lru.recurrent_param"]
        for gate, name in (("input_gate", "input"), ("a_gate", "recurrent")):
            out[place + f"rg_lru_{gate}.w"] = w[block + f"rg_lru.{name}_gate_weight"]
            out[place + f"rg_lru_{gate}.b"] = w[block + f"rg_lru.{name}_gate_bias"]
        pair = [w[f"{ours}mlp_block.{n}_proj.weight"] for n in ("gate", "up")]
        out[theirs + "mlp.gate_up_proj.weight"] = np.vstack(pair)
        out[theirs + "mlp.resid_proj.weight"] = w[ours + "mlp_block.down_proj.weight"]
    return out


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A trainer: config, layout function, file name, and fields that no tensor shows."""

    config: GriffinConfig
    lay_out: Callable[[Arrays, GriffinConfig], Arrays]
    file: str
    given: dict
    no_biases: bool = False
    norms: bool = True  # stored as 1 + w


TRAINERS = {
    "nemo": Trainer(
        dataclasses.replace(GRIFFIN, attention_bias=True),
        nemo,
        "model_weights.ckpt",
        {"visible_keys": 5, "logits_soft_cap": 30.0},
        norms=False,
    ),
    "trtllm": Trainer(
        GRIFFIN, trtllm, "rank0.safetensors", {"visible_keys": 5, "logits_soft_cap": 30.0}
    ),
    "hippogriff": Trainer(
        HIPPOGRIFF, hippogriff, "checkpoint.pt", {"visible_keys": 5}, no_biases=True
    ),
    "hawk-pytorch": Trainer(HAWK, hawk_pytorch, "hawk.pt", {}, no_biases=True),
}


def model(name: str, dtype=np.float32, vocab_size: int = 11) -> tuple[Arrays, Arrays]:
    """Return the expected parameters, and the tensors of a trainer's checkpoint of them."""
    trainer = TRAINERS[name]
    config = dataclasses.replace(trainer.config, vocab_size=vocab_size)
    expected = weights(config, dtype)
    if trainer.no_biases:
        for bias in expected:
            if bias.endswith(("_proj.bias", "linear_x.bias", "linear_y.bias", "linear_out.bias")):
                expected[bias][:] = 0
    tensors = trainer.lay_out(expected, config)
    for norm in [n for n in expected if n.endswith("norm.weight")] if trainer.norms else []:
        expected[norm] = (plus_one(expected[norm]).astype(np.float64) - 1).astype(dtype)
    return expected, tensors


def write(folder: Path, name: str, tensors: Arrays) -> Path:
    """Write a checkpoint as the trainer does and return the path to open."""
    folder.mkdir()
    path = folder / TRAINERS[name].file
    if path.suffix == ".safetensors":
        save_file({n: np.ascontiguousarray(a) for n, a in tensors.items()}, path)
        architecture = {"architecture": "RecurrentGemmaForCausalLM", "hidden_size": 8}
        architecture |= {"quantization": {"quant_algo": None, "group_size": 128}}
        (folder / "config.json").write_text(json.dumps(architecture))
        return folder
    torch.save({n: torch_tensor(np.array(a)) for n, a in tensors.items()}, path)
    return path


def overrides(name: str, **more) -> Overrides:
    return Overrides(names=name, **{"accept_differences": True, **TRAINERS[name].given, **more})


def test_every_table_that_ships_is_tested():
    assert TRAINERS.keys() == trainers.TRAINERS.keys()
    for name in TRAINERS:
        assert read_names(name).title


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TRAINERS)
def test_a_checkpoint_is_read_as_its_trainer_lays_it_out(tmp_path, name, dtype):
    expected, tensors = model(name, np.dtype(getattr(ml_dtypes, dtype, dtype)))
    checkpoint = Checkpoint(write(tmp_path / "model", name, tensors), overrides(name))
    assert checkpoint.config == TRAINERS[name].config
    assert checkpoint.dtypes == dict.fromkeys(expected, dtype)
    convert(checkpoint, tmp_path / "out", to="griffin")
    for found in (checkpoint, Checkpoint(tmp_path / "out")):
        for parameter, values in expected.items():
            read = found.numpy(parameter)
            assert read.shape == values.shape and read.tobytes() == values.tobytes(), parameter
            as_torch = found.torch(parameter).float().numpy()
            assert np.array_equal(as_torch, values.astype(np.float32)), parameter
    manifest = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    assert manifest.get("differs", "") == "; ".join(read_names(name).differs)


@pytest.mark.parametrize("name", fast(["nemo"], TRAINERS))
def test_lm_eval_answers_as_of_the_same_weights_in_a_format_of_ours(tmp_path, checkpoint, name):
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    config = dataclasses.replace(
        TRAINERS[name].config, vocab_size=Checkpoint(checkpoint).config.vocab_size
    )
    expected, tensors = model(name, vocab_size=config.vocab_size)
    path, own = write(tmp_path / "theirs", name, tensors), tmp_path / "own"
    own.mkdir()
    save_file(expected, own / "model.safetensors")
    (own / "config.json").write_text(json.dumps(config_json(config, FORMATS["griffin"], "float32")))
    for tokenizer in checkpoint.glob("*token*"):
        for folder in (tmp_path / "theirs", own):
            shutil.copy(tokenizer, folder)
    known = {"names": name, "accept_differences": True, **TRAINERS[name].given}
    pairs = ("The unary minus", " operator yields"), ("def f(x):", " return x")
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    answers = []
    for arguments in ({"pretrained": path, **known}, {"pretrained": own}):
        arguments |= {"framework": "torch", "device": "cpu"}
        text = ",".join(f"{key}={value}" for key, value in arguments.items())
        answers.append(get_model("griffin").create_from_arg_string(text).loglikelihood(asked))
    assert answers[0] == answers[1] and all(math.isfinite(score) for score, _ in answers[0])


def test_inspect_says_whose_it_is_and_what_it_computes_otherwise(tmp_path):
    for name in TRAINERS:
        path = write(tmp_path / name, name, model(name)[1])
        (path if path.is_dir() else path.parent).joinpath("config.json").unlink(missing_ok=True)
        shown = CliRunner().invoke(app, ["inspect", str(path)])
        title, differs = read_names(name).title, read_names(name).differs
        assert shown.exit_code == 1
        assert f"this looks like {title}: give --names {name} (names={name})" in shown.output
        command = ["inspect", str(path), "--names", name]
        for field, value in TRAINERS[name].given.items():
            command += [f"--{field.replace('_', '-')}", str(value)]
        shown = CliRunner().invoke(app, command)
        assert shown.exit_code == bool(differs), shown.output
        assert all(difference in shown.output for difference in differs)
        if differs:
            with pytest.raises(CheckpointError, match="--accept-differences"):
                Checkpoint(path, overrides(name, accept_differences=False))
            accepted = CliRunner().invoke(app, [*command, "--accept-differences"])
            assert accepted.exit_code == 0 and "differs: " in accepted.output


def test_what_is_no_parameter_is_checked(tmp_path):
    scale, table = "backbone.1.time.alpha_log_scale", "transformer.vocab_embedding.weight"
    for name, tensor, change, message in (
        ("hippogriff", scale, lambda x: x * 1.001, "expected 2.07944 everywhere"),
        ("trtllm", table, lambda x: x * np.float32(1.001), "model.embed_tokens.weight once more"),
        ("hawk-pytorch", "layers.0.recc.norm.weight", lambda _: np.ones(12, "f4"), "1 unexpected"),
    ):  # earlier releases of hawk-pytorch had a norm after the recurrence
        tensors = model(name)[1]
        tensors[tensor] = change(tensors.get(tensor))
        path = write(tmp_path / name, name, tensors)
        with pytest.raises(CheckpointError) as caught:
            Checkpoint(path, overrides(name))
        assert repr(tensor) in str(caught.value) and message in str(caught.value), name


def test_another_architecture_is_refused_by_name(tmp_path):
    tensors = {
        "tok_embeddings.weight": np.ones((11, 8), np.float32),
        "layers.0.rlgru_block.rglru.a": np.ones(8, np.float32),
        "layers.0.rlgru_norm.weight": np.ones(8, np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert shown.exit_code == 1 and "this looks like Meta lingua's Hawk" in shown.output


def test_a_table_like_one_that_ships_with_other_fields(tmp_path):
    path = tmp_path / "heads.toml"
    path.write_text('like = "hippogriff"\n[config]\nnum_kv_heads = 2\nrope_fraction = 0.5\n')
    names, shipped = read_names(path), read_names("hippogriff")
    assert names.config == {**shipped.config, "num_kv_heads": 2, "rope_fraction": 0.5}
    assert (names.rows, names.checks, names.path) == (shipped.rows, shipped.checks, path)
    path.write_text('like = "hippo"\ntitle = "x"\n[config]\nheads = 2\n')
    with pytest.raises(ArgumentError) as refused:
        read_names(path)
    for part in ("no field 'heads'", "like is 'hippo', expected one of", "title stands beside"):
        assert part in str(refused.value)
