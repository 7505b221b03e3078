"""``python -m benchmarks.scan`` on the CPU and for a TPU, with peers and without."""

import json

import pytest
from benchmark import benchmark

SMALL = ["--lengths", "40,9", "--width", "32", "--gates", "2", "--rounds", "2"]
SMALL_TPU = ["--target", "v5e", "--lengths", "1024", "--width", "256", "--gates", "2"]
OURS = ["griffin, torch", "griffin, torch, plain", "griffin, JAX", "griffin, JAX, plain"]
THEIRS = ["lax.associative_scan", "transformers", "DeepMind, torch", "DeepMind, JAX"]


@pytest.mark.slow
def test_every_implementation_is_timed_and_put_over_what_it_says():
    done = benchmark("scan", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    timed = {(row["operation"], row["tokens"], row["implementation"]): row for row in rows}
    assert len(timed) == len(rows)
    assert all(row["fastest"] <= row["seconds"] <= row["slowest"] for row in rows)
    for tokens in (40, 9):
        names = {name for operation, n, name in timed if operation == "scan" and n == tokens}
        assert names == {*OURS, *THEIRS}
        limit = timed["limit", tokens, "sum"]["seconds"]
        for framework in ("torch", "JAX"):
            scan = timed["scan", tokens, f"griffin, {framework}"]
            assert scan["ratio"] == pytest.approx(scan["seconds"] / limit)
            back = timed["scan, backward", tokens, f"griffin, {framework}"]
            assert back["ratio"] == pytest.approx(back["seconds"] / (limit * 5 / 3))
            gated = timed["RG-LRU from products", tokens, f"griffin, {framework}"]
            assert gated["ratio"] == pytest.approx(gated["seconds"] / scan["seconds"])
            whole = timed["RG-LRU", tokens, f"griffin, {framework}"]
            assert whole["against"] == "products and scan"


@pytest.mark.slow
def test_a_tpu():
    """Every row has its figures, that of DeepMind's kernel, which has no name, as well."""
    done = benchmark("scan", *SMALL_TPU, "--json")
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
def test_bad_input_is_one_sentence():
    for arguments, sentence in (
        (["--lengths", "8,x"], "--lengths '8,x': expected numbers of tokens such as 8192"),
        (["--width", "30", "--gates", "4"], "--gates 4 must divide --width 30"),
        (["--target", "v0"], "unknown TPU v0"),
    ):
        done = benchmark("scan", *arguments)
        assert done.returncode == 2 and sentence in done.stderr, arguments
        assert len(done.stderr.splitlines()) == 1 and not done.stdout
