"""`verify --logits`: equal models agree everywhere, and differences are found in their place."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
from parity import BASE as THREE_LAYERS
from parity import weights
from peers import recurrent_gemma
from safetensors.numpy import load_file, save_file
from slow import ci
from typer.testing import CliRunner

from griffin_eval.cli.main import app
from griffin_eval.converters import inspection
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.configs import huggingface
from griffin_eval.converters.configs.huggingface import to_huggingface
from griffin_eval.converters.convert import convert_checkpoint
from griffin_eval.converters.formats import FORMATS
from griffin_eval.converters.plan import make_plan
from griffin_eval.crosscheck import logits
from griffin_eval.crosscheck.logits import IMPLEMENTATIONS, Trace, compare_traces, make_probe
from griffin_eval.errors import BadInput

# Two layers only, since JAX compiles each of them.
BASE = dataclasses.replace(
    THREE_LAYERS, block_pattern=("recurrent", "local_attention"), num_layers=2
)
NAMES = [i.name for i in IMPLEMENTATIONS]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Write a checkpoint that every implementation can run, with weights that hide no error."""
    folder = tmp_path_factory.mktemp("original")
    save_file(weights(BASE), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(to_huggingface(BASE)))
    return folder


@pytest.fixture
def only(monkeypatch):
    """Return a function that selects the implementations: JAX takes seconds to compile a model."""

    def choose(*names):
        chosen = tuple(i for i in IMPLEMENTATIONS if i.name in names)
        monkeypatch.setattr(logits, "IMPLEMENTATIONS", chosen)

    return choose


def invoke(*arguments):
    return CliRunner().invoke(app, ["verify", *map(str, arguments), "--logits"])


def rows(output: str, table: int = 0) -> dict[str, list[str]]:
    """Return a table's rows by their first cell. Table 0: pair -> largest logit difference, first
    place, largest difference there; table 1: layer -> largest difference, also relative."""
    lines = [line for line in output.split("└")[table].splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    return {pair: rest for pair, *rest in cells}


def change(source, destination, name, factor=1.05):
    """Write a copy with one tensor changed a little."""
    shutil.copytree(source, destination)
    tensors = load_file(destination / "model.safetensors")
    tensors[name] = tensors[name] * np.float32(factor)
    save_file(tensors, destination / "model.safetensors")
    return destination


@pytest.mark.parametrize("names", [["torch", "transformers"], ci(["torch", "jax"])])
def test_a_conversion_computes_the_same(original, only, tmp_path, names):
    only(*names)
    other = tmp_path / "flax"
    convert_checkpoint(make_plan(Checkpoint(original), FORMATS["deepmind-flax"]), other)
    check_agreement(invoke(original, other), names)


def check_agreement(done, names):
    assert done.exit_code == 0, done.output
    found = rows(done.output)
    assert list(found) == [
        *(f"{letter}: torch - {name}" for letter in "AB" for name in names[1:]),
        *(f"A - B: {name}" for name in names),
    ]
    for pair, (difference, first, largest) in found.items():
        assert (first, largest) == ("none", ""), pair
        # Logits reach 30. Some rounding must show: the implementations are different programs.
        assert (
            float(difference) == 0 if pair.startswith("A - B") else 0 < float(difference) < 1e-3
        ), pair


CHANGES = {
    "model.embed_tokens.weight": "embedding",
    "model.layers.0.temporal_block.rg_lru.recurrent_param": "layer 0",
    "model.layers.0.temporal_block.conv_1d.weight": "layer 0",
    "model.layers.1.temporal_block.k_proj.weight": "layer 1",
    "model.layers.1.mlp_block.up_proj.bias": "layer 1",
    "model.final_norm.weight": "logits",
}


def test_the_layer_that_differs_is_named(original, only, tmp_path):
    only("torch")
    for number, (name, place) in enumerate(CHANGES.items()):
        done = invoke(original, change(original, tmp_path / str(number), name))
        assert done.exit_code == 1, done.output
        assert f"{name}: " in done.output
        difference, first, largest = rows(done.output)["A - B: torch"]
        assert first == place and float(largest) > 0 and float(difference) > 1e-3


def test_the_probe_goes_past_the_window(original, only, tmp_path):
    """One visible key less, with equal tensors, shows only past the window."""
    only("torch")
    other = shutil.copytree(original, tmp_path / "other")
    config = dataclasses.replace(BASE, visible_keys=BASE.visible_keys - 1)
    (other / "config.json").write_text(json.dumps(to_huggingface(config)))
    done = invoke(original, other)
    assert done.exit_code == 1
    assert re.search(r"\b(\d+) of \1 parameters are the same", done.output)
    assert rows(done.output)["A - B: torch"][1] == "layer 1"


def test_a_config_that_transformers_reads_otherwise_is_noticed(original, only, monkeypatch):
    """One checkpoint suffices: transformers reads the folder itself."""
    only("torch", "transformers")
    assert invoke(original).exit_code == 0
    # Let this project read the window wrongly.
    read = huggingface.to_griffin_config

    def misread(raw, *, source):
        return dataclasses.replace(read(raw, source=source), visible_keys=BASE.visible_keys + 1)

    monkeypatch.setattr(huggingface, "to_griffin_config", misread)
    monkeypatch.setattr(inspection, "to_griffin_config", misread)
    done = invoke(original)
    assert done.exit_code == 1, done.output
    assert rows(done.output)["A: torch - transformers"][1] == "layer 1"


def test_what_the_command_line_says_of_a_model_is_what_peers_run(original, only):
    names = ["torch", "transformers", "deepmind-torch"]
    only(*names)
    done = invoke(original, "--visible-keys", "5", "--logits-soft-cap", "11")
    assert done.exit_code == 0, done.output
    assert list(rows(done.output)) == [f"A: torch - {name}" for name in names[1:]]


def test_what_is_not_run_is_said(original, monkeypatch):
    hidden = {"jax", "recurrentgemma"}
    real = logits.find_spec
    monkeypatch.setattr(logits, "find_spec", lambda name: None if name in hidden else real(name))
    done = invoke(original)
    assert done.exit_code == 0
    assert list(rows(done.output)) == ["A: torch - transformers"]
    assert "A: jax is left out: jax not installed" in done.output
    assert "A: deepmind-torch is left out: jax and recurrentgemma not installed" in done.output
    hidden.add("transformers")
    done = invoke(original)
    assert isinstance(done.exception, BadInput) and "griffin-eval[all]" in str(done.exception)


@pytest.mark.slow
def test_a_model_that_peers_cannot_express(tmp_path):
    config = dataclasses.replace(
        BASE, block_pattern=("recurrent", "global_attention"), gate_blocks=4
    )
    save_file(weights(config), tmp_path / "model.safetensors")
    raw = {"model_type": "griffin", **dataclasses.asdict(config)}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    done = invoke(tmp_path)
    assert done.exit_code == 0, done.output
    assert list(rows(done.output)) == ["A: torch - jax"]
    for name in NAMES[2:]:
        assert f"A: {name} is left out: it cannot express gate_blocks=4" in done.output


def test_models_of_other_sizes(original, only, tmp_path):
    only("torch")
    config = dataclasses.replace(BASE, num_layers=3)
    save_file(weights(config), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(to_huggingface(config)))
    done = invoke(original, tmp_path)
    assert done.exit_code == 1
    assert "logits are not compared: num_layers 2 and 3" in done.output
    cut = tmp_path / "cut"
    convert_checkpoint(make_plan(Checkpoint(original), FORMATS["griffin"], vocab_size=40), cut)
    done = invoke(original, cut)
    assert done.exit_code == 1 and "config differs in vocab_size" in done.output
    assert {first for _, first, _ in rows(done.output).values()} == {"none"}


def test_the_distance_of_two_checkpoints(original, only, tmp_path):
    """Distances are those of transformers' probabilities and vectors for the same tokens."""
    import torch

    only("torch")
    name = "model.layers.0.temporal_block.linear_x.weight"
    changed = change(original, tmp_path / "changed", name, 1.5)
    done = invoke(original, changed, "--output", tmp_path / "figures")
    assert done.exit_code == 1
    assert (tmp_path / "figures" / "verify_layers.png").read_bytes()[1:4] == b"PNG"
    assert "<svg" in (tmp_path / "figures" / "verify_layers.svg").read_text()
    probe = make_probe([BASE])
    tokens = torch.from_numpy(probe.tokens).long()
    log_probabilities, hidden = [], []
    for folder in (original, changed):
        model = recurrent_gemma().from_pretrained(folder, attn_implementation="eager")
        with torch.no_grad():
            found = model.eval()(tokens, output_hidden_states=True, use_cache=False)
        log_probabilities.append(found.logits[0, probe.keep].double().log_softmax(-1))
        hidden.append([h[0, probe.keep] for h in found.hidden_states])
    one, other = log_probabilities
    kl = torch.nn.functional.kl_div(other, one, log_target=True, reduction="none").sum(1)
    assert kl.mean() > 1e-5
    said = re.search(r"KL of the next token, B from A, (\S+) nats in .* (\S+) at most", done.output)
    assert float(said[1]) == pytest.approx(float(kl.mean()), rel=0.02)
    assert float(said[2]) == pytest.approx(float(kl.max()), rel=0.02)
    found = rows(done.output, 1)
    assert list(found) == ["embedding", "layer 0", "layer 1"]
    assert found.pop("embedding") == ["0", "0"]
    a, b = (h[1] for h in hidden)  # behind layer 0
    largest, relative = map(float, found["layer 0"])
    assert largest == pytest.approx(float((a - b).abs().max()), rel=0.02)
    assert relative == pytest.approx(largest / float(a.abs().max()), rel=0.02)


def test_no_distance_of_equal_checkpoints(original, only):
    only("torch")
    assert "KL" not in invoke(original, original).output


def test_one_checkpoint_alone(original, tmp_path):
    done = invoke(original, "--output", tmp_path)
    assert isinstance(done.exception, BadInput) and "two checkpoints" in str(done.exception)
    done = CliRunner().invoke(app, ["verify", str(original)])
    assert isinstance(done.exception, BadInput) and "name another" in str(done.exception)


def test_not_a_number_is_no_agreement():
    good = Trace([np.ones((2, 3), np.float32)] * 3, np.ones((2, 5), np.float32))
    assert compare_traces(good, good) == (0.0, None, 0.0)
    bad = good._replace(hidden=[*good.hidden[:2], np.full((2, 3), np.nan, np.float32)])
    for pair in ((good, bad), (bad, good), (bad, bad)):
        assert compare_traces(*pair).first == "layer 1"


@pytest.mark.parametrize("window, past", [(1, True), (8, True), (2048, True), (100_000, False)])
def test_probes_are_bounded(window, past):
    config = dataclasses.replace(BASE, visible_keys=window)
    probe = make_probe([BASE, config])
    assert probe.past_window == past
    assert probe.tokens.shape[1] <= logits.WINDOW_LIMIT + logits.KEPT
    assert probe.tokens.shape[1] % logits.CHUNKS == 0
    assert len(probe.keep) == logits.KEPT and np.all(np.diff(probe.keep) > 0)
    assert probe.keep[-1] == probe.tokens.shape[1] - 1
    assert probe.tokens.min() >= 0 and probe.tokens.max() < BASE.vocab_size
