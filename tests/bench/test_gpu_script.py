"""The measurements for a GPU, rehearsed on a CPU with tiny sizes."""

import json
import os
import subprocess
import sys
import time

import pytest
from benchmark import ROOT

from benchmarks import gpu


def rehearse(run, output, seconds):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), run, "--output", str(output)]
    command += ["--device", "cpu", "--tiny", "--seconds", str(seconds)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())["measurements"]
    assert found.keys() == gpu.RUNS[run].keys()
    assert {name: each["error"] for name, each in found.items()} == dict.fromkeys(found)
    return {name: each["figures"] for name, each in found.items()}


@pytest.mark.slow
def test_the_model_is_measured(tmp_path):
    found = rehearse("a", tmp_path / "a.json", 3000)
    assert {"torch", "transformers"} <= found["versions"].keys()
    for rows in ("1 rows", "3 rows"):
        profile = found["profile of decoding"][rows]
        assert profile["kernels"] > 0 and profile["busy_us"] > 0 and profile["kernels_by_time"]
    assert len(found["kernels"]) == 4
    table = found["beside transformers"]
    assert table.keys() == {"reading 64", "reading 8 x 16", "decoding 1", "decoding 3"}
    assert all(each.keys() == {"griffin", "transformers"} for each in table.values())
    assert found["GPU tests"]["exit_code"] == 0


def test_a_measurement_that_fails_or_hangs_does_not_end_the_run(tmp_path, monkeypatch):
    def fails(settings, report):
        report("before", 1)
        raise ValueError("it is broken")

    def dies(settings, report):
        os._exit(7)

    def hangs(settings, report):
        report("before", 2)
        time.sleep(1000)

    def works(settings, report):
        report("device", settings.device)

    steps = {"fails": (fails, 60), "dies": (dies, 60), "hangs": (hangs, 2), "works": (works, 60)}
    monkeypatch.setitem(gpu.RUNS, "a", steps)
    file = tmp_path / "out.json"
    gpu.run("a", gpu.Settings("cpu", tiny=True), file, gpu.SECONDS)
    found = json.loads(file.read_text())["measurements"]
    assert {name: (each["figures"], each["error"]) for name, each in found.items()} == {
        "fails": ({"before": 1}, "ValueError: it is broken"),
        "dies": ({}, "its process ended with exit code 7"),
        "hangs": ({"before": 2}, "cut off, since its time was up"),
        "works": ({"device": "cpu"}, None),
    }
    assert list(tmp_path.iterdir()) == [file]
