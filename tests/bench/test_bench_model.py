"""The benchmark of the model: what it makes of measurements, and a small real run."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from slow import slow
from typer.testing import CliRunner

from benchmarks.model import run
from benchmarks.model.run import Bench, make_config, print_results
from benchmarks.model_flops import logit_flops, reading_flops
from benchmarks.peers import Absent
from benchmarks.random_checkpoint import write_weights
from griffin_eval.cli.main import app
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError
from griffin_eval.layout import param_specs, parameter_count

CONFIG = make_config(width=32, layers=3, heads=2, vocab_size=50, visible_keys=8)
TOKENS = 20
# Of each implementation in each round: seconds to read, and of a step of each batch.
READ = {"torch": [1.0, 3.0, 2.0], "jax": [8.0, 4.0, 6.0], "transformers": [10.0, 10.0, 20.0]}


class Fake:
    """An implementation whose measurements are made up."""

    def __init__(self, module, name, folder, dtype, environment):
        assert dtype in ("float32", "bfloat16")
        self.name, self.folder, self.reads = name, folder, iter(READ.get(name, ()))
        self.round = 0

    def ask(self, do, **request):
        if do == "load" and self.name not in READ:
            raise Absent("no.such not installed")
        if do == "load":
            return None
        if do == "check":
            logits = np.zeros((2, 50))
            logits[0, 0] = 4.0 + {"torch": 4e-5, "jax": 8e-4}.get(self.name, 0.0)
            np.savez(request["path"], **{"prefill": logits, "decode, batch 3": logits[:1]})
            return {}
        if do == "read":
            return {"seconds": next(self.reads) if not request["every"] else 5.0}
        if do == "decode":
            return {"seconds": 0.5 * request["batch"]}
        self.round += do == "products"
        found = {
            "products": {"a": 1e6, "b": 4e6 if self.round == 2 else 2e6},
            "bandwidth": {"sum": 1e5},
        }[do]
        return {f"{self.name} {way}": value for way, value in found.items()}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr(run, "Job", Fake)
    monkeypatch.setattr(run, "NEEDS", {name: () for name in READ} | {"other": ("no.such",)})
    return Bench(CONFIG, TOKENS, [1, 3, 900], 7, [*READ, "other"]).run(3, lambda text: None)


def test_half_the_bytes_of_a_weight_are_half_the_limit(found, monkeypatch):
    monkeypatch.setattr(run, "Job", Fake)
    monkeypatch.setattr(run, "NEEDS", {name: () for name in READ})
    short = Bench(CONFIG, TOKENS, [1], 7, READ, "bfloat16").run(3, lambda text: None)
    assert short["dtype"] == "bfloat16"
    wide = sum(s.size for s in param_specs(CONFIG).values() if s.keep_float32)
    bytes_read = 2 * parameter_count(CONFIG) + 2 * wide
    one = row(short, "decode, batch 1", "jax")
    assert one["of_limit"] == pytest.approx(bytes_read / 1e5 / 0.5)
    # A logit is off by 2e-4 of the largest, which is too much in float32 alone.
    assert short["agree"] and not found["agree"]


def row(found, workload, name):
    (one,) = (r for r in found["rows"] if r["workload"] == workload and r["implementation"] == name)
    return one


def test_speeds_are_medians_and_ratios_are_of_medians(found):
    one = row(found, "prefill", "torch")
    assert one["seconds"] == [1.0, 3.0, 2.0] and one["tokens_per_second"] == TOKENS / 2
    assert one["times"] == {"torch": 1.0, "jax": pytest.approx(1 / 3)}
    assert row(found, "prefill", "transformers")["times"]["torch"] == 5.0
    assert row(found, "decode, batch 3", "jax")["tokens_per_second"] == 3 / 1.5


def test_limits_are_those_of_the_same_round(found):
    flops = reading_flops(CONFIG, np.arange(TOKENS))
    # Rates of the three rounds: 2e6, 4e6 and 2e6.
    limits = [(flops + logit_flops(CONFIG)) / rate for rate in (2e6, 4e6, 2e6)]
    parts = [limit / seconds for limit, seconds in zip(limits, READ["torch"], strict=True)]
    assert row(found, "prefill", "torch")["of_limit"] == pytest.approx(np.median(parts))
    every = row(found, "prefill, all logits", "jax")
    assert every["limit_tokens_per_second"] == pytest.approx(
        TOKENS * 2e6 / (flops + TOKENS * logit_flops(CONFIG))
    )
    weights = 4 * parameter_count(CONFIG)
    assert row(found, "decode, batch 1", "jax")["of_limit"] == pytest.approx(weights / 1e5 / 0.5)
    # Of few rows the bytes take longer, of many the products.
    one = reading_flops(CONFIG, np.array([CONFIG.visible_keys - 1])) + logit_flops(CONFIG)
    assert one / 2e6 < weights / 1e5
    few, many = (row(found, f"decode, batch {rows}", "jax")["of_limit"] for rows in (3, 900))
    assert few == pytest.approx(weights / 1e5 / 1.5)
    assert many == pytest.approx(900 * one / 2e6 / 450)


def test_logits_are_compared_with_the_first_that_is_not_ours(found):
    differences = found["largest_difference"]["prefill"]
    assert differences == pytest.approx({"torch - transformers": 1e-5, "jax - transformers": 2e-4})
    assert set(found["largest_difference"]) == {"prefill", "decode, batch 3"}
    assert not found["agree"]
    assert found["absent"] == {"other": "no.such not installed"}


def test_what_is_printed(found):
    out = io.StringIO()
    print_results(Console(width=120, file=out), found)
    text = out.getvalue()
    lines = [" ".join(line.replace("│", " ").split()) for line in text.splitlines()]
    assert any(line.startswith("prefill griffin torch 10 ") for line in lines)
    assert any("transformers 2 " in line and "5.00x as fast" in line for line in lines)
    assert "do NOT agree" in text and "other is left out: no.such not installed" in text


def test_the_checkpoint_is_one_that_ours_reads_and_every_part_matters(tmp_path):
    write_weights(CONFIG, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config == CONFIG
    assert all(np.abs(checkpoint.numpy(name)).min() > 0 for name in checkpoint.dtypes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batches", "1,0"], "--batches '1,0'"),
        (["--batches", "x"], "--batches 'x'"),
        (["--implementations", "torhc"], "unknown implementation 'torhc'"),
        (["--implementations", "transformers"], "limits need one of ours"),
        (["--width", "30", "--heads", "4"], "num_heads (4) must divide width (30)"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_measured(arguments, said):
    result = CliRunner().invoke(app, ["bench", "model", *arguments])
    assert isinstance(result.exception, ArgumentError) and said in str(result.exception)


@pytest.mark.slow
def test_benchmark_runs_every_implementation_and_their_logits_agree():
    done = subprocess.run(
        [Path(sys.executable).with_name("griffin-eval"), "bench", "model", "--json"]
        + ["--width", "64", "--vocab", "300", "--visible-keys", "16", "--tokens", "70"]
        + ["--batches", "1,3", "--steps", "2", "--rounds", "1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    names = ["torch", "jax", "transformers", "deepmind-torch", "deepmind-jax"]
    works = ["prefill", "prefill, all logits", "decode, batch 1", "decode, batch 3"]
    rows = [(r["workload"], r["implementation"]) for r in found["rows"]]
    assert rows == [(work, name) for work in works for name in names]
    assert found["agree"] and found["absent"] == {}
    pairs = {f"{name} - transformers" for name in names if name != "transformers"}
    for work in works:
        differences = found["largest_difference"][work]
        # DeepMind's code does not give the last logit alone.
        assert set(differences) >= {p for p in pairs if work != "prefill" or "deepmind" not in p}
        assert all(0 < d < 1e-5 for d in differences.values())
    assert all(r["of_limit"] > 0 and r["tokens_per_second"] > 0 for r in found["rows"])
    assert {"products", "reading"} == set(found["limits"])


@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", [("bnb-nf4", "bfloat16"), slow("mlx-8", "float32")])
def test_quantised_weights_beside_dequantised_ones(name, dtype):
    sizes = "--width 64 --layers 3 --heads 2 --vocab 128 --visible-keys 16 --tokens 40"
    command = [
        "bench",
        "model",
        *sizes.split(),
        "--batches",
        "1,3",
        "--steps",
        "2",
        "--rounds",
        "1",
    ]
    command += ["--implementations", "torch,jax,deepmind-torch", "--dtype", dtype]
    command += ["--quantize", name, "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["quantised"] == name
    others = {"torch-quantised", "jax", "jax-quantised", "deepmind-torch"}
    assert {row["implementation"] for row in found["rows"]} == {"torch", *others}
    for work, pairs in found["largest_difference"].items():
        # DeepMind's code, with which others are compared, does not give the last logit alone.
        to = "torch" if work == "prefill" else "deepmind-torch"
        told = {"torch", *others} - {to, "deepmind-torch"}
        assert set(pairs) == {f"{other} - {to}" for other in told}


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_what_stays_quantised_is_chosen_by_quantize(name):
    command = ["bench", "model", "--implementations", f"{name},{name}-quantised"]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, ArgumentError)
