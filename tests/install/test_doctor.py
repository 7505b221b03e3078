"""`griffin-eval doctor`: its facts and exit code, also without a framework."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from slow import slow
from typer.testing import CliRunner

from griffin_eval import doctor
from griffin_eval.cli.main import app
from griffin_eval.kernels.cpu import compiled


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_dtype_has_a_kernel_and_a_reason(framework):
    found = list(doctor.kernels(framework))
    for operator in ("RG-LRU", "attention"):
        dtypes = [
            dtype for kernel in found if kernel.operator == operator for dtype in kernel.dtypes
        ]
        assert sorted(dtypes) == sorted(doctor.DTYPES)
    if compiled.library() is None:
        assert all(kernel.name == "plain" for kernel in found)
        return
    reasons = {(kernel.operator, d): kernel for kernel in found for d in kernel.dtypes}
    assert reasons["RG-LRU", "float64"].name == "plain"
    assert "float16, not this dtype" in reasons["RG-LRU", "float64"].reasons
    assert reasons["RG-LRU", "float32"] == doctor.Kernel(
        framework,
        "RG-LRU",
        ("float32", "bfloat16", "float16"),
        "cpu",
        "the first choice on cpu",
    )


@pytest.mark.parametrize("framework", ["torch", slow("jax")])
def test_kernels_pass_their_self_test(framework, monkeypatch):
    tests = {test.name: test for test in doctor.self_tests(framework)}
    assert all(test.passed for test in tests.values()), tests
    assert len(tests) == 5
    monkeypatch.setattr(doctor, "_rglru_error", lambda framework, dtype: float("nan"))
    monkeypatch.setattr(doctor, "_model_error", lambda framework: 1 / 0)
    assert not any(test.passed for test in doctor.self_tests(framework))


def test_caches_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    folder = tmp_path / "griffin_eval" / "programs" / "one"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"123")
    cache = {cache.holds: cache for cache in doctor.caches()}["programs of models in JAX"]
    assert (cache.entries, cache.nbytes) == (1, 3) and cache.folder == folder.parent
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "chosen"))
    assert doctor.caches()[0].folder == tmp_path / "chosen"


def test_a_failed_self_test_is_said_and_ends_with_1(monkeypatch):
    monkeypatch.setattr(doctor, "frameworks", lambda: ["torch"])
    monkeypatch.setattr(doctor, "kernels", lambda framework: [])
    tests = [doctor.SelfTest("one", True, ""), doctor.SelfTest("other", False, "off by a lot")]
    monkeypatch.setattr(doctor, "self_tests", lambda framework: tests)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    printed = CliRunner().invoke(app, ["doctor", "--json"])
    assert printed.exit_code == 1
    facts = json.loads(printed.stdout)
    assert [test["passed"] for test in facts["self_tests"]] == [True, False]
    assert facts["versions"]["numpy"] == np.__version__ and facts["caches"]
    assert "1 of 2 passed" in result.stdout and "FAILED: other: off by a lot" in result.stdout


def test_checkpoints_as_json():
    listed = json.loads(CliRunner().invoke(app, ["checkpoints", "--json"]).stdout)
    assert all(Path(one["path"]).is_dir() and one["scores"] for one in listed)
    (one,) = json.loads(CliRunner().invoke(app, ["checkpoints", "bytes_griffin", "--json"]).stdout)
    assert one in listed


@pytest.mark.parametrize("broken", [slow(["torch"]), ["torch", "jax"]])
def test_frameworks_may_be_missing(tmp_path, broken):
    for name in broken:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('it is broken')\n")
    command = [Path(sys.executable).with_name("griffin-eval"), "doctor"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in broken:
        assert f"{name} cannot be imported: RuntimeError: it is broken" in done.stdout
    count = 5 * (2 - len(broken))
    assert f"self-test: {count} of {count} passed" in done.stdout
    assert "downloads from the hub" in done.stdout
