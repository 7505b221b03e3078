"""What cannot be used is refused with one sentence that says what to do."""

import json
import logging
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

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


def refusal(folder, error=CheckpointError, **arguments) -> str:
    messages = set()
    for framework in ("torch", "jax"):
        with pytest.raises(error) as caught:
            GriffinLM(**({"pretrained": str(folder), "framework": framework} | arguments))
        assert isinstance(caught.value, ValueError)
        messages.add(str(caught.value))
    (message,) = messages  # both frameworks say the same
    assert "\n" not in message
    return message


def test_missing_folder(tmp_path):
    message = refusal(tmp_path / "nowhere")
    assert "nowhere" in message


def test_no_config(copy):
    (copy / "config.json").unlink()
    assert "config.json" in refusal(copy)


def test_unknown_model_type(copy):
    edit_config(copy, model_type="llama")
    message = refusal(copy)
    assert "llama" in message and "recurrent_gemma" in message


def test_missing_extra_and_misshaped_tensors_are_all_listed(copy):
    def edit(weights):
        del weights["model.layers.0.mlp_block.up_proj.bias"]
        weights["model.layers.0.mlp_block.upproj.bias"] = torch.zeros(3)
        weights["model.final_norm.weight"] = torch.zeros(5)

    edit_weights(copy, edit)
    message = refusal(copy)
    for part in ("mlp_block.up_proj.bias", "mlp_block.upproj.bias", "final_norm.weight", "5"):
        assert part in message


def test_truncated_file(copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "model.safetensors" in refusal(copy)


def test_index_names_a_missing_shard(checkpoint, transformers_model, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "sharded")
    (folder / "model.safetensors").unlink()
    transformers_model.save_pretrained(folder, max_shard_size="1MB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refusal(folder)


def test_vocabulary_smaller_than_the_tokenizer(copy):
    edit_config(copy, vocab_size=1000)

    def cut(weights):
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:1000]

    edit_weights(copy, cut)
    message = refusal(copy)
    assert "1000" in message and "1023" in message


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_nan_is_warned_with_the_name_of_the_tensor(copy, framework, caplog):
    def spoil(weights):
        weights["model.layers.1.temporal_block.linear_x.weight"][3, 5] = torch.nan
        weights["model.layers.2.temporal_block.v_proj.weight"][0] = torch.inf

    edit_weights(copy, spoil)
    with caplog.at_level(logging.WARNING, "griffin_eval"):
        load_runner(copy, framework=framework)
    assert (
        "model.layers.1.temporal_block.linear_x.weight: 1 of 16384 weights are NaN" in caplog.text
    )
    assert "model.layers.2.temporal_block.v_proj.weight: 128 of 4096 weights" in caplog.text


def test_whole_weights_are_not_warned_of(checkpoint, caplog):
    with caplog.at_level(logging.WARNING, "griffin_eval"):
        load_runner(checkpoint, framework="torch")
    assert not caplog.records


def test_a_model_leaves_the_process_as_it_is(checkpoint):
    logger = logging.getLogger("griffin_eval")
    before = sys.excepthook, logger.handlers[:], logger.propagate, logger.level
    GriffinLM(pretrained=str(checkpoint), framework="torch")
    assert before == (sys.excepthook, logger.handlers, logger.propagate, logger.level)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
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
    ],
)
def test_arguments(checkpoint, arguments, parts):
    with pytest.raises(BadInput) as caught:
        GriffinLM(**{"pretrained": str(checkpoint), "framework": "torch"} | arguments)
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_hf_has_and_is_not_asked_for_is_accepted(checkpoint):
    arguments = {"parallelize": False, "trust_remote_code": False, "peft": None}
    lm = GriffinLM(pretrained=str(checkpoint), framework="torch", **arguments)
    assert lm.runner.framework == "torch"
    assert set(arguments).isdisjoint(lm.get_model_info())


@pytest.mark.parametrize("framework", ["torch", "jax", None])
def test_missing_framework_is_named_with_its_pip_command(checkpoint, framework, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'griffin-eval\[(torch|jax)\]'"):
        load_runner(checkpoint, framework=framework)
