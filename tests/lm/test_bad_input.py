"""What cannot be used is refused with one sentence that says what to do."""

import json
import logging
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import griffin_eval
from griffin_eval.errors import BadInput, CheckpointError, MissingExtraError
from griffin_eval.lm.model import GriffinLM
from griffin_eval.runners.load import load_runner


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "copy")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, edit):
    path = folder / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file({name: w.contiguous() for name, w in weights.items()}, path)


def lose_a_shard(folder):
    whole = folder.rename(folder.with_name("whole"))
    griffin_eval.convert(whole, folder, to="hf", max_shard_size="1MB")
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def spoil_names(weights):
    del weights["model.layers.0.mlp_block.up_proj.bias"]
    weights["model.layers.0.mlp_block.upproj.bias"] = torch.zeros(3)
    weights["model.final_norm.weight"] = torch.zeros(5)


def shorten(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_the_vocabulary(folder):
    name = "model.embed_tokens.weight"
    edit_config(folder, vocab_size=1000)
    edit_weights(folder, lambda weights: weights.update({name: weights[name][:1000]}))


def test_damaged_folders(checkpoint, tmp_path):
    bad_names = ["mlp_block.up_proj.bias", "mlp_block.upproj.bias", "final_norm.weight", "5"]
    for number, (damage, parts) in enumerate(
        (
            (shutil.rmtree, ["no such folder"]),
            (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
            (lambda f: edit_config(f, model_type="llama"), ["llama", "recurrent_gemma"]),
            (lambda folder: edit_weights(folder, spoil_names), bad_names),
            (shorten, ["model.safetensors"]),
            (lose_a_shard, ["model-00002-of"]),
            (cut_the_vocabulary, ["1000", "1023"]),
        )
    ):
        folder = shutil.copytree(checkpoint, tmp_path / str(number))
        damage(folder)
        with pytest.raises(CheckpointError) as caught:
            GriffinLM(pretrained=str(folder), framework="torch")
        assert isinstance(caught.value, ValueError)
        message = str(caught.value)
        assert "\n" not in message and not [part for part in parts if part not in message]


def test_nan_is_warned_with_the_name_of_the_tensor(checkpoint, tmp_path, caplog):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")

    def spoil(weights):
        weights["model.layers.1.temporal_block.linear_x.weight"][3, 5] = torch.nan
        weights["model.layers.2.temporal_block.v_proj.weight"][0] = torch.inf

    edit_weights(copy, spoil)
    with caplog.at_level(logging.WARNING, "griffin_eval"):
        load_runner(checkpoint, framework="torch")
        assert not caplog.records
        load_runner(copy, framework="torch")
    assert (
        "model.layers.1.temporal_block.linear_x.weight: 1 of 16384 weights are NaN" in caplog.text
    )
    assert "model.layers.2.temporal_block.v_proj.weight: 128 of 4096 weights" in caplog.text


def test_a_model_leaves_the_process_as_it_is(checkpoint):
    logger = logging.getLogger("griffin_eval")
    before = sys.excepthook, logger.handlers[:], logger.propagate, logger.level
    GriffinLM(pretrained=str(checkpoint), framework="torch")
    assert before == (sys.excepthook, logger.handlers, logger.propagate, logger.level)


ARGUMENTS = [
    ({"batch_size": "many"}, ["batch_size", "many", "auto"]),
    ({"batch_size": 0}, ["batch_size"]),
    ({"max_length": -1}, ["max_length", "-1"]),
    ({"max_length": 1.5}, ["max_length", "1.5"]),
    ({"max_length": True}, ["max_length", "True"]),
    ({"max_batch_size": float("inf")}, ["max_batch_size", "inf"]),
    ({"batch_size": "autox"}, ["batch_size", "autox"]),
    ({"prefix_token_id": "abc"}, ["prefix_token_id", "abc"]),
    ({"prefix_token_id": 1.5}, ["prefix_token_id", "1.5"]),
    ({"add_bos_token": "no"}, ["add_bos_token", "True or False", "no"]),
    ({"embedding_scale": "no"}, ["embedding_scale", "True or False", "no"]),
    ({"logits_soft_cap": True}, ["logits_soft_cap", "True"]),
    ({"dtype": 32}, ["dtype", "32", "float32"]),
    ({"device": "cuda:7"}, ["no device cuda:7"]),
    ({"softmax_dtype": "f32"}, ["softmax_dtype", "f32"]),
    ({"prefix_token_id": 5000}, ["5000", "1024"]),
    ({"window": 0}, ["visible_keys"]),
    (
        {"window": 16, "visible_keys": 32},
        ["visible_keys=32", "window=16", "give visible_keys alone"],
    ),
    ({"visible_key": 16}, ["did you mean 'visible_keys'"]),
    ({"pretrained": ""}, ["pretrained= is missing"]),
    ({"pretrained": "", "path": "x"}, ["it is called pretrained"]),
    ({"parallelize": True}, ["parallelize", "tensor_parallel_size="]),
    ({"peft": "adapter"}, ["no such folder: 'adapter'", "peft"]),
    ({"delta": "adapter"}, ["delta", "merge"]),
    ({"backend": "causal"}, ["backend", "framework="]),
    ({"max_lenght": 5}, ["max_lenght", "did you mean 'max_length'"]),
    ({"delta": "a", "dtpe": "x"}, ["delta", "did you mean 'dtype'"]),
    ({"revision": "main"}, ["revision"]),
    ({"subfolder": "nowhere"}, ["nowhere"]),
    ({"tokenizer": "/nowhere"}, ["/nowhere"]),
]


def test_arguments(checkpoint):
    for arguments, parts in ARGUMENTS:
        with pytest.raises(BadInput) as caught:
            GriffinLM(**{"pretrained": str(checkpoint), "framework": "torch"} | arguments)
        message = str(caught.value)
        assert "\n" not in message
        assert not [part for part in parts if part not in message], message


def test_what_hf_has_and_is_not_asked_for_is_accepted(checkpoint):
    arguments = {"parallelize": False, "trust_remote_code": False, "peft": None}
    lm = GriffinLM(pretrained=str(checkpoint), framework="torch", **arguments)
    assert lm.runner.framework == "torch"
    assert set(arguments).isdisjoint(lm.get_model_info())


def test_missing_framework_is_named_with_its_pip_command(checkpoint, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for framework in ("torch", "jax", None):
        with pytest.raises(MissingExtraError, match=r"pip install 'griffin-eval\[(torch|jax)\]'"):
            load_runner(checkpoint, framework=framework)


@pytest.mark.slow
def test_what_lm_eval_refuses_is_one_sentence(checkpoint):
    arguments = ["--model", "griffin", "--model_args", f"pretrained={checkpoint}"]
    command = [sys.executable, "-m", "griffin_eval", "run", *arguments, "--tasks", "no_such_task"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.endswith("griffin-eval: Tasks not found: no_such_task\n")
