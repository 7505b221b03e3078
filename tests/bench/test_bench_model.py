"""The benchmark of the model: what it makes of measurements, and a small real run."""

import json
import sys

import numpy as np
import pytest
from benchmark import benchmark

from benchmarks.commands import Interpreter
from benchmarks.model import run
from benchmarks.model.run import Bench, make_config
from benchmarks.model_flops import logit_flops, reading_flops
from benchmarks.peers import Absent
from benchmarks.random_checkpoint import write_weights
from benchmarks.report import Report
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.layout import param_specs, parameter_count

CONFIG = make_config(width=32, layers=3, heads=2, vocab_size=50, visible_keys=8)
TOKENS = 20
READ = {"torch": 2.0, "jax": 6.0, "transformers": 10.0}  # seconds
SIZES = ("--width", 64, "--layers", 3, "--vocab", 300, "--visible-keys", 16, "--tokens", 70)
SIZES += ("--batches", "1,3", "--steps", 2, "--rounds", 1)


class Fake:
    """An implementation whose measurements are made up."""

    def __init__(self, module, name, folder, dtype, environment, python):
        self.name = name

    def ask(self, do, **request):
        if do == "load" and self.name not in READ:
            raise Absent("no.such not installed")
        if do == "check":
            logits = np.zeros((2, 50))
            logits[0, 0] = 4.0 + {"torch": 4e-5, "jax": 8e-4}.get(self.name, 0.0)
            np.savez(request["path"], **{"prefill": logits, "decode, batch 3": logits[:1]})
        if do == "read":
            return READ[self.name] if not request["every"] else 5.0
        if do == "decode":
            return 0.5 * request["batch"]
        return {"products": 2e6 if self.name == "torch" else 1e6, "bandwidth": 1e5}.get(do)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


def measure(monkeypatch, dtype):
    monkeypatch.setattr(run, "Job", Fake)
    names = [*READ, "deepmind-jax"]
    pythons = [Interpreter("", sys.executable)]
    report = Report()
    agree = Bench(CONFIG, TOKENS, [1, 3, 900], 7, names, dtype, pythons).run(3, report)
    (rows,) = report.tables.values()
    return {(row["workload"], row["implementation"]): row for row in rows}, report.notes, agree


def test_speeds_stand_beside_limits_and_peers(monkeypatch):
    rows, notes, agree = measure(monkeypatch, "float32")
    row = rows["prefill", "griffin torch"]
    assert row["tokens/s"] == [TOKENS / 2] * 3 and row["over transformers"] == [5.0] * 3
    flops = reading_flops(CONFIG, np.arange(TOKENS))
    assert row["of roofline"] == pytest.approx([(flops + logit_flops(CONFIG)) / 2e6 / 2.0] * 3)
    # Of few rows the bytes take longer, of many the products.
    weights = 4 * parameter_count(CONFIG)
    one = reading_flops(CONFIG, np.array([CONFIG.visible_keys - 1])) + logit_flops(CONFIG)
    few, many = (rows[f"decode, batch {n}", "griffin jax"]["of roofline"][0] for n in (3, 900))
    assert few == pytest.approx(weights / 1e5 / 1.5) and many == pytest.approx(one / 1e6)
    assert "deepmind-jax is left out: no.such not installed" in notes
    # A logit of JAX is off by 2e-4 of the largest.
    assert not agree and "do NOT agree" in notes[-1]


def test_half_the_bytes_of_a_weight_are_half_the_limit(monkeypatch):
    rows, _, agree = measure(monkeypatch, "bfloat16")
    wide = sum(s.size for s in param_specs(CONFIG).values() if s.keep_float32)
    bytes_read = 2 * parameter_count(CONFIG) + 2 * wide
    found = rows["decode, batch 1", "griffin jax"]["of roofline"][0]
    assert found == pytest.approx(bytes_read / 1e5 / 0.5) and agree


def test_every_part_of_the_random_checkpoint_matters(tmp_path):
    write_weights(CONFIG, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.config == CONFIG
    assert all(np.abs(checkpoint.numpy(name)).min() > 0 for name in checkpoint.dtypes)


@pytest.mark.slow
def test_bad_arguments_end_with_one_sentence():
    for arguments, said in (
        (["--batches", "1,0"], "--batches '1,0'"),
        (["--implementations", "torhc"], "unknown implementation 'torhc'"),
        (["--implementations", "transformers"], "limits need one of ours"),
        (["--width", 30, "--heads", 4], "num_heads (4) must divide width (30)"),
    ):
        done = benchmark("model", *arguments)
        assert done.returncode == 2 and said in done.stderr, arguments
        assert done.stderr.count("\n") == 1 and not done.stdout, arguments


@pytest.mark.slow
def test_every_implementation_runs_and_their_logits_agree():
    """Two interpreters that are the same are measured apart."""
    pythons = ("--python", sys.executable) * 2
    done = benchmark("model", *SIZES, *pythons, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    (rows,) = found["tables"].values()
    works = ["prefill", "prefill, all logits", "decode, batch 1", "decode, batch 3"]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    assert [(row["workload"], row["implementation"]) for row in rows] == [
        (work, name) for work in works for name in names
    ]
    ours = {name.rpartition(" ")[0] for name in names[:4]}
    assert len(names) == 7 and len(ours) == 4
    assert names[4:] == ["transformers", "deepmind-torch", "deepmind-jax"]
    assert all(row["of roofline"][0] > 0 and row["tokens/s"][0] > 0 for row in rows)
    assert found["notes"][-1] == "the logits agree within 5e-05 of the largest"


@pytest.mark.slow
def test_a_broken_peer_is_left_out(tmp_path):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise AttributeError('it is broken')\n")
    names = ("--implementations", "torch,transformers")
    done = benchmark("model", *SIZES, *names, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "transformers is left out: transformers.models" in done.stdout
    assert "AttributeError: it is broken" in done.stdout and "griffin torch" in done.stdout
