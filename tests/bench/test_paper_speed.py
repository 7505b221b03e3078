"""The benchmarks of sections 4.3 and 5: byte model, what is made of measurements, claims."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from benchmarks.model_flops import logit_flops, reading_flops
from benchmarks.peers import Absent
from benchmarks.timing import Failed
from experiments.paper_speed import (
    byte_model,
    claims,
    decoding,
    figures,
    latency,
    predictions,
    tables,
    throughput,
    training,
)
from experiments.paper_speed.byte_model import Rates
from experiments.paper_speed.decoding import Measured, Point
from experiments.paper_speed.models import make_models
from griffin_eval.analysis.cache_sizes import cache_sizes, parameter_bytes
from griffin_eval.cli.main import app
from griffin_eval.config import PRESETS
from griffin_eval.errors import ArgumentError
from griffin_eval.layout import parameter_count

MODELS = make_models(width=512, layers=6, heads=4, vocab_size=32_000, visible_keys=1024)
SMALL = make_models(width=32, layers=3, heads=2, vocab_size=50, visible_keys=8)
RATES = Rates(40e9, 300e9)
COMMAND = Path(sys.executable).with_name("griffin-eval")


# The byte model


def test_bytes_of_a_step_are_parameters_and_caches_by_hand():
    # 6 layers of one key head: 2 x 128 numbers of 4 bytes a layer and token.
    weights = 4 * parameter_count(MODELS["mqa"])
    costs = byte_model.step_costs(MODELS["mqa"], 8, np.array([0, 1, 4096]))
    assert costs.nbytes.tolist() == [weights + 8 * n * 6 * 2 * 128 * 4 for n in (0, 1, 4096)]
    # Hawk keeps a state and three inputs of the convolution of 512 channels, whatever it has read.
    weights = 4 * parameter_count(MODELS["hawk"])
    costs = byte_model.step_costs(MODELS["hawk"], 8, np.array([0, 4096]))
    assert costs.nbytes.tolist() == [weights + 8 * 6 * 4 * 512 * 4] * 2


@pytest.mark.parametrize("name", MODELS)
def test_costs_are_those_of_cache_sizes_and_flops_at_every_context(name):
    config = SMALL[name]
    contexts = np.arange(30)
    costs = byte_model.step_costs(config, 3, contexts)
    nbytes = [parameter_bytes(config, 4) + 3 * cache_sizes(config, n, 4).total for n in contexts]
    flops = [3 * (reading_flops(config, np.array([n])) + logit_flops(config)) for n in contexts]
    np.testing.assert_allclose(costs.nbytes, nbytes, rtol=1e-12)
    np.testing.assert_allclose(costs.flops, flops, rtol=1e-12)
    seconds = costs.seconds(Rates(1e6, 1e7))
    np.testing.assert_allclose(seconds, np.maximum(costs.nbytes / 1e6, costs.flops / 1e7))
    total = byte_model.sampling_seconds(config, Rates(1e6, 1e7), 3, 5, 20)
    assert total == pytest.approx(seconds[5:25].sum())


def test_the_paper_models_predict_what_their_sizes_say():
    """The table of 1.3B models in bfloat16 that was worked out before, to its two digits."""
    configs = predictions.CONFIGS
    weights = {name: round(parameter_bytes(c, 2) / 1e9, 2) for name, c in configs.items()}
    assert weights == {"griffin": 2.62, "hawk": 2.74, "mqa": 2.37}
    caches = {name: cache_sizes(c, 4096, 2).total for name, c in configs.items()}
    assert caches["mqa"] == 4096 * 24 * 2 * 128 * 2
    assert round(caches["griffin"] / 1e6, 1) == 4.6 and round(caches["hawk"] / 1e6, 2) == 0.61
    over = {(row["prompt"], row["sampled"]): row["mqa_over"] for row in predictions.latencies()}
    # Short samples favour the Transformer, which has fewer parameters.
    assert [round(over[0, n]["griffin"], 2) for n in (128, 4096)] == [0.91, 1.03]
    assert [round(over[4096, n]["griffin"], 2) for n in (128, 4096)] == [1.19, 1.33]
    assert round(over[4096, 4096]["hawk"], 2) == 1.30
    rows = predictions.throughputs()
    assert [round(row["bytes"]["griffin"], 1) for row in rows] == [2.2, 2.5, 3.8, 6.9]
    assert [row["bytes"]["hawk"] for row in rows] == pytest.approx([5.7, 11.5, 22.9, 45.8], 0.02)
    assert [row["batches"]["mqa"] for row in rows] == [1911, 955, 477, 238]
    assert {row["batches"]["hawk"] for row in rows} == {18978}
    assert rows[0]["batches"]["griffin"] == 4700 and rows[-1]["batches"]["griffin"] == 2559


def test_the_largest_batch_just_fits():
    config = MODELS["griffin"]
    batch = byte_model.largest_batch(config, 4096, 10**9, working=1000)
    row = cache_sizes(config, 4096, 4).total + 1000
    left = 10**9 - parameter_bytes(config, 4)
    assert batch * row <= left < (batch + 1) * row
    assert byte_model.largest_batch(config, 4096, 10**6) == 0


def test_crossings():
    mqa = MODELS["mqa"]
    tokens = byte_model.cache_bound_from(mqa, 8)
    assert tokens is not None
    sizes = [8 * cache_sizes(mqa, n, 4).total for n in (tokens - 1, tokens)]
    assert sizes[0] < parameter_bytes(mqa, 4) <= sizes[1]
    assert byte_model.cache_bound_from(MODELS["hawk"], 8) is None
    rows = byte_model.compute_bound_from(mqa, RATES, 0)
    assert rows is not None
    for batch, bound in ((rows - 1, False), (rows, True)):
        costs = byte_model.step_costs(mqa, batch, np.array([0]))
        assert (costs.flops / RATES.flops >= costs.nbytes / RATES.bandwidth) == bound
    assert byte_model.compute_bound_from(mqa, Rates(1e9, 1e15), 4096) is None
    one, rising = np.full(6, 2.0), np.array([1.0, 1, 2, 3, 4, 5])
    assert byte_model.faster_from(one, rising) == 5  # sums of 10 and 11; 8 and 7 before
    assert byte_model.faster_from(rising, one + 9) == 1
    assert byte_model.faster_from(one, one) is None


def test_equal_steps_are_measured_once():
    assert byte_model.filled(MODELS["hawk"], 5000) == 0
    assert byte_model.filled(MODELS["mqa"], 5000) == 5000
    assert [byte_model.filled(MODELS["griffin"], n) for n in (5, 1023, 5000)] == [5, 1023, 1023]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_states_have_the_bytes_of_the_formulas_in_both_frameworks(name):
    from experiments.paper_speed.samplers import make_jax, make_torch

    config = SMALL[name]
    for make in (make_torch, make_jax):
        assert make(config, "cpu").state_bytes(20) == byte_model.formula_bytes(config, 20)
    assert byte_model.formula_bytes(config, 20) == cache_sizes(config, 20, 4).total


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("name", MODELS)
def test_a_filled_state_samples_like_one_that_has_read(framework, name):
    """No row outgrows its capacity, and the state moves on."""
    import torch

    from experiments.paper_speed.samplers import MAKERS, MOST_STEPS

    sampler = MAKERS[framework](SMALL[name], "cpu")
    with torch.inference_mode():
        tokens, state = sampler.begin(2, 20)
        for _ in range(MOST_STEPS):
            tokens, state = sampler.sample(tokens, state)
        assert np.asarray(state.rows.pos).tolist() == [20 + MOST_STEPS] * 2
        assert all(
            np.isfinite(np.asarray(leaf)).all() for layer in state.rows.layers for leaf in layer
        )
        assert int(sampler.compact(state).offset) == 0


def test_training_flops_are_three_times_those_of_reading():
    config = SMALL["mqa"]
    one = reading_flops(config, np.arange(16)) + 16 * logit_flops(config)
    assert training.step_flops(config, 16, 64) == 3 * 4 * one
    import torch

    x, w = torch.ones(4, 8, requires_grad=True), torch.ones(8, 3, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        (x @ w).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 4 * 8 * 3


# What is made of measurements


def made_up(models, wanted, over=1.1, mqa_over=1.1):
    """Measurements of three rounds, the second 1.1 times the model's, others around it."""
    steps = {}
    for framework in ("torch", "jax", "transformers"):
        for name in ("griffin",) if framework == "transformers" else models:
            for batch, context in wanted[name]:
                context = byte_model.filled(models[name], context)
                costs = byte_model.step_costs(models[name], batch, np.array([context]))
                seconds = (mqa_over if name == "mqa" else over) * costs.seconds(RATES)[0]
                slower = 2 if framework == "transformers" else 1
                steps[Point(framework, name, batch, context)] = (
                    slower * seconds * np.array([1.2, 1.0, 0.9])
                )
    longest = max(context for pairs in wanted.values() for _, context in pairs)
    states = {
        (framework, name): cache_sizes(models[name], longest, 4).total
        for framework in ("torch", "jax")
        for name in models
    }
    return Measured(models, steps, RATES, states, longest, {"x": "gone"}, "cpu", 2)


PROMPTS, SAMPLED, BATCHES = [0, 4096], [128, 2048, 16384], [1, 8, 16]


@pytest.fixture(scope="module")
def latencies():
    contexts = latency.contexts_to_measure(MODELS, PROMPTS, SAMPLED)
    assert contexts == [0, 128, 1023, 2048, 4096, 4224, 6144, 16384, 20480]
    wanted = dict.fromkeys(MODELS, [(b, n) for b in BATCHES for n in contexts])
    return latency.results(made_up(MODELS, wanted), PROMPTS, SAMPLED, BATCHES)


def test_latencies_are_sums_of_steps_beside_the_model(latencies):
    rows = [row for row in latencies["latencies"] if row["model"] == "mqa"]
    for row in rows:
        # One knot lies where products become longer than bytes; elsewhere lines are exact.
        assert row["seconds"] == pytest.approx(1.1 * row["modelled_seconds"], 0.02)
        assert row["slowest"] == pytest.approx(1.2 * row["seconds"])
        assert row["fastest"] == pytest.approx(0.9 * row["seconds"])
        assert row["mqa_over_seconds"] == 1
        assert row["of_bandwidth"] <= 1 / 1.08
        steps = row["bytes_per_step"] * row["sampled"]
        assert row["bandwidth"] == pytest.approx(steps / row["seconds"])
    keys = {(r["framework"], r["model"]) for r in latencies["latencies"]}
    assert ("transformers", "griffin") in keys and ("transformers", "hawk") not in keys


def test_crossings_are_told_for_the_short_side_too(latencies):
    at = {(r["framework"], r["model"], r["batch"], r["prompt"]): r for r in latencies["crossings"]}
    one = at["torch", "griffin", 8, 0]
    assert 1 < one["modelled_faster_from"] < 16384
    assert one["faster_from"] == pytest.approx(one["modelled_faster_from"], rel=0.05)
    assert at["torch", "griffin", 8, 4096]["faster_from"] == 1


def holds(found):
    return {claim.name: claim.holds for claim in found}


def test_claims_of_latency(latencies):
    found = claims.latency_claims(latencies)
    assert holds(found) == {"I1": "yes", "I2": "yes", "F1": "yes"}
    (second,) = (claim for claim in found if claim.name == "I2")
    assert second.found.startswith("batch 16") and "0.9" in second.found  # what favours MQA
    slow = json.loads(json.dumps(latencies))
    for row in slow["latencies"]:
        if row["model"] != "mqa":
            row["mqa_over_seconds"] = 0.5 if row["sampled"] == 16384 else 0.9
            row["seconds"] *= 3 if row["model"] == "hawk" else 1
    for step in slow["steps"]:
        step["seconds"] = [9 * seconds for seconds in step["seconds"]]
    slow["states"][0]["bytes"] += 1
    assert holds(claims.latency_claims(slow)) == {"I1": "no", "I2": "no", "F1": "in part"}


MEMORY = 2 * 10**9
LENGTHS = [512, 4096]


@pytest.fixture(scope="module")
def throughputs():
    wanted = {name: [] for name in MODELS}
    for length in LENGTHS:
        batches = throughput.largest_batches(MODELS, length, MEMORY)
        for name, points in wanted.items():
            for batch in throughput.batches_to_measure(batches, name):
                points += [(batch, n) for n in throughput.contexts_to_measure(MODELS, length)]
    return throughput.results(made_up(MODELS, wanted), MEMORY, LENGTHS)


def test_throughputs_have_the_largest_batches(throughputs):
    for row in throughputs["throughputs"]:
        config = MODELS[row["model"]]
        parts = row["weights"] + row["states"] + row["logits"]
        one = cache_sizes(config, row["sampled"], 4).total + 4 * config.vocab_size
        assert parts <= MEMORY < parts + one
        slower = 2 if row["framework"] == "transformers" else 1
        expected = row["modelled_tokens_per_second"] / 1.1 / slower
        assert row["tokens_per_second"] == pytest.approx(expected, 0.02)
        assert row["over_mqa"] == pytest.approx(row["modelled_over_mqa"] / slower, 0.02)
        assert row["bound_by"] == (
            "memory" if row["model"] == "mqa" and row["sampled"] > 600 else "products"
        )


def test_claims_of_throughput(throughputs):
    # Where products bound every model, a larger batch brings nothing: not the paper's claim.
    assert holds(claims.throughput_claims(throughputs))["I3"] == "in part"
    good = json.loads(json.dumps(throughputs))
    for row in good["throughputs"]:
        over = {"griffin": 4.0, "hawk": 9.0, "mqa": 1.0}[row["model"]]
        row |= {"over_mqa": over, "over_mqa_at_its_batch": 1.2}
    assert holds(claims.throughput_claims(good))["I3"] == "yes"
    assert "I1" in holds(claims.throughput_claims(good))


def training_results(factor):
    """Steps whose time, by width, model and length, is made up."""
    widths = training.make_widths([128, 256], layers=3, head_dim=64, vocab_size=50, visible_keys=64)
    seconds = {
        (width, name, length): [factor(width, name, length) * part for part in (1.0, 1.1, 0.9)]
        for width in widths
        for length in (256, 2048)
        for name in widths[width]
    }
    rates = {width: [1e9, 2e9, 3e9] for width in widths}
    return training._results(widths, 2048, "cpu", seconds, seconds, rates)


def test_claims_of_training():
    def as_in_the_paper(width, name, length):
        return 1.05 if name != "mqa" else 1 + (length - 256) / 1000 * 128 / width

    found = training_results(as_in_the_paper)
    row = found["steps"][0]
    assert (row["width"], row["length"], row["model"]) == (128, 256, "griffin")
    assert row["over_mqa"] == pytest.approx(1.05)
    assert row["of_products"] == pytest.approx(row["flops"] / 1.05 / 2e9)
    verdicts = holds(claims.training_claims(found))
    assert verdicts == dict.fromkeys(("T1", "T2", "T3", "T4", "I4"), "yes")

    def the_other_way(width, name, length):
        return 1.0 if name == "mqa" else length / 128

    verdicts = holds(claims.training_claims(training_results(the_other_way)))
    assert verdicts == {"T1": "no", "T2": "no", "T3": "no", "T4": "yes", "I4": "yes"}


def test_flop_table_of_the_paper_sizes():
    rows = {row["size"]: row for row in training.presets()}
    assert rows["7b"]["parameters"]["mqa"] == parameter_count(PRESETS["mqa-6b"])
    over = rows["7b"]["flops_over_mqa"]
    assert over[0] > 1 and over == sorted(over, reverse=True)


@pytest.mark.slow
def test_tables_and_figures(latencies, throughputs, tmp_path):
    trained = training_results(lambda width, name, length: 1.0)
    for found, judge, show, draw in (
        (latencies, claims.latency_claims, tables.print_latency, figures.draw_latency),
        (throughputs, claims.throughput_claims, tables.print_throughput, figures.draw_throughput),
        (trained, claims.training_claims, tables.print_training, figures.draw_training),
    ):
        out = io.StringIO()
        show(Console(width=170, file=out), found, judge(found))
        text = out.getvalue()
        assert "the paper's claims, here" in text and "…" not in text
        for path in draw(found, tmp_path):
            assert path.stat().st_size and path.with_suffix(".svg").stat().st_size
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {
        *(f"latency_batch_{batch}.png" for batch in BATCHES),
        "latency_steps.png",
        "throughput.png",
        "training.png",
    }


# The commands


class Fake:
    """A process of which only what it is asked is known."""

    asked = []

    def __init__(self, module, framework, config, device, environment):
        self.framework = framework

    def ask(self, do, **request):
        if do == "load" and self.framework == "transformers":
            raise Absent("transformers not installed")
        Fake.asked.append((self.framework, do))
        return {"reading": {"a": 1.0, "b": 3.0}, "products": {"a": 2.0}, "steps": 0.5}.get(do, 7)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


def test_every_point_is_measured_in_every_round(monkeypatch):
    monkeypatch.setattr(decoding, "Job", Fake)
    said = []
    measured = decoding.measure(
        MODELS,
        ["torch", "jax"],
        {"griffin": [(1, 9), (1, 5000)], "hawk": [(1, 9), (1, 5000)], "mqa": [(2, 9)]},
        steps=4,
        rounds=3,
        device="cpu",
        say=said.append,
    )
    expected = {("griffin", 1, 9), ("griffin", 1, 1023), ("hawk", 1, 0), ("mqa", 2, 9)}
    assert set(measured.steps) == {
        Point(framework, *point) for framework in ("torch", "jax") for point in expected
    }
    assert all(len(seconds) == 3 for seconds in measured.steps.values())
    assert measured.rates == Rates(3.0, 2.0) and measured.longest == 5000
    assert measured.absent == {"transformers": "transformers not installed"} and said
    steps = [framework for framework, do in Fake.asked if do == "steps"]
    assert steps[:4] == ["torch", "jax", "torch", "jax"]  # in turn


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["latency", "--batches", "1,x"], "--batches '1,x': expected numbers of rows"),
        (["latency", "--batches", "1000"], "--memory 4GB holds 30 rows of 20480 tokens"),
        (["latency", "--prompts", "-1"], "--prompts '-1'"),
        (["latency", "--sampled", "0"], "--sampled '0'"),
        (["latency", "--frameworks", "torhc"], "unknown framework 'torhc'"),
        (["throughput", "--memory", "1MB"], "--memory 1MB is too little for griffin"),
        (["throughput", "--memory", "many"], "--memory 'many'"),
        (["throughput", "--width", "30"], "num_heads (4) must divide width (30)"),
        (["training", "--lengths", "300"], "--lengths 300: expected lengths that divide"),
        (["training", "--widths", "100"], "--widths 100: expected multiples of --head-dim 128"),
        (["training", "--widths", "a"], "--widths 'a'"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_measured(arguments, said):
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(result.exception, ArgumentError) and said in str(result.exception)


def test_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["bench", "training", "--output", str(tmp_path / "file")])
    assert isinstance(result.exception, ArgumentError)
    assert "is a file: expected a folder" in str(result.exception)


def test_a_measurement_that_fails_is_one_line(monkeypatch):
    def measure(*arguments, **options):
        raise Failed("no memory is left")

    monkeypatch.setattr(decoding, "measure", measure)
    result = CliRunner().invoke(app, ["bench", "throughput"])
    assert result.exit_code == 1
    assert result.stderr == "a measurement failed: no memory is left\n"


TINY = ["--layers", "3", "--vocab", "64", "--visible-keys", "16", "--rounds", "1"]


def run(*arguments):
    command = [COMMAND, "bench", *arguments, *TINY]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_latency_and_throughput_are_measured(tmp_path):
    sizes = ["--width", "32", "--heads", "2", "--steps", "2", "--sampled", "8,32"]
    done = run("latency", *sizes, "--prompts", "0,8", "--batches", "1,largest", "--memory", "2MB")
    assert done.returncode == 0, done.stderr
    assert "transformers" in done.stdout and not done.stderr
    done = run("throughput", *sizes, "--memory", "500KB", "--json", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert done.stderr == f"{tmp_path / 'throughput.png'}\n"
    assert {claim["name"] for claim in found["claims"]} == {"I1", "I3"}
    assert all(row["tokens_per_second"] > 0 for row in found["throughputs"])
    frameworks = {row["framework"] for row in found["throughputs"]}
    assert frameworks == {"torch", "jax", "transformers"} and found["absent"] == {}


@pytest.mark.slow
def test_training_is_measured():
    done = run(
        "training", "--widths", "32", "--head-dim", "16", "--lengths", "16,64", "--tokens", "64"
    )
    assert done.returncode == 0, done.stderr
    assert "I4" in done.stdout and not done.stderr


@pytest.mark.slow
def test_a_device_that_is_not_there_is_named():
    done = run(
        "latency", "--width", "32", "--heads", "2", "--device", "tpu", "--frameworks", "torch"
    )
    assert done.returncode == 2 and done.stderr.startswith("griffin-eval: ")
    assert len(done.stderr.splitlines()) == 1
