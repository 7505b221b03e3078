"""A few kills and short soaks; `make kills`, `make soak` and `make soak-serve` run for hours."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(script: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(HERE)},
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_runs_that_are_ended_at_random_times_go_on(framework):
    done = run("kills.py", "--framework", framework, "--count", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout


@pytest.mark.slow
def test_flipped_bits_are_silent_in_other_libraries_and_not_here():
    done = run("flips.py", "--count", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in done.stdout.splitlines()[2:]]
    assert len(rows) == 9
    for name, reader, count, refused, without, silent in rows:
        assert int(refused) + int(without) + int(silent) == int(count) == 20, name
        assert reader != "griffin-eval" or silent == "0"
    assert any(int(row[-1]) for row in rows)


@pytest.mark.slow
def test_many_clients_of_one_server_lose_nothing(tmp_path):
    """Three minutes are too short for the sixth check, which is about growing memory."""
    done = run(
        "soak_serve.py",
        *("--minutes", "3", "--clients", "50", "--fill", "0", "--out", str(tmp_path)),
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 8, done.stdout + done.stderr
    assert all(line.startswith("ok: ") for line in (*lines[:5], *lines[6:])), done.stdout


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", HERE / "soak.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def samples(soak, memory=0.0, files=0.0, threads=0.0):
    """Return an hour of samples with growth per hour, noise, and one peak of memory."""
    noise = [0, 3e6, -2e6, 1e6, 5e6, -4e6]
    return [
        soak.Sample(
            60.0 * i,
            int(5e8 + memory * i / 60 + noise[i % 6] + 2e8 * (i == 40)),
            round(8 + files * i / 60),
            round(2 + threads * i / 60),
        )
        for i in range(61)
    ]


def test_what_is_flat_is_not_called_growing(soak):
    line, flat = soak.verdict(samples(soak))
    assert flat and line.endswith("flat")


@pytest.mark.parametrize("leak", [{"memory": 60e6}, {"files": 20}, {"threads": 20}])
def test_what_grows_is_called_so(soak, leak):
    line, flat = soak.verdict(samples(soak, **leak))
    assert not flat and line.endswith("GROWS")


def test_a_few_cycles_tell_nothing(soak):
    assert not soak.verdict(samples(soak)[:3])[1]
