"""The benchmark of the model: figures from measurements, and a small real run."""

import json
import sys

import numpy as np
import pytest
from benchmark import benchmark

from benchmarks.model.run import make_config
from benchmarks.random_checkpoint import write_weights
from griffin_eval.converters.checkpoint import Checkpoint

CONFIG = make_config(width=32, layers=3, heads=2, vocab_size=50, visible_keys=8)
SIZES = ("--width", 64, "--layers", 3, "--vocab", 300, "--visible-keys", 16, "--tokens", 70)
SIZES += ("--batches", "1,3", "--steps", 2, "--rounds", 1)


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
    """Two equal ``--python`` interpreters are measured separately."""
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
