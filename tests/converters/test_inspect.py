"""`inspect`, which describes checkpoints and their faults, and the refusals of every format."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoints
from commands import griffin_eval
from safetensors.numpy import load_file, save_file
from slow import fast, slow
from tiny_checkpoints import write_tensors
from typer.testing import CliRunner

from griffin_eval import convert, verify
from griffin_eval.cli.main import app
from griffin_eval.config import GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.configs.own import config_json
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.naming.tables import bind
from griffin_eval.converters.output.manifest import MANIFEST_FILE
from griffin_eval.converters.overrides import Overrides
from griffin_eval.converters.plan import make_plan
from griffin_eval.converters.source.companions import tokenizer_folder
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.initializers import initial_value
from griffin_eval.layout import param_specs, parameter_count

CONFIG = GriffinConfig(
    vocab_size=11,
    width=8,
    mlp_width=12,
    num_heads=2,
    num_layers=5,
    lru_width=8,
    gate_blocks=2,
    visible_keys=5,
)
WEIGHTS = {spec.name: initial_value(spec, 0) for spec in param_specs(CONFIG).values()}
CONTAINERS = ["hf", "deepmind-flax", "deepmind-torch"]  # one format for each container
EMBEDDING = "model.embed_tokens.weight"


def tensors_of(name: str, arrays=WEIGHTS, config=CONFIG) -> dict[str, np.ndarray]:
    return tiny_checkpoints.tensors_of(FORMATS[name].table, config, arrays)


def write(folder: Path, name: str, tensors, config: GriffinConfig | None = CONFIG) -> Path:
    """Write a folder in a format, with a config unless that is None."""
    write_tensors(folder, FORMATS[name].container, tensors)
    if config is not None:
        raw = config_json(config, FORMATS[name], "float32")
        (folder / "config.json").write_text(json.dumps(raw))
    return folder


def inspect(*arguments):
    done = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return done.exit_code, done.output


def facts(*arguments):
    code, output = inspect(*arguments, "--json")
    return code, json.loads(output)


def broken(name: str) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Return tensors (one missing, one unexpected, one misshaped) and the expected messages."""
    tensors = tensors_of(name)
    gone, bent = (
        next(b for b in bind(FORMATS[name].table, CONFIG) if b.canonical[0].name.endswith(ending))
        for ending in (
            "layers.1.temporal_block.linear_x.weight",
            "layers.3.mlp_block.down_proj.bias",
        )
    )
    separator = "/" if FORMATS[name].container == "orbax" else "."
    tensors[gone.foreign + "s"] = tensors.pop(gone.foreign)
    tensors[f"zzz{separator}qqq"] = np.ones(1, np.float32)
    tensors[bent.foreign] = np.ones(9, np.float32)

    def both(binding) -> str:
        ours = binding.canonical[0].name
        return repr(binding.foreign) + f" ({ours})" * (ours != binding.foreign)

    return tensors, (
        f"1 missing ({both(gone)})",
        f"{gone.foreign + 's'!r}, nearest {both(gone)}",
        f"'zzz{separator}qqq'",
        f"{both(bent)} is (9,), expected (8,)",
    )


@pytest.mark.parametrize("name", fast(CONTAINERS, FORMATS))
def test_all_that_is_wrong_is_named_at_once_in_every_format(tmp_path, name):
    tensors, parts = broken(name)
    folder = write(tmp_path / "x", name, tensors)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    for part in parts:
        assert part in message, message
    code, found = facts(folder)
    assert code == 1 and found["problems"] == [message]
    assert found["format"] == name and found["config"]["width"] == 8
    assert {t["name"] for t in found["tensors"]} == tensors.keys()
    code, text = inspect(folder)
    assert code == 1 and f"problem: {message}" in text.splitlines()


@pytest.mark.parametrize("name", fast(["hf"], FORMATS))
def test_a_whole_checkpoint(tmp_path, name):
    folder = write(tmp_path / "x", name, tensors_of(name))
    (folder / "tokenizer.model").write_bytes(b"")
    code, found = facts(folder)
    assert code == 0 and found["problems"] == found["warnings"] == []
    assert found["format"] == name and found["tokenizer"] == ["tokenizer.model"]
    assert found["parameters"] == parameter_count(CONFIG) == sum(w.size for w in WEIGHTS.values())
    assert found["dtypes"] == {"float32": len(WEIGHTS)}
    assert GriffinConfig(**found["config"]) == CONFIG
    assert found["config_from"]["width"] == "config.json"
    held = [p for tensor in found["tensors"] for p in tensor["parameters"]]
    assert sorted(held) == sorted(WEIGHTS)
    code, text = inspect(folder)
    assert code == 0 and "width: 8 (config.json)" in text.splitlines()


def test_where_each_field_is_from(tmp_path):
    folder = write(tmp_path / "x", "hf", tensors_of("hf"))
    raw = json.loads((folder / "config.json").read_text())
    del raw["rms_norm_eps"], raw["rope_theta"], raw["rope_parameters"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps(raw))
    origins = facts(folder, "--visible-keys", 4)[1]["config_from"]
    assert origins.pop("visible_keys") == "given"
    missing = {"norm_eps", "rope_base", "embedding_scale"}
    assert {name for name, o in origins.items() if o == "transformers' default"} == missing
    assert {o for name, o in origins.items() if name not in missing} == {"config.json"}


def test_what_cannot_be_known_is_said_and_is_no_defect(tmp_path):
    folder = write(tmp_path / "x", "deepmind-flax", tensors_of("deepmind-flax"), None)
    code, found = facts(folder, "--logits-soft-cap", 30)
    assert code == 0 and found["problems"] == []
    (warning,) = found["warnings"]
    assert "do not say visible_keys, embedding_scale: give a preset" in warning
    assert found["config"]["visible_keys"] is None and found["config"]["embedding_scale"] is None
    origins = found["config_from"]
    assert (origins["visible_keys"], origins["logits_soft_cap"]) == (None, "given")
    assert (origins["width"], origins["norm_eps"]) == ("shapes", "default")
    assert "visible_keys: unknown" in inspect(folder)[1].splitlines()
    tensors, _ = broken("deepmind-flax")
    code, found = facts(write(tmp_path / "y", "deepmind-flax", tensors, None))
    assert code == 1 and "1 missing" in found["problems"][0] and found["warnings"]


def test_a_preset_beside_a_config_is_said_to_have_no_effect(tmp_path, caplog):
    folder = write(tmp_path / "x", "hf", tensors_of("hf"))
    opened = Checkpoint(folder, Overrides(preset="recurrentgemma-9b"))
    assert opened.config == CONFIG
    assert "preset=recurrentgemma-9b has no effect beside" in caplog.text


def test_a_preset_is_where_fields_are_from(tmp_path):
    folder = write(tmp_path / "x", "deepmind-flax", tensors_of("deepmind-flax"), None)
    code, found = facts(folder, "--preset", "recurrentgemma-2b")
    assert code == 1 and "is not preset recurrentgemma-2b: width is 8" in found["problems"][0]
    assert found["config"] == {} and len(found["tensors"]) > 50
    done = CliRunner().invoke(app, ["inspect", str(folder), "--preset", "nothing"])
    assert isinstance(done.exception, ArgumentError)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decays_in_low_precision_are_warned_of(tmp_path, dtype):
    import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)

    name = "model.layers.1.temporal_block.rg_lru.recurrent_param"
    tensors = tensors_of("hf") | {name: WEIGHTS[name].astype(dtype)}
    code, found = facts(write(tmp_path / "x", "hf", tensors))
    assert code == 0 and found["dtypes"] == {"float32": len(WEIGHTS) - 1, dtype: 1}
    assert found["warnings"][0].startswith(f"1 recurrent_param are stored as {dtype},")


def test_what_cannot_be_opened_or_is_not_there(tmp_path):
    folder = write(tmp_path / "x", "hf", tensors_of("hf"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    code, text = inspect(folder)
    assert code == 1 and text.startswith("problem: ") and "truncated" in text
    assert facts(folder)[0] == 1
    for place in (tmp_path / "nowhere", tmp_path):
        done = griffin_eval("inspect", place)
        assert done.returncode == 2 and not done.stdout
        assert done.stderr.startswith("griffin-eval: ") and done.stderr.count("\n") == 1


def test_safetensors_without_a_config_are_no_checkpoint(tmp_path):
    save_file({"tokens": np.ones(3)}, tmp_path / "0.safetensors")
    code, found = facts(tmp_path)
    assert code == 1 and len(found["problems"]) == 1
    said = f"{tmp_path} holds no checkpoint: expected config.json beside its safetensors"
    assert found["problems"][0].startswith(said)


def test_a_config_that_is_a_pipe_or_a_device_is_not_read(tmp_path):
    config = write(tmp_path / "x", "hf", tensors_of("hf")) / "config.json"
    config.unlink()
    for place in (lambda: os.mkfifo(config), lambda: config.symlink_to("/dev/zero")):
        place()
        code, found = facts(tmp_path / "x")
        assert code == 1 and f"{config} is not a regular file" in found["problems"][0]
        config.unlink()


def test_layers_beyond_the_limit_are_refused(tmp_path):
    tensors = tensors_of("deepmind-torch")
    tensors["blocks.999999.channel_pre_norm.scale"] = np.ones(CONFIG.width, np.float32)
    code, found = facts(write(tmp_path / "x", "deepmind-torch", tensors, None))
    assert code == 1 and "at most 10000 layers, found 1000000" in found["problems"][0]


def test_tensors_are_listed_where_names_or_the_config_are_unknown(tmp_path):
    tensors = {f"q/{i}": w for i, w in enumerate(WEIGHTS.values())}
    code, found = facts(write(tmp_path / "names", "griffin-orbax", tensors, None))
    assert code == 1 and found["format"] is None and "--names" in found["problems"][0]
    assert len(found["tensors"]) == len(WEIGHTS) and found["dtypes"] == {"float32": len(WEIGHTS)}
    folder = write(tmp_path / "config", "hf", tensors_of("hf"))
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_key_value_heads": 0}))
    code, found = facts(folder)
    assert code == 1 and "num_key_value_heads must be a positive" in found["problems"][0]
    assert len(found["tensors"]) == len(WEIGHTS) and found["config"] == {}


@pytest.mark.parametrize("name", ["hf", "deepmind-torch"])
def test_integers_in_the_place_of_a_parameter(tmp_path, name):
    """Without scales the quantisation method of an integer tensor is unknown."""
    tensors = tensors_of(name)
    binding = next(b for b in bind(FORMATS[name].table, CONFIG) if "up_proj" in str(b.canonical))
    tensors[binding.foreign] = np.ones(binding.shape, np.int8)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(write(tmp_path / "x", name, tensors))
    message = str(caught.value)
    assert "not supported" not in message and binding.foreign in message
    assert "1 of a dtype other than bfloat16, float16, float32, float64" in message
    assert "or with the scales that bitsandbytes or MLX saves beside them" in message
    assert "belong together" not in message


@pytest.mark.parametrize("path", ["run/9", "run/9/../9", "aside/../run/9", ".", "run/latest"])
def test_config_and_tokenizer_of_the_run_of_a_step(tmp_path, monkeypatch, path):
    """The path of the step may have any form; "." stands for the step's own folder."""
    run, step = tmp_path / "run", tmp_path / "run" / "9"
    run.mkdir()
    write(step, "griffin", tensors_of("griffin"))
    (step / "config.json").replace(run / "config.json")
    (run / "tokenizer.json").write_text("{}")
    (run / "latest").symlink_to("9")
    (tmp_path / "aside").mkdir()
    monkeypatch.chdir(step if path == "." else tmp_path)
    opened = Checkpoint(path)
    assert opened.config == CONFIG
    assert opened.folder.samefile(run)
    assert tokenizer_folder(Path(path)).samefile(run)


def test_config_of_the_run_of_an_item_in_a_step(tmp_path):
    run = tmp_path / "run"
    write(run / "9" / "default", "griffin-orbax", tensors_of("griffin-orbax"))
    (run / "9" / "default" / "config.json").replace(run / "config.json")
    (run / "latest").symlink_to("9")
    for path in (run, run / "9", run / "latest", run / "9" / "default"):
        opened = Checkpoint(path)
        assert opened.config == CONFIG and opened.folder.samefile(run)


# Output heads.

HEADS = {
    "hf": ("lm_head.weight", lambda x: x),
    "griffin": ("lm_head.weight", lambda x: x),
    "griffin-orbax": ("lm_head/weight", lambda x: x),
    "deepmind-flax": ("lm_head/kernel", lambda x: x.T),
    "deepmind-torch": ("lm_head.weight", lambda x: x),
}


@pytest.mark.parametrize("name", fast(["hf", "deepmind-flax"], FORMATS))
def test_a_head_that_equals_the_embedding_is_tied_and_recorded(tmp_path, name):
    head, lay_out = HEADS[name]
    tensors = tensors_of(name)
    tensors[head] = lay_out(WEIGHTS[EMBEDDING]).copy("C")
    folder = write(tmp_path / "x", name, tensors)
    checkpoint = Checkpoint(folder)
    assert checkpoint.inspection.left_out == {head: "equal to the embedding, and tied to it"}
    target = "griffin"
    convert(checkpoint, tmp_path / "out", to=target)
    manifest = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    assert "equals the embedding" in manifest["lm_head"]
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == WEIGHTS.keys()

    tensors[head][-1, -1] += 1
    shutil.rmtree(folder)
    write(folder, name, tensors)
    checkpoint = Checkpoint(folder)
    assert not checkpoint.config.tie_embeddings and not checkpoint.inspection.left_out
    assert checkpoint.inspection.origins["tie_embeddings"] == "the output head"
    own = np.ascontiguousarray(lay_out(tensors[head]))
    assert np.array_equal(checkpoint.numpy("lm_head.weight"), own)
    for target in ("hf", "griffin", "griffin-orbax"):
        convert(checkpoint, tmp_path / target, to=target)
        assert verify(checkpoint, tmp_path / target).same
    for target in ("deepmind-flax", "deepmind-torch"):
        with pytest.raises(CheckpointError, match="its output head is the embedding"):
            make_plan(checkpoint, FORMATS[target])


# Layers stacked along the first axis.


HAWK = dataclasses.replace(CONFIG, block_pattern=("recurrent",), num_layers=6, visible_keys=1)


def stacked(name: str, config: GriffinConfig, groups: int | None) -> dict[str, np.ndarray]:
    """Stack all layers under names without numbers, or groups of layers as a scan does."""
    parts: dict[str, list[np.ndarray]] = {}
    tensors, alone = tensors_of(name, weights_of(config), config), set()
    for binding in bind(FORMATS[name].table, config):
        foreign, ours = binding.foreign, binding.canonical[0].name.split(".")
        if ours[1] == "layers":
            place = "" if groups is None else rf"\g<1>{int(ours[2]) % groups}"
            foreign = re.sub(r"(?<=s)([./])[0-9]+", place, foreign, count=1)
        else:
            alone.add(foreign)
        parts.setdefault(foreign, []).append(tensors[binding.foreign])
    return {name: p[0] if name in alone else np.stack(p) for name, p in parts.items()}


def weights_of(config: GriffinConfig) -> dict[str, np.ndarray]:
    return {spec.name: initial_value(spec, 1) for spec in param_specs(config).values()}


@pytest.mark.parametrize(
    ("name", "with_config"),
    [(n, True) if n == "hf" else slow(n, True) for n in FORMATS]
    + [(n, False) for n, f in FORMATS.items() if f.container != "safetensors"],
)
def test_all_layers_in_one_stack_are_recognised(tmp_path, name, with_config):
    tensors = stacked(name, HAWK, None)
    assert not any(c.isdigit() and c != "1" for key in tensors for c in key)
    folder = write(tmp_path / "x", name, tensors, HAWK if with_config and name != "hf" else None)
    if name == "hf":  # hf reads Hawk models but cannot write them
        raw = config_json(CONFIG, FORMATS["hf"], "float32")
        raw |= {"block_types": ["recurrent"], "num_hidden_layers": 6}
        (folder / "config.json").write_text(json.dumps(raw))
    given = Overrides(visible_keys=1, embedding_scale=True, logits_soft_cap=30.0)
    checkpoint = Checkpoint(folder, given)
    assert checkpoint.inspection.layout.endswith(", layers stacked") and checkpoint.config == HAWK
    for key, weight in weights_of(HAWK).items():
        np.testing.assert_array_equal(checkpoint.numpy(key), weight)
        np.testing.assert_array_equal(checkpoint.torch(key).numpy(), weight)
    assert facts(folder, "--visible-keys", 1)[1]["problems"] == []


@pytest.mark.parametrize("name", fast(CONTAINERS, FORMATS))
def test_stacks_that_could_be_of_several_layers_are_not_guessed(tmp_path, name):
    config = dataclasses.replace(CONFIG, num_layers=6)
    folder = write(tmp_path / "x", name, stacked(name, config, 3), config)
    with pytest.raises(CheckpointError, match="hold several layers each.*--names.*stack = '0::3'"):
        Checkpoint(folder)
    tensors = stacked(name, HAWK, None)
    norm = next(key for key in tensors if "final_norm" not in key and "norm" in key)
    tensors[norm] = tensors[norm][:3]  # fewer layers than in the other stacks
    with pytest.raises(CheckpointError, match="hold several layers each.*--names"):
        Checkpoint(write(tmp_path / "y", name, tensors, config))


@pytest.mark.parametrize("name", fast(["griffin"], FORMATS))
def test_what_each_of_several_devices_would_hold(tmp_path, name):
    folder = write(tmp_path / "x", name, tensors_of(name))
    code, found = facts(folder, "--devices", 2)
    assert code == 0
    split = found["split"]
    total = 4 * parameter_count(CONFIG)
    assert split["bytes"] == total and split["devices"] == 2
    assert total / 2 < split["bytes_a_device"] == 4 * split["parameters_a_device"] < 0.7 * total
    assert split["whole"] == ["11 tokens"] and split["whole_bytes"] == WEIGHTS[EMBEDDING].nbytes
    code, found = facts(folder, "--devices", 3)
    assert found["split"]["whole"] == ["11 tokens", "2 blocks of gates", "2 heads"]
    assert "split over 3 devices" in inspect(folder, "--devices", 3)[1]
