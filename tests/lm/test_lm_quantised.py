"""``load=quantised`` of ``--model_args``, against the same checkpoint dequantised."""

import dataclasses
import subprocess
import sys

import pytest
from gguf_files import candle, write_candle
from lm_eval.api.instance import Instance
from parity import BASE, weights
from slow import fast
from typer.testing import CliRunner

from benchmarks.random_checkpoint import write_weights
from griffin_eval.cli.main import app
from griffin_eval.config import PRESETS
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.codecs.encode import ENCODINGS
from griffin_eval.converters.overrides import Overrides
from griffin_eval.errors import ArgumentError
from griffin_eval.lm.model import GriffinLM
from griffin_eval.runners.load import load_runners
from griffin_eval.runners.protocol import FRAMEWORKS

PAIRS = [("The unary minus", " operator"), ("x", " yields the negation of its argument." * 9)]


@pytest.fixture(scope="module")
def quantised(checkpoint, tmp_path_factory):
    """A checkpoint of width 128, quantised, by the name of the encoding."""
    root = tmp_path_factory.mktemp("quantised")

    def get(name):
        if not (root / name).exists():
            command = ["convert", str(checkpoint), str(root / name), "--to", "hf"]
            done = CliRunner().invoke(app, [*command, "--quantize", name])
            assert done.exit_code == 0, done.output
        return str(root / name)

    return get


def answers(lm):
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    return [answer for answer, _ in lm.loglikelihood(requests, disable_tqdm=True)]


def continued(lm):
    options = {"until": ["zzzz"], "max_gen_toks": 12, "do_sample": False}
    requests = [
        Instance("generate_until", {}, (text, options), i) for i, (text, _) in enumerate(PAIRS)
    ]
    return lm.generate_until(requests, disable_tqdm=True)


@pytest.mark.parametrize("framework", fast(["torch"], FRAMEWORKS))
@pytest.mark.parametrize("name", fast(["mlx-4"], ENCODINGS))
def test_answers_are_those_of_the_dequantised_model(checkpoint, quantised, name, framework):
    options = {"pretrained": quantised(name), "framework": framework, "dtype": "float32"}
    plain, packed = GriffinLM(**options), GriffinLM(**options, load="quantised")
    expected = answers(plain)
    assert answers(packed) == pytest.approx(expected, rel=2e-6)
    assert continued(packed) == continued(plain)
    whole = GriffinLM(pretrained=str(checkpoint), framework=framework, dtype="float32")
    assert answers(whole) != pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(quantised, dtype, framework):
    options = {"pretrained": quantised("mlx-8"), "framework": framework, "dtype": dtype}
    expected = answers(GriffinLM(**options))
    assert answers(GriffinLM(**options, load="quantised")) == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"load": "packed"}, "unknown load 'packed': expected quantised"),
        ({"tensor_parallel_size": 2}, "one device a replica, found tensor_parallel_size=2"),
        (
            {"tensor_parallel_size": 2, "framework": "jax"},
            "one device a replica, found tensor_parallel_size=2",
        ),
    ],
)
def test_refusals(quantised, changes, message):
    options = {"framework": "torch", "load": "quantised"} | changes
    with pytest.raises(ArgumentError, match=message):
        GriffinLM(pretrained=quantised("mlx-4"), **options)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_not_quantised_is_refused(checkpoint, framework):
    with pytest.raises(ArgumentError, match="is not quantised; leave the argument out"):
        GriffinLM(pretrained=str(checkpoint), framework=framework, load="quantised")


def test_blocks_of_gguf_are_refused_in_jax(tmp_path, monkeypatch):
    config = dataclasses.replace(BASE, width=64, lru_width=64, mlp_width=128)
    monkeypatch.setitem(PRESETS, "tiny", config)
    write_candle(tmp_path / "m.gguf", candle(weights(config), "Q4_0"))
    checkpoint = Checkpoint(tmp_path / "m.gguf", Overrides(preset="tiny"))
    with pytest.raises(ArgumentError, match="m.gguf is GGUF: take framework=torch"):
        load_runners(checkpoint, framework="jax", packed=True)


@pytest.mark.slow
def test_programs_are_kept_apart_by_what_values_are_rounded_to(checkpoint, tmp_path):
    """Nothing else tells these two models apart, whose arrays have the same shapes and dtypes."""
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / dtype
        command = ["convert", str(checkpoint), str(folder), "--to", "hf", "--dtype", dtype]
        done = CliRunner().invoke(app, [*command, "--quantize", "bnb-nf4"])
        assert done.exit_code == 0, done.output
        options = {"pretrained": str(folder), "framework": "jax", "dtype": "float32"}
        expected = answers(GriffinLM(**options))
        assert answers(GriffinLM(**options, load="quantised")) == pytest.approx(expected, rel=2e-6)


_MEMORY = """
import re, sys, torch
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.model_torch.loading import load, load_packed
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
torch.set_grad_enabled(False)
torch.set_num_threads(1)
before = anonymous()
read = load_packed if sys.argv[2] == "quantised" else load
model = read(Checkpoint(sys.argv[1]), torch.float32)
state = model.init_state(1)
for length in (40, 1):
    hidden, state = model.step(torch.ones(1, length).long(), torch.tensor([length]), state)
    model.logits(hidden)
print(anonymous() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_that_of_a_layer(tmp_path):
    """Of 12 layers that have 6 MB each in float32, and 1 MB quantised, mapped from the file."""
    config = dataclasses.replace(BASE, width=256, lru_width=256, mlp_width=1536, num_layers=12)
    (tmp_path / "base").mkdir()
    write_weights(config, tmp_path / "base")
    command = ["convert", str(tmp_path / "base"), str(tmp_path / "q"), "--to", "hf"]
    assert CliRunner().invoke(app, [*command, "--quantize", "mlx-4"]).exit_code == 0
    taken = {}
    for how in ("quantised", "plain"):
        done = subprocess.run(
            [sys.executable, "-c", _MEMORY, str(tmp_path / "q"), how],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        taken[how] = int(done.stdout)
    whole = 12 * 6 * 10**6
    assert taken["plain"] - taken["quantised"] > 0.7 * whole, taken
