"""Peers that are not installed, or are but do not work, are left out of the benchmarks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.peers import why_absent

COMMAND = str(Path(sys.executable).with_name("griffin-eval"))
BROKEN = "cannot be imported: AttributeError: it is broken"
# Smallest shapes of `bench scan`, on the CPU and for a TPU.
SMALL = ["--lengths", "40", "--width", "32", "--gates", "2", "--rounds", "1"]
SMALL_TPU = ["--target", "v5e", "--lengths", "1024", "--width", "256", "--gates", "2"]


@pytest.fixture
def broken(tmp_path):
    """Makes libraries that cannot be imported; gives an environment in which they are found."""

    def make(*names):
        for name in names:
            (tmp_path / name).mkdir()
            text = "raise AttributeError('it is broken')\n"
            (tmp_path / name / "__init__.py").write_text(text)
        return {"PYTHONPATH": str(tmp_path)}

    return make


def bench(*arguments, **environment):
    return subprocess.run(
        [COMMAND, "bench", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


def test_the_reason_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken_peer.py").write_text("raise AttributeError('it is broken\\nby much')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert why_absent("json", "os.path") is None
    assert why_absent("broken_peer") == f"broken_peer {BROKEN}"
    assert why_absent("json", "no_peer.part", "no_other") == "no_peer and no_other not installed"
    assert why_absent("json.no_part").startswith("json.no_part cannot be imported: ModuleNotFound")


@pytest.mark.slow
def test_scan_on_the_cpu_without_peers(broken):
    done = bench("scan", *SMALL, "--json", **broken("recurrentgemma"))
    assert done.returncode == 0, done.stderr
    names = {row["implementation"] for row in json.loads(done.stdout) if row["operation"] == "scan"}
    assert "griffin, torch" in names and "transformers" in names
    assert not any("DeepMind" in name for name in names)
    for name, module in (
        ("torch", "recurrentgemma.torch.layers"),
        ("JAX", "recurrentgemma.jax.scan"),
    ):
        assert f"DeepMind, {name} is left out: {module} {BROKEN}" in done.stderr


@pytest.mark.slow
def test_scan_for_a_tpu():
    """Every row of the table has its figures, DeepMind's kernel, which has no name, as well."""
    done = bench("scan", *SMALL_TPU, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert not [row["error"] for row in rows if row["error"]]
    scans = {row["implementation"] for row in rows if row["what"] == "scan"}
    assert scans == {"griffin", "DeepMind", "lax.scan", "associative_scan, T = 1024"}
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    for row in rows:
        if row["implementation"] in ("griffin", "DeepMind") and "attention" not in row["what"]:
            assert row["cycles"] > 0 and row["bundles_per_tile"] > 0 and row["hbm_over_ideal"] > 0


@pytest.mark.slow
def test_scan_for_a_tpu_without_deepminds_package(broken):
    done = bench("scan", *SMALL_TPU, **broken("recurrentgemma"))
    assert done.returncode == 0, done.stderr
    assert "RG-LRU and gradient" in done.stdout and done.stdout.count("DeepMind") == 1
    assert f"associative_scan is left out: recurrentgemma.jax.scan {BROKEN}" in done.stdout


@pytest.mark.slow
def test_model_without_a_peer(broken):
    done = bench(
        *("model", "--width", 64, "--vocab", 300, "--visible-keys", 16, "--tokens", 70),
        *("--layers", 3, "--batches", 1, "--steps", 2, "--rounds", 1),
        *("--implementations", "torch,transformers"),
        **broken("transformers"),
    )
    assert done.returncode == 0, done.stderr
    assert "transformers is left out: transformers.models" in done.stdout
    assert BROKEN in done.stdout and "griffin torch" in done.stdout


@pytest.mark.slow
def test_eval_without_hf(broken):
    done = bench(
        *("eval", "--rounds", 1, "--lengths", 0, "--frameworks", "torch"),
        *("--tasks", "griffin_pydoc_choice:2:0"),
        **broken("accelerate"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"hf is left out: accelerate {BROKEN}" in done.stdout
    assert "griffin_pydoc_choice" in done.stdout


@pytest.mark.slow
def test_convert_without_a_peer(broken, tmp_path):
    environment = broken("transformers")
    done = bench("convert", tmp_path / "model", "--preset", "griffin-100m", "--rounds", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [line for line in done.stdout.splitlines() if "left out" in line]
    code = (
        "from pathlib import Path\n"
        "from benchmarks.convert import run as c\n"
        "c.PEERS = (c.Route('griffin', 'griffin', 'theirs', 'save_with_transformers'),)\n"
        "from rich.console import Console\n"
        f"c.run(Console(width=140), 'griffin-100m', Path({str(tmp_path / 'model')!r}), 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    assert "theirs is left out: transformers.models" in done.stdout and BROKEN in done.stdout
