"""The benchmarks of the server: texts, a task of lm-eval, and pauses beside a long prompt."""

import json
from importlib.util import find_spec

import pytest
from benchmark import benchmark

from griffin_eval.checkpoints import folder

MODEL = folder("bytes_griffin")
# MLX's server ends in bfloat16 on a processor.
SIZES = ("--requests", 3, "--clients", 2, "--rounds", 1, "--dtype", "float32", "--json")


def measure(name, *arguments):
    done = benchmark(name, MODEL, *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return list(found["tables"].values()), found["notes"]


@pytest.mark.slow
def test_a_server_is_timed_beside_the_engine_and_other_servers():
    (rows, streams), notes = measure("serving", *SIZES, "--new-tokens", 3)
    assert [row["requests"] for row in rows] == ["continuations", "choices"]
    for row in rows:
        ratio = row["engine"][0] / row["server"][0]
        assert row["engine / server"] == [pytest.approx(ratio)] and row["transport alone"][0] > 0
    expected = ["griffin serve"]
    for peer, module in (("mlx_lm.server", "mlx_lm"), ("transformers serve", "fastapi")):
        if find_spec(module) is None:
            assert f"{peer} is left out: {module} not installed" in notes
        else:
            expected.append(peer)
    assert [row["server"] for row in streams] == expected
    assert all(0 < row["first token: median"][0] <= row["all"][0] for row in streams)


@pytest.mark.slow
def test_pauses_stand_beside_their_limit():
    arguments = ("--tokens", 3000, "--seconds", 1, "--rounds", 1, "--json")
    ((row,),), _ = measure("serving.pauses", *arguments)
    step, before, after = (row[name][0] for name in ("alone: median", "99th", "beside: 99th"))
    assert 0 < step <= before and row["limit"] == [pytest.approx(2 * before + step)]
    assert row["beside / limit"] == [pytest.approx(after / row["limit"][0])]
    assert row["prompt, tokens/s"][0] > 0


@pytest.mark.slow
def test_what_cannot_be_measured_ends_with_one_sentence(tmp_path):
    for arguments, said in (
        ((tmp_path,), str(tmp_path)),
        ((MODEL, "--tasks-path", tmp_path), "name one of them"),
        ((MODEL, "--framework", "torhc"), "unknown framework 'torhc'"),
    ):
        done = benchmark("serving", *arguments)
        assert done.returncode == 2 and said in done.stderr, arguments
        assert "Traceback" not in done.stderr, arguments
