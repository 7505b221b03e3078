"""Weights as other tools save them: under prefixes, or with one of two tied names."""

import dataclasses
import json
import logging
import re

import pytest
import torch
from parity import weights
from peers import recurrent_gemma
from safetensors.numpy import save_file
from slow import slow
from tiny_checkpoints import CONFIG, tensors_of

from griffin_eval import convert
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.configs.huggingface import to_huggingface
from griffin_eval.converters.export import put_nested
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.naming.tables import CANONICAL, CANONICAL_PATHS
from griffin_eval.converters.overrides import Overrides
from griffin_eval.errors import CheckpointError

WEIGHTS = weights(CONFIG)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GIVEN = Overrides(
    visible_keys=CONFIG.visible_keys,
    embedding_scale=CONFIG.embedding_scale,
    logits_soft_cap=CONFIG.logits_soft_cap,
)
TABLES = {
    "deepmind": FORMATS["deepmind-torch"].table,
    "canonical": CANONICAL,
    "flax": FORMATS["deepmind-flax"].table,
    "paths": CANONICAL_PATHS,
}


def tensors(naming):
    return tensors_of(TABLES[naming], CONFIG)


def state(naming, prefix=""):
    return {prefix + name: torch.from_numpy(array) for name, array in tensors(naming).items()}


def check(path, expected=WEIGHTS, **more):
    """Open the checkpoint, assert that it holds the weights bit for bit, and return it."""
    opened = Checkpoint(path, dataclasses.replace(GIVEN, **more))
    assert opened.dtypes.keys() == expected.keys()
    for name, value in expected.items():
        assert opened.numpy(name).tobytes() == value.tobytes(), name
        assert b"".join(p.tobytes() for p in opened.pieces(name)) == value.tobytes()
        assert opened.torch(name).numpy().tobytes() == value.tobytes()
    return opened


def refusal(path, *fragments):
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(path, GIVEN)
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message, message
    assert "\n" not in message


def save(tmp_path, content):
    torch.save(content, tmp_path / "saved.pt")
    return tmp_path / "saved.pt"


OPTIMIZER = {"state": {0: {"exp_avg": torch.ones(5)}}, "param_groups": [{"lr": 1e-3}]}


@pytest.mark.parametrize("naming", ["deepmind", "canonical"])
@pytest.mark.parametrize(
    "prefix",
    [
        *("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."),
        *("model.", "net.model.", "_fsdp_wrapped_module."),
    ],
)
def test_a_prefix_of_every_name(tmp_path, caplog, naming, prefix):
    caplog.set_level(logging.INFO)
    opened = check(save(tmp_path, state(naming, prefix)))
    said = [r.getMessage() for r in caplog.records if "names read without" in r.getMessage()]
    assert len(said) == bool(prefix)
    assert ("names read without" in opened.inspection.layout) == bool(prefix)
    convert(opened, tmp_path / "out", to="griffin")
    check(tmp_path / "out")


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_checkpoint_wrapped_module"])
@pytest.mark.parametrize("naming", ["deepmind", "canonical"])
def test_wrapped_layers(tmp_path, naming, wrapper):
    """torch.compile of each layer changes the names of that layer's parameters only."""
    wrapped = {
        re.sub(r"((?:blocks|layers)\.\d+)\.", rf"\1.{wrapper}.", name): tensor
        for name, tensor in state(naming).items()
    }
    assert any(wrapper in name for name in wrapped)
    check(save(tmp_path, wrapped))


@pytest.mark.parametrize("naming", ["deepmind", "canonical"])
@pytest.mark.parametrize("key", ["model", "module", "net", "state_dict", "model_state_dict"])
def test_a_trainers_dict(tmp_path, naming, key):
    content = {key: state(naming, "module."), "optimizer": OPTIMIZER, "epoch": 3}
    opened = check(save(tmp_path, content | {"rng_state": torch.ones(8, dtype=torch.uint8)}))
    assert any(name.startswith("optimizer") for name in opened.inspection.left_out)


def test_state_of_a_training_beside_the_parameters(tmp_path):
    check(save(tmp_path, state("deepmind") | {"optimizer": OPTIMIZER}))
    bare = {n.removeprefix("model."): tensor for n, tensor in state("canonical").items()}
    check(save(tmp_path, {"model": bare, "optimizer": OPTIMIZER, "lr_scheduler": {"last": 1}}))


def test_what_is_in_doubt_is_refused_with_the_way_out(tmp_path):
    content = {"model": state("deepmind"), "ema": state("deepmind")}
    path = save(tmp_path, content)
    refusal(path, "parameters of several models", "item=ema or item=model")
    check(path, item="ema")
    path = save(tmp_path, {"model": state("canonical"), "probe": torch.ones(2, 2)})
    refusal(path, "the prefix 'model.', beside other tensors (probe): choose item=model (--item")
    check(path, item="model")
    path = save(tmp_path, {"a": {"b": state("deepmind")}, "probe": torch.ones(2, 2)})
    refusal(path, "beside other tensors (probe): save the state dict of the model alone")


def tree(naming, prefix=""):
    nested = {}
    for name, array in tensors(naming).items():
        put_nested(nested, prefix + name, array)
    return nested


@pytest.mark.parametrize("naming", ["flax", "paths"])
@pytest.mark.parametrize("keys", ["model", slow("net"), "params/model"])
def test_a_tree_below_a_key_in_orbax(tmp_path, naming, keys):
    import orbax.checkpoint as ocp

    content = {"optimizer": {"mu": tree(naming)}, "step": 1, **tree(naming, f"{keys}/")}
    ocp.PyTreeCheckpointer().save(tmp_path / "saved", content)
    check(tmp_path / "saved")


def test_a_tree_of_two_models_in_orbax(tmp_path):
    import orbax.checkpoint as ocp

    content = {"model": tree("flax"), "teacher": tree("flax"), "step": 1}
    ocp.PyTreeCheckpointer().save(tmp_path / "saved", content)
    refusal(tmp_path / "saved", "several models", "item=model or item=teacher (--item, item=)")
    check(tmp_path / "saved", item="teacher")


def folder(tmp_path, arrays, file="model.safetensors", **config):
    path = tmp_path / "folder"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(to_huggingface(CONFIG) | config))
    if file.endswith(".safetensors"):
        save_file(arrays, path / file)
    else:
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path / file)
    return path


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kept", [HEAD, EMBEDDING, "both"])
def test_either_of_two_tied_names(tmp_path, prefix, file, kept):
    """Libraries that save shared memory once keep the first of its names."""
    arrays = tensors("canonical") | {HEAD: WEIGHTS[EMBEDDING].copy()}
    for name in {HEAD, EMBEDDING} - {kept, *({HEAD, EMBEDDING} if kept == "both" else ())}:
        del arrays[name]
    path = folder(tmp_path, {prefix + name: array for name, array in arrays.items()}, file)
    opened = check(path)
    assert opened.config == CONFIG
    assert ("to which it is tied" in opened.inspection.layout) == (kept == HEAD)


def test_one_of_two_matrices_that_are_not_tied_is_missing(tmp_path):
    arrays = tensors("canonical") | {HEAD: WEIGHTS[EMBEDDING].copy()}
    del arrays[EMBEDDING]
    path = folder(tmp_path, arrays, tie_word_embeddings=False)
    refusal(path, f"1 missing ({EMBEDDING!r})")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_model_without_its_output_layer(tmp_path, file, prefix):
    arrays = {prefix + n.removeprefix("model."): a for n, a in tensors("canonical").items()}
    opened = check(folder(tmp_path, arrays, file))
    assert opened.config.tie_embeddings


def test_a_model_without_its_output_layer_is_refused_if_it_is_not_tied(tmp_path):
    arrays = {n.removeprefix("model."): a for n, a in tensors("canonical").items()}
    path = folder(tmp_path, arrays, tie_word_embeddings=False)
    refusal(path, "names lack the prefix 'model.'", "RecurrentGemmaForCausalLM")


@pytest.mark.slow
def test_what_transformers_saves(tmp_path):
    """transformers saves a model whole, without its output layer, and compiled."""
    whole = folder(tmp_path, tensors("canonical"))
    model = recurrent_gemma().from_pretrained(whole, dtype=torch.float32)
    for name, saved in (("state", model), ("part", model.model)):
        check(save(tmp_path, saved.state_dict()))
        saved.save_pretrained(tmp_path / name)
        check(tmp_path / name)
    compiled = torch.compile(model)
    check(save(tmp_path, compiled.state_dict()))


def test_a_trainers_checkpoint_with_weights_of_torch_save(tmp_path):
    trained = folder(tmp_path, tensors("canonical"), "pytorch_model.bin")
    names = ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth")
    for name in (*names, "training_args.bin"):
        torch.save({"a": torch.ones(2)}, trained / name)
    assert check(trained).format.name == "hf-torch"


def test_the_average_of_a_training(tmp_path):
    """torch.optim.swa_utils.AveragedModel counts its updates beside the parameters."""
    state = {name: torch.from_numpy(array) for name, array in tensors("canonical").items()}
    average = {f"module.{name}": array for name, array in state.items()}
    average |= {"n_averaged": torch.tensor(3)}
    check(save(tmp_path, average))
    check(save(tmp_path, {"model": state, "ema": average}), item="ema")


@pytest.mark.parametrize("beside", ["ema.pt", "ema.pth", "ema.safetensors", "optim.pt"])
def test_the_file_that_transformers_reads_is_read(tmp_path, beside):
    path = folder(tmp_path, tensors("canonical"), "pytorch_model.bin")
    other = {name: array + 1 for name, array in tensors("canonical").items()}
    if beside.endswith(".safetensors"):
        save_file(other, path / beside)
    else:
        torch.save({name: torch.from_numpy(array) for name, array in other.items()}, path / beside)
    check(path)
    (path / "pytorch_model.bin").rename(path / "weights.pt")
    if not beside.endswith(".safetensors"):
        refusal(path, "expected one .pt file, found", "give the path of the one that is meant")
        check(path / "weights.pt")
        (path / "weights.pt").rename(path / "pytorch_model.fp32.bin")
        check(path / "pytorch_model.fp32.bin")


def test_shards_of_torch_save_name_the_way_out(tmp_path):
    path = folder(tmp_path, tensors("canonical"), "pytorch_model-00001-of-00002.bin")
    torch.save({}, path / "pytorch_model-00002-of-00002.bin")
    refusal(path, "in several files are not read", "save_pretrained it, which writes safetensors")


def test_a_checkpoint_of_torch_distributed_names_the_way_out(tmp_path):
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    (tmp_path / ".metadata").write_bytes(b"")
    refusal(tmp_path, "torch.distributed.checkpoint", "dcp_to_torch")


def test_a_table_of_names_sees_the_names_of_the_file(tmp_path):
    rows = [f"foreign = 'module.{n}'\ncanonical = {n!r}\n" for n in WEIGHTS]
    (tmp_path / "names.toml").write_text("".join(f"[[tensor]]\n{row}" for row in rows))
    path = save(tmp_path, state("canonical", "module."))
    check(path, names=tmp_path / "names.toml")
