"""Adapters merged while reading, compared with peft's unmerged and (if correct) merged models."""

import dataclasses
import hashlib
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from adapters import LINEAR, load_adapted, load_base, logits, peft, write_adapter, write_base
from parity import BASE, relative_error, tokens
from safetensors.torch import load_file, save_file
from slow import fast
from typer.testing import CliRunner

from griffin_eval import convert, verify
from griffin_eval.cli.main import app
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.output.manifest import MANIFEST_FILE
from griffin_eval.converters.overrides import Overrides
from griffin_eval.converters.plan import make_plan
from griffin_eval.errors import CheckpointError
from griffin_eval.states.weights_hash import weights_sha256

IDS = tokens(BASE, 2, 2 * BASE.visible_keys + 3)
GATES = ["rg_lru.input_gate_weight", "rg_lru.recurrent_gate_weight"]
# Arguments of peft's LoraConfig by kind. Adapters of the embedding or the output head untie the
# two, except with trained tokens and `ensure_weight_tying`.
KINDS = {
    "lora": {"target_modules": LINEAR},
    "dora": {"target_modules": LINEAR, "use_dora": True},
    "rslora": {"target_modules": LINEAR, "use_rslora": True},
    "bias of B": {"target_modules": ["linear_x", "o_proj"], "lora_bias": True},
    "patterns": {
        "target_modules": LINEAR,
        "rank_pattern": {"q_proj": 5, r"layers\.[01]\..*linear_[xy]": 2},
        "alpha_pattern": {"^model.layers.2.mlp_block.up_proj": 11, "down_proj": 0.5},
    },
    "biases of targets": {"target_modules": ["linear_x", "q_proj", "o_proj"], "bias": "lora_only"},
    "all biases": {"target_modules": ["linear_x"], "bias": "all"},
    "gates": {"target_modules": ["linear_x"], "target_parameters": GATES},
    "taps": {"target_modules": ["q_proj"], "target_parameters": ["conv_1d.weight"]},
    "modules": {"target_modules": ["linear_x"], "modules_to_save": ["final_norm", "rg_lru"]},
    "regular expression": {"target_modules": r".*layers\.[02]\..*(q_proj|linear_y)"},
    "first layer": {"target_modules": ["up_proj"], "layers_to_transform": 0},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 60, 7]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head"]},
    "embedding and head, tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved both": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "saved blocks, targeted": {
        "target_modules": ["q_proj", "up_proj"],
        "modules_to_save": ["mlp_block"],
    },
    "saved both, tied": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
}
KINDS["mica"] = {"target_modules": LINEAR, "init_lora_weights": "mica"}
UNTYING = {"embedding", "head", "embedding and head", "saved head", "saved both"}
# Kinds that peft itself merges correctly.
MERGED_BY_PEFT = ["lora", "dora", "rslora", "bias of B", "patterns", "gates", "taps"]
MERGED_BY_PEFT += ["biases of targets", "all biases", "modules", "regular expression"]
MERGED_BY_PEFT += ["first layer"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_base(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    """Return a function that writes an adapter of a kind once and returns its folder."""
    root = tmp_path_factory.mktemp("adapters")

    def get(kind, seed=0):
        folder = root / f"{kind}-{seed}"
        if not folder.exists():
            write_adapter(folder, base, seed, **KINDS[kind])
        return folder

    return get


def open_with(base, *adapters):
    """Open the base with adapters: folders, or pairs of a folder and a weight."""
    pairs = (a if isinstance(a, tuple) else (a, 1.0) for a in adapters)
    return Checkpoint(base, Overrides(adapters=tuple(pairs)))


def torch_logits(checkpoint, ids=IDS):
    from griffin_eval.model_torch.loading import load

    model = load(checkpoint)
    state = model.init_state(len(ids))
    lengths = torch.full((len(ids),), ids.shape[1])
    with torch.no_grad():
        hidden, _ = model.step(torch.from_numpy(ids), lengths, state)
        return model.logits(hidden).numpy()


FAST = ["lora", "gates", "tokens", "embedding and head", "mica"]


@pytest.mark.parametrize("kind", fast(FAST, KINDS))
def test_logits_are_those_of_the_unmerged_adapter(base, adapters, kind):
    checkpoint = open_with(base, adapters(kind))
    expected = logits(load_adapted(base, adapters(kind)), IDS)
    assert relative_error(torch_logits(checkpoint), expected) < 5e-5
    assert relative_error(torch_logits(Checkpoint(base)), expected) > 1e-2
    assert checkpoint.config.tie_embeddings == (kind not in UNTYING)


def merged_state(base, adapter, dtype="auto"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_adapted(base, adapter, dtype).merge_and_unload()
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("kind", fast(["dora", "patterns"], MERGED_BY_PEFT))
def test_weights_are_those_that_peft_merges(base, adapters, kind):
    checkpoint, expected = open_with(base, adapters(kind)), merged_state(base, adapters(kind))
    assert checkpoint.dtypes.keys() == expected.keys()
    for name, value in expected.items():
        assert relative_error(checkpoint.numpy(name), value.numpy()) < 1e-6, name


@pytest.mark.parametrize(
    "kind", fast(["dora"], ["lora", "dora", "patterns"])
)  # peft rounds gates twice
def test_16_bits_are_rounded_as_peft_rounds_them(base, adapters, kind, tmp_path):
    write_base(tmp_path / "base", dtype=torch.bfloat16)
    checkpoint = open_with(tmp_path / "base", adapters(kind))
    expected = merged_state(tmp_path / "base", adapters(kind))
    differing = total = 0
    for name, value in expected.items():
        found = checkpoint.torch(name)
        assert found.dtype == torch.bfloat16
        differing += int((found != value).sum())
        total += value.numel()
    assert differing <= 1 + total // 100_000


def test_several_are_added_up_as_peft_concatenates_them(base, adapters):
    kinds, factors = ("lora", "patterns"), (0.7, -0.3)
    folders = [adapters(kind, seed) for seed, kind in enumerate(kinds)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(load_base(base), folders[0], adapter_name="0")
        model.load_adapter(folders[1], adapter_name="1")
        model.add_weighted_adapter(["0", "1"], list(factors), "sum", combination_type="cat")
        model.set_adapter("sum")
    checkpoint = open_with(base, *zip(folders, factors, strict=True))
    assert relative_error(torch_logits(checkpoint), logits(model.eval(), IDS)) < 5e-5
    model = model.merge_and_unload()
    for name, value in model.named_parameters():
        assert relative_error(checkpoint.numpy(name), value.detach().numpy()) < 1e-6, name


def test_no_bit_depends_on_how_much_is_read_at_once(base, adapters):
    for kind in ("lora", "gates", "saved both", "tokens"):
        checkpoint = open_with(base, adapters(kind))
        for name in checkpoint.dtypes:
            whole = checkpoint.numpy(name)
            for nbytes in (1, 1000, 10_000):
                pieces = [np.array(piece) for piece in checkpoint.pieces(name, nbytes)]
                assert np.array_equal(np.concatenate(pieces), whole), (kind, name)


@pytest.mark.parametrize("target", fast(["griffin-orbax", "deepmind-flax"], FORMATS))
def test_every_format_can_be_base_and_output(base, adapters, target, tmp_path):
    convert(base, tmp_path / "base", to=target)
    adapted = open_with(base, adapters("lora"))
    again = open_with(tmp_path / "base", adapters("lora"))
    assert verify(again, adapted).same
    plan = make_plan(again, FORMATS[target])
    convert_checkpoint(plan, tmp_path / "out")
    assert verify(tmp_path / "out", adapted).same
    manifest = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    (record,) = manifest["adapters"]
    assert record == {"path": str(adapters("lora")), "weight": 1.0, "sha256": record["sha256"]}
    assert len(record["sha256"]) == 64
    assert manifest["source"]["checked"] == f"{len(again.dtypes)} parameters"


@pytest.mark.parametrize("kind", fast(["saved head"], sorted(UNTYING)))
def test_an_untied_head_is_written_where_it_can_be(base, adapters, kind, tmp_path):
    adapted = open_with(base, adapters(kind))
    for target in ("hf", "griffin", "griffin-orbax"):
        convert(adapted, tmp_path / target, to=target)
        assert verify(tmp_path / target, adapted).same
    expected = logits(load_adapted(base, adapters(kind)), IDS)
    assert relative_error(logits(load_base(tmp_path / "hf"), IDS), expected) < 5e-5
    with pytest.raises(CheckpointError, match="tie_embeddings=False: its output head is the emb"):
        make_plan(adapted, FORMATS["deepmind-flax"])


def test_an_untied_head_needs_no_place_in_the_manifest_of_its_base(base, adapters, tmp_path):
    convert(base, tmp_path / "base", to="griffin")
    adapted = open_with(tmp_path / "base", adapters("saved head"))
    convert(adapted, tmp_path / "out", to="griffin")
    assert verify(tmp_path / "out", adapted).same
    assert weights_sha256(adapted)


def test_the_command(base, adapters, tmp_path):
    def run(*arguments):
        done = CliRunner().invoke(app, ["convert", *map(str, arguments), "--to", "griffin"])
        return done.exception or done.stdout

    one, other = adapters("lora"), adapters("lora", 1)
    said = run(base, tmp_path / "out", "--adapter", f"{one}=0.7", "--adapter", f"{other}=0.3")
    assert f"merged: {one}, times 0.7\nmerged: {other}, times 0.3" in said
    assert verify(tmp_path / "out", open_with(base, (one, 0.7), (other, 0.3))).same
    out = tmp_path / "other"
    assert "a weight such as" in str(run(base, out, "--adapter", f"{one}=half"))
    assert "a weight such as" in str(run(base, out, "--adapter", f"{one}=nan"))
    assert "no such folder: 'nowhere'" in str(run(base, out, "--adapter", "nowhere"))
    assert "holds no adapter of peft: adapter_config.json" in str(run(base, out, "--adapter", base))
    message = str(run(one, out))
    assert f"holds only an adapter: give the base that it was trained on, '{base}'" in message
    for kind in ("dora", "modules", "tokens", "all biases"):
        weighted, several = f"{adapters(kind)}=0.5", ("--adapter", adapters(kind))
        for arguments in (("--adapter", weighted), ("--adapter", one, *several)):
            assert "alone and without a weight" in str(run(base, out, *arguments)), kind
    assert not out.exists()


# Adapters that differ from what peft writes.


@pytest.fixture
def damaged(adapters, tmp_path):
    """Return a function that opens a changed copy of an adapter and returns the error message."""
    count = 0

    def make(base, kind="lora", tensors=None, **config):
        nonlocal count
        count += 1
        folder = shutil.copytree(adapters(kind), tmp_path / f"{count}")
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        if tensors is not None:
            path = folder / "adapter_model.safetensors"
            state = load_file(path)
            tensors(state)
            save_file(state, path)
        with pytest.raises(CheckpointError) as caught:
            open_with(base, folder)
        message = str(caught.value)
        assert str(folder) in message and "\n" not in message
        return message

    return make


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "ADALORA"}, "found 'ADALORA', which is not supported"),
        ({"peft_type": None}, "expected peft_type 'LORA'"),
        ({"r": 0}, "r is 0, expected a positive rank"),
        ({"r": 4}, "of another shape"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan, expected a finite number"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"rank_pattern": {"linear_x": -1}}, "rank_pattern['linear_x'] is -1"),
        ({"rank_pattern": {"(": 1}}, "which is no regular expression"),
        ({"rank_pattern": {"(?i)linear_x": 1}}, "which is no regular expression"),
        ({"rank_pattern": {"(a+)+": 1}}, "a regular expression with too many repetitions"),
        ({"alpha_pattern": {"linear_x": None}}, "alpha_pattern['linear_x'] is None"),
        ({"alpha_pattern": [1]}, "alpha_pattern is [1], expected an object"),
        ({"use_dora": True}, "lacks lora_magnitude_vector"),
        ({"use_dora": "yes"}, "use_dora is 'yes', expected true or false"),
        ({"lora_bias": True}, "lacks lora_B.bias"),
        ({"bias": "some"}, "bias is 'some', expected none, all or lora_only"),
        ({"init_lora_weights": "pissa_niter_4"}, "which changes the weights of the base"),
        ({"fan_in_fan_out": True}, "not supported: 'fan_in_fan_out' is True"),
        ({"use_qalora": True, "layer_replication": [[0, 1]]}, "'layer_replication' is [[0, 1]]"),
        ({"a field of later": {"x": 1}}, "'a field of later' is {'x': 1}"),
        ({"target_modules": [*LINEAR, "lm_head"]}, "nothing for 1 modules that target_modules"),
        ({"modules_to_save": ["final_norm"]}, "no model.final_norm.weight, though modules_to_s"),
        ({"trainable_token_indices": [3]}, "no token_adapter.trainable_tokens_delta of model.emb"),
        ({"trainable_token_indices": [-3]}, "expected lists of token ids"),
        ({"target_parameters": ["linear_x.bias"]}, "no part of a LoRA of this model"),
    ],
)
def test_configs_that_are_refused(base, damaged, config, said):
    assert said in damaged(base, **config)


X = "base_model.model.model.layers.0.temporal_block.linear_x."


def renamed(old, new):
    def change(state):
        state[new] = state.pop(old)

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop(X + "lora_A.weight"), "linear_x lacks lora_A.weight"),
        (lambda s: s.pop(X + "lora_B.weight"), "linear_x lacks lora_B.weight"),
        (lambda s: s.update({X + "lora_A.weight": torch.zeros(3, 31)}), "is (3, 31), expected (3"),
        (lambda s: s.update({X + "lora_A.weight": torch.zeros(96)}), "is (96,), expected (3, 32)"),
        (lambda s: s.update(x=torch.zeros(1)), "1 tensors that are no part of a LoRA"),
        (lambda s: s.update({X + "lora_C.weight": torch.zeros(1)}), "linear_x.lora_C.weight'"),
        (lambda s: s.update({X + "lora_magnitude_vector": torch.zeros(32)}), "no part of a LoRA"),
        (lambda s: s.update({X + "lora_A.weight": torch.zeros(3, 32).int()}), "is I32"),
        (renamed(X + "lora_A.weight", X + "base_layer.lora_A.weight"), "lacks lora_A.weight"),
        (renamed(X + "lora_A.weight", "../" + X + "lora_A.weight"), "'../base_model.model.model"),
        (
            lambda s: s.update({X.replace("linear_x", "conv_1d") + "lora_A.weight": torch.ones(1)}),
            "mixes channels, so that no weight can hold it",
        ),
    ],
)
def test_tensors_that_are_refused(base, damaged, change, said):
    assert said in damaged(base, tensors=change)


def test_values_that_are_refused(base, adapters, damaged, tmp_path):
    folder = shutil.copytree(adapters("lora"), tmp_path / "nan")
    # Clone, since some releases of safetensors map the file, which is overwritten below.
    state = {n: t.clone() for n, t in load_file(folder / "adapter_model.safetensors").items()}
    state[X + "lora_B.weight"][0, 0] = float("nan")
    save_file(state, folder / "adapter_model.safetensors")
    checkpoint = open_with(base, folder)
    with pytest.raises(CheckpointError, match="linear_x.lora_B.weight holds NaN or infinity"):
        checkpoint.numpy("model.layers.0.temporal_block.linear_x.weight")
    (folder / "adapter_model.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointError, match="adapter_model.safetensors: the header claims"):
        open_with(base, folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="adapter_model.bin: expected a zip archive"):
        open_with(base, folder)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match="adapter_model.safetensors missing$"):
        open_with(base, folder)
    write_base(tmp_path / "half", dtype=torch.float16)
    state[X + "lora_B.weight"][0] = 1e6
    save_file(state, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="linear_x.weight: the sum .* fit into float16"):
        open_with(tmp_path / "half", folder).numpy("model.layers.0.temporal_block.linear_x.weight")


def test_patterns_that_contradict_each_other_are_named(base, adapters, tmp_path, caplog):
    """peft sorts patterns when it saves, so the first match may differ from that in training."""
    inner = r"layers\.[01]\.mlp_block\.up_proj"
    alphas = {"up_proj": 11, inner: 2, r"layers\.2\.mlp_block\.up_proj": 11, "q_proj": 3}
    write_adapter(tmp_path / "ad", base, target_modules=["up_proj", "q_proj"], alpha_pattern=alphas)
    checkpoint = open_with(base, tmp_path / "ad")
    expected = logits(load_adapted(base, tmp_path / "ad"), IDS)
    assert relative_error(torch_logits(checkpoint), expected) < 5e-5
    (said,) = caplog.messages
    assert str(tmp_path / "ad" / "adapter_config.json") in said
    for layer in (0, 1):
        assert f"model.layers.{layer}.mlp_block.up_proj: {inner!r}, 'up_proj'" in said
    assert "layers.2" not in said and "q_proj" not in said
    caplog.clear()
    open_with(base, adapters("patterns"))
    assert not caplog.messages


def test_tokens_that_do_not_exist_are_refused(base, damaged):
    assert "different ids below 61" in damaged(base, "tokens", trainable_token_indices=[3, 61, 7])
    assert "different ids below 61" in damaged(base, "tokens", trainable_token_indices=[3, 3, 7])
    assert "of another shape" in damaged(base, "tokens", trainable_token_indices=[3, 4])


@pytest.mark.parametrize("kind", fast(["lora"], ["lora", "dora", "saved both"]))
def test_tensors_that_torch_saved(base, adapters, kind, tmp_path):
    """A .bin file (peft's safe_serialization=False) is read if there is no safetensors file."""
    folder = shutil.copytree(adapters(kind), tmp_path / "pickled")
    file = folder / "adapter_model.safetensors"
    torch.save(load_file(file), folder / "adapter_model.bin")
    file.unlink()
    one, other = open_with(base, adapters(kind)), open_with(base, folder)
    assert verify(one, other).same
    assert other.adapters[0].files == [folder / "adapter_config.json", folder / "adapter_model.bin"]
    expected = logits(load_adapted(base, folder), IDS)
    assert relative_error(torch_logits(other), expected) < 5e-5
    with pytest.raises(CheckpointError, match="holds only an adapter"):
        Checkpoint(folder)
    torch.save({"x": Path}, folder / "adapter_model.bin")  # a pickle of code
    with pytest.raises(CheckpointError, match="plain values may run code"):
        open_with(base, folder)


@pytest.mark.parametrize("stored", ["hub", "pickle"])
def test_damage_of_an_adapter_is_noticed(base, adapters, stored, tmp_path):
    folder = shutil.copytree(adapters("lora"), tmp_path / "snapshots" / "0123")
    file = folder / "adapter_model.safetensors"
    if stored == "hub":
        damaged = tmp_path / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        damaged.parent.mkdir()
        file.rename(damaged)
        file.symlink_to(Path("../../blobs") / damaged.name)
    else:
        damaged = folder / "adapter_model.bin"
        torch.save(load_file(file), damaged)
        file.unlink()
    weights_sha256(open_with(base, folder))
    values = load_file(adapters("lora") / "adapter_model.safetensors")[X + "lora_B.weight"]
    content = bytearray(damaged.read_bytes())
    content[content.index(values.numpy().tobytes())] ^= 1
    damaged.write_bytes(content)
    said = "and the hub says" if stored == "hub" else "lora_B.weight has the CRC-32"
    with pytest.raises(CheckpointError, match=said):
        weights_sha256(open_with(base, folder))
    plan = make_plan(open_with(base, folder), FORMATS["griffin"])
    with pytest.raises(CheckpointError, match=said):
        convert_checkpoint(plan, tmp_path / "out")
    weights_sha256(open_with(base, folder), check=False)


RESIZED = {kind: KINDS[kind] for kind in ("lora", "saved both", "embedding and head", "head")}
RESIZED["tokens"] = {"target_modules": ["q_proj"], "trainable_token_indices": [3, 57]}


@pytest.mark.parametrize("vocab", fast([64], [64, 59]))
@pytest.mark.parametrize("kind", fast(["lora", "saved both", "tokens"], RESIZED))
def test_an_adapter_of_a_resized_vocabulary(base, tmp_path, kind, vocab):
    """The adapter's matrices replace those of the base, as in a model that transformers resized."""
    folder = tmp_path / "adapter"
    write_adapter(folder, base, vocab=vocab, **RESIZED[kind])
    checkpoint = open_with(base, folder)
    assert checkpoint.config.vocab_size == vocab
    assert checkpoint.numpy("model.embed_tokens.weight").shape == (vocab, BASE.width)
    ids = IDS % vocab
    ids[0, :2] = vocab - 1, vocab - 2
    expected = logits(load_adapted(base, folder, vocab=vocab), ids)
    assert relative_error(torch_logits(checkpoint, ids), expected) < 5e-5
    convert(checkpoint, tmp_path / "out", to="griffin")
    assert verify(tmp_path / "out", checkpoint).same


def test_a_resized_vocabulary_of_an_untied_base(tmp_path):
    base, folder = tmp_path / "base", tmp_path / "adapter"
    write_base(base, dataclasses.replace(BASE, tie_embeddings=False))
    write_adapter(folder, base, vocab=64, target_modules=["q_proj"])
    checkpoint = open_with(base, folder)
    assert checkpoint.config.vocab_size == 64 and not checkpoint.config.tie_embeddings
    expected = logits(load_adapted(base, folder, vocab=64), IDS)
    assert relative_error(torch_logits(checkpoint), expected) < 5e-5
    path = folder / "adapter_model.safetensors"
    save_file({n: t.clone() for n, t in load_file(path).items() if "lm_head" not in n}, path)
    with pytest.raises(CheckpointError, match="save the adapter again with both matrices"):
        open_with(base, folder)


def test_rows_that_an_adapter_does_not_hold_are_said_to_be_missing(base, tmp_path):
    write_adapter(tmp_path / "a", base, vocab=64, target_modules=["lm_head"])
    path = tmp_path / "a" / "adapter_model.safetensors"
    save_file({n: t.clone() for n, t in load_file(path).items() if "lora_" in n}, path)
    with pytest.raises(CheckpointError, match=r"save_embedding_layers=True\)") as refused:
        open_with(base, tmp_path / "a")
    assert "do not belong together" not in str(refused.value)


def test_an_adapter_whose_first_rows_are_the_base_is_no_copy_of_it(base, adapters, tmp_path):
    folder = shutil.copytree(adapters("lora"), tmp_path / "a")
    path, name = folder / "adapter_model.safetensors", "model.embed_tokens.weight"
    rows = torch.from_numpy(Checkpoint(base).numpy(name).copy())
    new = torch.cat([rows, rows[:2]])
    state = {n: t.clone() for n, t in load_file(path).items()}
    save_file(state | {f"base_model.model.{name}": new}, path)
    assert np.array_equal(open_with(base, folder).numpy(name), new)


def test_copies_of_the_base(base, adapters, tmp_path):
    """Base matrices that peft saves in an adapter replace those of the base."""
    folder = shutil.copytree(adapters("embedding and head"), tmp_path / "changed")
    path = folder / "adapter_model.safetensors"
    state = load_file(path)
    copies = [name for name in state if name.endswith("base_layer.weight")]
    assert len(copies) == 2
    for name in copies:
        state[name] += 0.05
    save_file(state, path)
    expected = logits(load_adapted(base, folder), IDS)
    assert relative_error(torch_logits(open_with(base, folder)), expected) < 5e-5
    state[copies[0]] += 1
    save_file(state, path)
    with pytest.raises(CheckpointError, match="two copies of one matrix of its base"):
        open_with(base, folder)
