"""`griffin-eval memory`: half-lives against transformers' a_t, cache sizes against real states."""

import json
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import parity_reference
import pytest
from fixtures_engine import small_runner
from hypothesis import given
from hypothesis import strategies as st
from parity import BASE, MODELS
from safetensors.numpy import load_file, save_file
from slow import ci
from typer.testing import CliRunner

from griffin_eval.analysis.cache_sizes import cache_sizes, parameter_bytes
from griffin_eval.analysis.half_lives import CHUNK, ChannelDecay, decay_rates, measure, summary
from griffin_eval.api import load, memory
from griffin_eval.cli.main import app
from griffin_eval.config import PRESETS, GriffinConfig
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.configs.own import config_json
from griffin_eval.converters.formats import FORMATS
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.initializers import initial_value
from griffin_eval.layout import param_specs


def write(folder: Path, config: GriffinConfig) -> Path:
    tensors = {name: initial_value(spec, 0) for name, spec in param_specs(config).items()}
    save_file(tensors, folder / "model.safetensors")
    text = json.dumps(config_json(config, FORMATS["griffin"], "float32"))
    (folder / "config.json").write_text(text)
    return folder


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["memory", *map(str, arguments)], env={"COLUMNS": "140"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout


# Half-lives


@given(st.floats(-12, 5), st.floats(0.01, 1))
def test_half_of_a_state_is_left_after_a_half_life(recurrent_param, gate):
    rate = 8 * np.log1p(np.exp(recurrent_param))
    (half_life,) = ChannelDecay(0, np.array([rate]), None, None).half_life(gate)
    a = (1 / (1 + np.exp(recurrent_param))) ** (8 * gate)  # a_t = σ(-Λ)^(8 r)
    assert a**half_life == pytest.approx(0.5)


@pytest.fixture(scope="module")
def ids(checkpoint):
    from griffin_eval.text.load import load_tokenizer

    return np.array([2, *load_tokenizer(checkpoint).encode(topics["strings"])], np.int32)[:700]


@pytest.fixture(scope="module")
def reference(equations, ids):
    """Return log a_t [T, L] of the text for each recurrent layer, by the equations in numpy."""
    seen, log_decay = [], parity_reference.log_decay

    def recorded(*arguments):
        seen.append(log_decay(*arguments))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity_reference, "log_decay", recorded)
        equations(ids)
    return dict(zip((0, 1, 3, 4), np.reshape(seen, (4, len(ids), -1)), strict=True))


@pytest.mark.parametrize("framework", ["torch", ci("jax")])
def test_measured_half_lives_equal_the_equations(framework, checkpoint, ids, reference):
    assert len(ids) % CHUNK > 0 < len(ids) // CHUNK
    read = []
    model = load(checkpoint, framework=framework, device="cpu")
    layers = measure(
        Checkpoint(checkpoint), ids, framework=framework, model=model, progress=read.append
    )
    assert read == [CHUNK, len(ids) - CHUNK]
    assert [layer.number for layer in layers] == list(reference) == [0, 1, 3, 4]
    for layer in layers:
        log_a = reference[layer.number][1:]
        assert layer.mean_gate is not None and layer.histogram is not None
        expected = np.log(2) / -log_a.mean(0)
        np.testing.assert_allclose(layer.half_life(layer.mean_gate), expected, rtol=1e-4)
        r = log_a / -layer.rate
        np.testing.assert_allclose(layer.mean_gate, r.mean(0), rtol=1e-4)
        assert layer.histogram.sum() == r.size
        histogram = np.histogram(r, len(layer.histogram), (0, 1))[0]
        assert np.abs(layer.histogram - histogram).sum() < 1e-3 * r.size  # at the edges of bins


def test_rates_are_of_the_parameters(checkpoint):
    opened = Checkpoint(checkpoint)
    layers = decay_rates(opened)
    assert [layer.number for layer in layers] == [0, 1, 3, 4]
    for layer in layers:
        name = f"model.layers.{layer.number}.temporal_block.rg_lru.recurrent_param"
        a = 1 / (1 + np.exp(opened.numpy(name).astype(np.float64)))  # σ(-Λ)
        np.testing.assert_allclose(np.exp(-layer.rate), a**8)


def test_summary():
    layer = ChannelDecay(3, np.log(2) / np.arange(1.0, 101), np.full(100, 0.25), None)
    numbers = summary(layer, visible_keys=200)
    assert numbers["layer"] == 3
    assert numbers["half_life_gate_1"] == pytest.approx({"5%": 5, "50%": 50, "95%": 95})
    assert numbers["half_life_gate_0.5"] == pytest.approx({"5%": 10, "50%": 100, "95%": 190})
    assert numbers["half_life_measured"] == pytest.approx({"5%": 20, "50%": 200, "95%": 380})
    assert numbers["mean_gate"] == {"5%": 0.25, "50%": 0.25, "95%": 0.25}
    # Half of 4, 8, …, 400 tokens are above 200; rounding may put 200 itself above.
    assert numbers["share_beyond_window"] == pytest.approx(0.5, abs=0.011)
    assert "share_beyond_window" not in summary(layer, visible_keys=None)


# Caches


def test_caches_are_what_the_runners_keep():
    for name, config in MODELS.items():
        length = config.visible_keys + 50
        # A state of this capacity has room for one token less: the one that is being read.
        state = small_runner("torch", config).model.init_state(1, length + 1)
        kept = sum(leaf.nbytes for layer in state.layers for leaf in layer)
        assert cache_sizes(config, length, 4).total == kept, name


def test_caches_of_recurrentgemma_2b_by_hand():
    config = PRESETS["recurrentgemma-2b"]
    sizes = cache_sizes(config, 8192, itemsize=2)
    assert sizes.recurrent == 18 * 2560 * (4 + 3 * 2)  # 18 recurrent blocks
    assert sizes.attention == 8 * 2 * 2048 * 256 * 2  # 8 of local attention, window 2048
    assert sizes.mqa == 26 * 2 * 8192 * 256 * 2
    assert sizes.mha == 26 * 2 * 8192 * 2560 * 2
    assert cache_sizes(config, 100, 2).attention == 8 * 2 * 100 * 256 * 2
    assert cache_sizes(config, 10**6, 2).total == sizes.total
    assert parameter_bytes(config, 2) == pytest.approx(2 * 2.68e9, rel=0.01)


# The command


TOKENS = ("--tokens", 600, "--framework")


@pytest.fixture(scope="module")
def printed(checkpoint, tmp_path_factory):
    """Return what the command prints with PyTorch (JSON, then tables), and the figures' folder."""
    folder = tmp_path_factory.mktemp("figures")
    facts = json.loads(run(checkpoint, "--json", *TOKENS, "torch"))
    text = run(checkpoint, "--output", folder / "new", *TOKENS, "torch")
    return facts, text, folder / "new"


@pytest.mark.slow
def test_json_is_the_same_in_both_frameworks(printed, checkpoint):
    torch, jax = printed[0], json.loads(run(checkpoint, "--json", *TOKENS, "jax"))
    assert torch["text"]["tokens"] == 600 and torch["window"] == 128
    assert {"text", "caches"} <= {key for key in torch if torch[key] == jax[key]}
    assert len(torch["memory"]) == len(jax["memory"]) == 4
    for a, b in zip(torch["memory"], jax["memory"], strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert value == pytest.approx(b[key], rel=1e-4), key


def test_tables_say_what_json_says(printed):
    facts, text, _ = printed
    assert facts["text"]["tokens"] == 600 and facts["window"] == 128
    assert len(facts["memory"]) == 4
    for layer in facts["memory"]:
        (line,) = [x for x in text.splitlines() if x.startswith(f"│     {layer['layer']} │")]
        for key in ("half_life_gate_1", "half_life_gate_0.5", "mean_gate", "half_life_measured"):
            for number in layer[key].values():
                assert f"{number:.3g}" in line
    assert "1,048,576" in text


def test_figures(printed):
    _, text, folder = printed
    for name, said in (
        ("half_lives", "half-life of a channel, tokens"),
        ("gate", "gate r on the text"),
        ("caches", "memory for the sequence"),
    ):
        path = folder / f"memory_{name}.png"
        assert str(path) in text
        assert path.read_bytes().startswith(b"\x89PNG")
        assert said in path.with_suffix(".svg").read_text()


def test_a_text_of_ones_own(checkpoint, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Some words, and more of them.", encoding="utf-8")
    facts = json.loads(run(checkpoint, "--json", "--text", path))
    assert facts["text"]["name"] == str(path)
    assert 5 < facts["text"]["tokens"] < 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hawk", "mqa"])
def test_models_without_attention_or_without_recurrence(name, tmp_path):
    folder = write(tmp_path, MODELS[name])
    facts = json.loads(run(folder, "--json", "--tokens", 0, "--output", tmp_path / "figures"))
    assert facts["text"] is None and facts["window"] is None
    assert len(facts["memory"]) == (MODELS[name].num_layers if name == "hawk" else 0)
    assert all("mean_gate" not in layer for layer in facts["memory"])
    drawn = {path.stem for path in (tmp_path / "figures").iterdir()}
    both = {"memory_half_lives", "memory_gate"}
    assert drawn == {"memory_caches"} | (both if name == "hawk" else set())
    assert "MHA Transformer" in run(folder, "--tokens", 0)


@pytest.fixture
def endless(tmp_path):
    """Write a checkpoint whose first layer never forgets."""
    folder = write(tmp_path, BASE)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.temporal_block.rg_lru.recurrent_param"
    tensors[name] = np.full_like(tensors[name], -1e4)  # softplus underflows
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_half_life_without_end_is_null(endless):
    facts = json.loads(run(endless, "--json", "--tokens", 0))
    assert facts["memory"][0]["half_life_gate_1"]["50%"] is None


def test_bad_input(checkpoint, tmp_path):
    for arguments, error, message in (
        (["--text", "{tmp}/none.txt"], ArgumentError, "none.txt cannot be read: No such file"),
        (["--text", "{tmp}/bytes"], ArgumentError, "bytes cannot be read: it is not UTF-8"),
        (["--text", "{tmp}/bytes", "--tokens", "0"], ArgumentError, "leave one of them out"),
        (["--tokens", "1"], ArgumentError, "gives 1 tokens of --tokens 1"),
        (["--output", "{tmp}/bytes"], ArgumentError, "bytes is a file: expected a folder"),
        (["--output", "{tmp}/bytes/below"], ArgumentError, "bytes is no folder"),
        (["--framework", "tensorflow"], ArgumentError, "unknown framework 'tensorflow'"),
    ):
        (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
        with pytest.raises(error, match=message):
            run(checkpoint, *(a.replace("{tmp}", str(tmp_path)) for a in arguments))


def test_a_negative_number_of_tokens_is_refused(checkpoint):
    with pytest.raises(ArgumentError, match="tokens must be 0 or more, found -1"):
        memory(checkpoint, tokens=-1)


def test_a_text_for_a_model_without_recurrence_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="has no recurrent block"):
        memory(write(tmp_path, MODELS["mqa"]), text="a text")


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("parameter", [np.nan, np.inf])
def test_rates_that_are_not_finite_are_refused(endless, parameter):
    tensors = load_file(endless / "model.safetensors")
    name = "model.layers.0.temporal_block.rg_lru.recurrent_param"
    tensors[name][:] = parameter
    save_file(tensors, endless / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}: .* weights are NaN or infinite"):
        run(endless, "--tokens", 0)


def test_without_a_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match="tokenizer"):
        run(write(tmp_path, BASE))
