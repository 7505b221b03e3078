"""``python -m benchmarks.scan`` on the CPU, for a TPU and for a GPU, with peers and without."""

import json
from statistics import median

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
    (rows,) = json.loads(done.stdout)["tables"].values()
    timed = {(row["operation"], row["T"], row["implementation"]): row for row in rows}
    assert len(timed) == len(rows) and all(len(row["ms"]) == 2 for row in rows)
    for tokens in (40, 9):
        names = {name for operation, n, name in timed if operation == "scan" and n == tokens}
        assert names == {*OURS, *THEIRS}
        limit = min(timed["limit", tokens, "sum"]["ms"])
        for framework in ("torch", "JAX"):
            scan = timed["scan", tokens, f"griffin, {framework}"]
            assert scan["ratio"] == pytest.approx(median(scan["ms"]) / limit)
            back = timed["scan, backward", tokens, f"griffin, {framework}"]
            assert back["ratio"] == pytest.approx(median(back["ms"]) / (limit * 5 / 3))
            gated = timed["RG-LRU from products", tokens, f"griffin, {framework}"]
            assert gated["ratio"] == pytest.approx(median(gated["ms"]) / median(scan["ms"]))
            whole = timed["RG-LRU", tokens, f"griffin, {framework}"]
            assert whole["over"] == "products and scan"


@pytest.mark.slow
def test_the_cpu_without_a_peer(tmp_path):
    module = tmp_path / "recurrentgemma" / "__init__.py"
    module.parent.mkdir()
    module.write_text("raise AttributeError('it is broken')\n")
    done = benchmark("scan", *SMALL, "--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (rows,) = found["tables"].values()
    names = {row["implementation"] for row in rows if row["operation"] == "scan"}
    assert names == {*OURS, *THEIRS[:2]}
    notes = "".join(found["notes"])
    for name in ("torch is left out: recurrentgemma.torch", "JAX is left out: recurrentgemma.jax"):
        assert f"DeepMind, {name}" in notes
    assert notes.count("cannot be imported: AttributeError: it is broken") == 2


@pytest.mark.slow
def test_a_tpu():
    """Every row has its figures, even that of DeepMind's kernel, which has no name."""
    done = benchmark("scan", *SMALL_TPU, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (rows,) = found["tables"].values()
    assert not [note for note in found["notes"] if "refused" in note]
    scans = {row["implementation"] for row in rows if row["what"] == "scan"}
    assert scans == {"griffin", "DeepMind", "lax.scan", "associative_scan, T = 1024"}
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    for row in rows:
        if row["implementation"] in ("griffin", "DeepMind") and "attention" not in row["what"]:
            assert row["cycles"] > 0 and row["bundles_per_tile"] > 0 and row["hbm_over_ideal"] > 0


@pytest.mark.slow
def test_a_gpu_to_compile_for():
    small = ["--lengths", "8192", "--width", "64", "--gates", "2"]
    done = benchmark("scan", "--target", "sm_90", *small, "--json")
    assert done.returncode == 0, done.stderr
    (rows,) = json.loads(done.stdout)["tables"].values()
    kernels = {(row["operation"], row["kernel"], row["pass"]) for row in rows}
    passes = [("forward", "reduce"), ("forward", "write"), ("scan_chunks", "write")]
    passes += [("backward", "reduce"), ("backward", "write")]
    assert kernels == {(op, *one) for op in ("scan", "RG-LRU") for one in passes}
    programs = {(row["kernel"], row["configuration"]): row["programs"] for row in rows}
    assert programs["scan_chunks", "16 x 32, 1"] == 2
    assert programs["forward", "8 x 32, 1"] == 2 * programs["forward", "8 x 64, 1"]
    for row in rows:
        assert 16 <= row["registers"] <= 255 and row["spills"] == 0 and row["warps"] == 1
        assert (row["shared_bytes"] > 0) == row["configuration"].endswith(", 4")


@pytest.mark.slow
def test_bad_input_is_one_sentence():
    for arguments, sentence in (
        (["--lengths", "8,x"], "--lengths '8,x': expected numbers of tokens such as 8192"),
        (["--width", "30", "--gates", "4"], "--gates 4 must divide --width 30"),
        (["--target", "v0"], "unknown TPU v0"),
        (["--target", "sm_90,sm_0"], "unknown GPU sm_0: one of sm_80, sm_90"),
    ):
        done = benchmark("scan", *arguments)
        assert done.returncode == 2 and sentence in done.stderr, arguments
        assert len(done.stderr.splitlines()) == 1 and not done.stdout
