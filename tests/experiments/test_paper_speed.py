"""`experiments.paper_speed`: the byte model, results of made-up measurements, claims, commands."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.model_flops import logit_flops, reading_flops
from experiments.paper_speed import (
    byte_model,
    claims,
    figures,
    sampling,
    training,
)
from experiments.paper_speed.__main__ import app, table_of
from experiments.paper_speed.byte_model import Rates
from experiments.paper_speed.decoding import Measured, Point
from experiments.paper_speed.models import SMALL, TINY, make_models
from griffin_eval.analysis.cache_sizes import cache_sizes, parameter_bytes
from griffin_eval.errors import ArgumentError

MODELS, SMALLEST = make_models(SMALL), make_models(TINY._replace(visible_keys=8))
RATES = Rates(40e9, 300e9)


@pytest.mark.parametrize("name", SMALLEST)
def test_costs_are_those_of_cache_sizes_and_flops_at_every_context(name):
    config, contexts = SMALLEST[name], np.arange(30)
    costs = byte_model.step_costs(config, 3, contexts)
    nbytes = [parameter_bytes(config, 4) + 3 * cache_sizes(config, n, 4).total for n in contexts]
    flops = [3 * (reading_flops(config, np.array([n])) + logit_flops(config)) for n in contexts]
    np.testing.assert_allclose(costs.nbytes, nbytes, rtol=1e-12)
    np.testing.assert_allclose(costs.flops, flops, rtol=1e-12)
    seconds = costs.seconds(Rates(1e6, 1e7))
    np.testing.assert_allclose(seconds, np.maximum(costs.nbytes / 1e6, costs.flops / 1e7))
    total = byte_model.sampling_seconds(config, Rates(1e6, 1e7), 3, 5, 20)
    assert total == pytest.approx(seconds[5:25].sum())
    assert byte_model.formula_bytes(config, 20) == cache_sizes(config, 20, 4).total


def test_bounds_of_batches_and_contexts():
    memory = 10**9
    for name, batch in byte_model.largest_batches(MODELS, 4096, memory).items():
        row = cache_sizes(MODELS[name], 4096, 4).total + 4 * SMALL.vocab_size
        left = memory - parameter_bytes(MODELS[name], 4)
        assert batch * row <= left < (batch + 1) * row
    mqa = MODELS["mqa"]
    tokens = byte_model.cache_bound_from(mqa, 8)
    sizes = [8 * cache_sizes(mqa, n, 4).total for n in (tokens - 1, tokens)]
    assert sizes[0] < parameter_bytes(mqa, 4) <= sizes[1]
    assert byte_model.cache_bound_from(MODELS["hawk"], 8) is None
    rows = byte_model.compute_bound_from(mqa, RATES)
    for batch, bound in ((rows - 1, False), (rows, True)):
        costs = byte_model.step_costs(mqa, batch, np.array([0]))
        assert (costs.flops / RATES.flops >= costs.nbytes / RATES.bandwidth) == bound
    # Steps with equally full caches are measured once.
    filled = [byte_model.filled(MODELS[name], 5000) for name in ("griffin", "hawk", "mqa")]
    assert filled == [1023, 0, 5000]


def made_up(points, over=1.1):
    """Return measurements of three rounds, the second ``over`` times the byte model."""
    steps = {}
    for framework in ("torch", "jax", "transformers"):
        for name in ("griffin",) if framework == "transformers" else MODELS:
            for batch, context in points[name]:
                context = byte_model.filled(MODELS[name], context)
                costs = byte_model.step_costs(MODELS[name], batch, np.array([context]))
                seconds = over * costs.seconds(RATES)[0] * (1 + (framework == "transformers"))
                point = Point(framework, name, batch, context)
                steps[point] = seconds * np.array([1.2, 1.0, 0.9])
    longest = max(context for pairs in points.values() for _, context in pairs)
    states = {
        (framework, name): cache_sizes(config, longest, 4).total
        for framework in ("torch", "jax")
        for name, config in MODELS.items()
    }
    return Measured(MODELS, steps, RATES, states, longest, "cpu")


@pytest.fixture(scope="module")
def latencies():
    prompts, sampled, batches = [0, 4096], [128, 2048, 16384], [1, 16]
    contexts = sampling.latency_contexts(MODELS, prompts, sampled)
    assert contexts == [0, 128, 1023, 2048, 4096, 4224, 6144, 16384, 20480]
    points = dict.fromkeys(MODELS, [(batch, n) for batch in batches for n in contexts])
    return sampling.latency_results(made_up(points), prompts, sampled, batches)


def test_latencies_are_sums_of_steps_beside_the_model(latencies):
    for row in latencies["latencies"]:
        slower = 2.2 if row["framework"] == "transformers" else 1.1
        # One knot lies where products take longer than bytes; elsewhere lines are exact.
        seconds = slower * row["modelled_seconds"] * np.array([1.2, 1.0, 0.9])
        assert row["seconds"] == pytest.approx(seconds, 0.02)
    runners = {(row["framework"], row["model"]) for row in latencies["latencies"]}
    assert ("transformers", "griffin") in runners and ("transformers", "hawk") not in runners


@pytest.fixture(scope="module")
def throughputs():
    points = sampling.throughput_points(MODELS, [512, 4096], 2 * 10**9)
    return sampling.throughput_results(made_up(points), 2 * 10**9, [512, 4096])


def test_throughputs_are_those_of_the_model(throughputs):
    for row in throughputs["throughputs"]:
        slower = 2 if row["framework"] == "transformers" else 1
        expected = row["modelled_tokens_per_second"] / 1.1 / slower
        assert np.median(row["tokens_per_second"]) == pytest.approx(expected, 0.02)
        assert row["over_mqa"] == pytest.approx(row["modelled_over_mqa"] / slower, 0.02)


def trained(step):
    """Return results of training steps with made-up times from ``step(width, model, length)``."""
    widths = {width: make_models(TINY._replace(width=width, head_dim=64)) for width in (128, 256)}
    seconds = {
        (width, name, length): [step(width, name, length) * part for part in (1.0, 1.1, 0.9)]
        for width, models in widths.items()
        for length in (256, 2048)
        for name in models
    }
    rates = {width: [1e9, 2e9, 3e9] for width in widths}
    made = training.results(widths, 2048, seconds, seconds, rates)
    return {"device": "cpu", "threads": 2} | made


def as_in_the_paper(width, name, length):
    return 1.05 if name != "mqa" else 1 + (length - 256) / 1000 * 128 / width


def the_other_way(width, name, length):
    return 1.0 if name == "mqa" else length / 128


def test_claims_hold_or_not(latencies, throughputs):
    def verdicts(kind, findings):
        return {claim.name: claim.holds for claim in claims.JUDGES[kind](findings)}

    assert verdicts("latency", latencies) == {"I1": "yes", "I2": "yes", "F1": "yes"}
    slow = json.loads(json.dumps(latencies))
    for row in slow["latencies"]:
        long = 0.2 if row["model"] == "hawk" else 0.5
        row["mqa_over_seconds"] = long if row["sampled"] == 16384 else 0.9
    for step in slow["steps"]:
        step["seconds"] = [9 * seconds for seconds in step["seconds"]]
    slow["states"][0]["bytes"] += 1
    assert verdicts("latency", slow) == {"I1": "no", "I2": "no", "F1": "in part"}
    # A step of each of these models is limited by its matrix products, so that a larger batch
    # gains nothing. In the paper it does.
    assert verdicts("throughput", throughputs)["I3"] == "in part"
    good = json.loads(json.dumps(throughputs))
    for row in good["throughputs"]:
        over = {"griffin": 4.0, "hawk": 9.0, "mqa": 1.0}[row["model"]]
        row |= {"over_mqa": over, "over_mqa_at_its_batch": 1.2}
    assert verdicts("throughput", good)["I3"] == "yes"
    all_hold = dict.fromkeys(("T1", "T2", "T3", "I4"), "yes")
    assert verdicts("training", trained(as_in_the_paper)) == all_hold
    others = {"T1": "no", "T2": "no", "T3": "no"}
    assert verdicts("training", trained(the_other_way)) == all_hold | others


def test_training_is_compared_with_products_and_mqa():
    row = trained(as_in_the_paper)["steps"][0]
    assert (row["width"], row["length"], row["model"]) == (128, 256, "griffin")
    assert row["over_mqa"] == pytest.approx(1.05)
    assert row["of_products"] == pytest.approx(row["flops"] / 1.05 / 2e9)


def test_tables_and_figures(latencies, throughputs, tmp_path, capsys):
    results = {"latency": ("latencies", latencies), "throughput": ("throughputs", throughputs)}
    results["training"] = ("steps", trained(as_in_the_paper))
    for kind, (rows, findings) in results.items():
        judged = [claim._asdict() for claim in claims.JUDGES[kind](findings)]
        table_of(kind, rows, findings | {"claims": judged}).show(False)
        printed = capsys.readouterr().out
        assert printed.count("claim ") == len(judged) and "…" not in printed
        for path in figures.PAINTERS[kind](findings, tmp_path):
            assert path.stat().st_size and path.with_suffix(".svg").stat().st_size
    names = ("latency_batch_1", "latency_batch_16", "throughput", "training")
    assert {path.stem for path in tmp_path.glob("*.png")} == set(names)


def test_bad_arguments_are_named_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    for arguments, message in (
        (["throughput", "--memory", "1MB"], "--memory 1MB is too little for griffin"),
        (["latency", "--memory", "many"], "--memory 'many'"),
        (["training", "--lengths", "300"], "expected lengths that divide 8192"),
        (["training", "--widths", "100"], "--widths 100: expected multiples of 128"),
        (["latency", "--output", str(tmp_path / "file")], "is a file: expected a folder"),
    ):
        done = CliRunner().invoke(app, arguments)
        assert isinstance(done.exception, ArgumentError) and message in str(done.exception)


@pytest.mark.slow
def test_commands_measure_in_both_frameworks():
    """The states of the twins have the bytes of the formulas, and the peer is measured too."""

    def run(*arguments):
        done = CliRunner().invoke(app, [*arguments, "--tiny", "--rounds", "1", "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    findings = run("latency")
    assert {row["framework"] for row in findings["steps"]} == {"torch", "jax", "transformers"}
    assert len(findings["states"]) == 6
    assert all(state["bytes"] == state["formula_bytes"] for state in findings["states"])
    findings = run("throughput", "--frameworks", "jax")
    assert {claim["name"] for claim in findings["claims"]} == {"I1", "I3"}
    findings = run("training")
    assert {row["length"] for row in findings["steps"]} == {16, 64}
