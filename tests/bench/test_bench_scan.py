"""The command ``bench scan`` on the CPU, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import griffin_eval
from slow import slow

COMMAND = [str(Path(sys.executable).with_name("griffin-eval")), "bench", "scan"]
SMALL = ["--lengths", "40,9", "--width", "32", "--gates", "2", "--rounds", "1"]


def run(*arguments):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_implementation_is_timed_and_put_over_what_it_says():
    done = run(*SMALL, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    timed = {(row["operation"], row["tokens"], row["implementation"]): row for row in rows}
    assert len(timed) == len(rows)
    for tokens in (40, 9):
        names = {name for operation, n, name in timed if operation == "scan" and n == tokens}
        assert names == {
            "griffin, torch",
            "griffin, torch, plain",
            "griffin, JAX",
            "griffin, JAX, plain",
            "lax.associative_scan",
            "transformers",
            "DeepMind, torch",
            "DeepMind, JAX",
        }
        limit = timed["limit", tokens, "sum"]["seconds"]
        for framework in ("torch", "JAX"):
            scan = timed["scan", tokens, f"griffin, {framework}"]
            assert scan["ratio"] == pytest.approx(scan["seconds"] / limit)
            back = timed["scan, backward", tokens, f"griffin, {framework}"]
            assert back["ratio"] == pytest.approx(back["seconds"] / (limit * 5 / 3))
            gated = timed["RG-LRU from products", tokens, f"griffin, {framework}"]
            assert gated["ratio"] == pytest.approx(gated["seconds"] / scan["seconds"])
            assert timed["RG-LRU", tokens, f"griffin, {framework}"]["against"] == (
                "products and scan"
            )


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--lengths", "8,x"], "--lengths '8,x': expected numbers of tokens such as 8192"),
        (["--width", "30", "--gates", "4"], "--gates 4 must divide --width 30"),
        slow(["--target", "cuda"], "--target cuda needs a CUDA device, and torch finds none"),
        slow(["--target", "v0"], "v0"),
    ],
)
def test_bad_input_is_one_sentence(arguments, said):
    done = griffin_eval("bench", "scan", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout
