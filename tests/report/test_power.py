"""The command `power`: Miller's published example, simulations, and results of earlier runs."""

import json
import math

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from griffin_eval.cli.main import app


def write_run(folder, name, values=()):
    """Write a file of results, and samples with these scores of the task t; return the file."""
    results = {
        "results": {"t": {"m,none": 0.5}},
        "configs": {"t": {"metadata": {}}},
        "higher_is_better": {"t": {"m": True}},
        "n-samples": {"t": {"effective": len(values)}},
        "config": {"model": "griffin", "model_args": {"pretrained": "m"}, "device": "cpu"},
    }
    file = folder / f"results_{name}.json"
    file.write_text(json.dumps(results))
    hashes = {"prompt_hash": "p", "target_hash": "t", "doc_hash": "d", "filter": "none"}
    lines = [
        json.dumps({"doc_id": i, "metrics": ["m"], "m": value} | hashes)
        for i, value in enumerate(values)
    ]
    if lines:
        (folder / f"samples_t_{name}.jsonl").write_text("\n".join(lines))
    return file


def power(*arguments):
    """Return the rows of the table."""
    result = CliRunner().invoke(app, ["power", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments):
    return str(CliRunner().invoke(app, ["power", *map(str, arguments)]).exception)


def test_the_published_example():
    """Miller, section 5: a variance of 1/9 and a difference of 3% take 969 items."""
    given = ["--items", 969, "--score", 0.5, "--correlation", 7 / 9, "--difference", 0.03]
    (row,) = power(*given)
    assert row["needed"] == pytest.approx(969, abs=3)  # Student's quantiles in place of the normal
    assert row["smallest"] == pytest.approx(0.03, rel=2e-3)


@pytest.mark.parametrize("size", [1, 5])
def test_a_difference_of_this_size_is_seen_four_times_in_five(size):
    """Runs drawn as planned, tested by Student's test over clusters."""
    rng, clusters, within = np.random.default_rng(0), 60, 0.5
    given = ["--items", clusters * size, "--score", 0.5, "--cluster-size", size, "--within", within]
    (row,) = power(*given)
    # Differences of two independent right or wrong answers have a variance of about a half.
    shared = rng.normal(scale=math.sqrt(within / 2), size=(4000, clusters, 1))
    own = rng.normal(scale=math.sqrt((1 - within) / 2), size=(4000, clusters, size))
    of_clusters = (shared + own + row["smallest"]).mean(2)
    seen = stats.ttest_1samp(of_clusters, 0, axis=1).pvalue < 0.05
    assert seen.mean() == pytest.approx(0.8, abs=0.03)


def test_earlier_runs(tmp_path):
    rng = np.random.default_rng(1)
    one = rng.integers(0, 2, 200).tolist()
    other = [b if i % 4 else 1 - b for i, b in enumerate(one)]
    files = [write_run(tmp_path, name, values) for name, values in (("a", one), ("b", other))]
    (paired,) = power(files[0], "--against", files[1])
    difference = np.subtract(one, other)
    freedom = stats.t.ppf(0.975, 199) + stats.t.ppf(0.8, 199)
    expected = difference.std(ddof=1) / math.sqrt(200) * freedom
    assert paired["smallest"] == pytest.approx(expected)
    assert (paired["items"], paired["clusters"], paired["paired"]) == (200, 200, True)
    (alone,) = power(files[0], "--difference", 0.1)
    expected = np.std(one, ddof=1) * math.sqrt(2 / 200) * freedom
    assert alone["smallest"] == pytest.approx(expected)
    (again,) = power(files[0], "--items", alone["needed"])
    assert 0.099 < again["smallest"] <= 0.1
    (alike,) = power(files[0], "--correlation", 0.5)
    assert alike["smallest"] == pytest.approx(expected * math.sqrt(0.5))


def test_refusals(tmp_path):
    right = write_run(tmp_path, "right", [1] * 9)
    bare = write_run(tmp_path, "bare")
    for arguments, said in (
        ([], "expected RESULTS of an earlier run, or --items and a --score"),
        (["--items", 9, "--score", 1.0], "--score between 0 and 1"),
        (["--items", 9, "--score", 0.5, "--correlation", 1], "--correlation 1.0: expected"),
        (["--items", 9, "--score", 0.5, "--difference", 0], "--difference 0.0: expected"),
        ([right, "--correlation", -1.5], "--correlation -1.5: expected"),
        ([right, "--against", bare, "--correlation", 0.5], "is for a plan without --against"),
        (["--against", right], "--against needs RESULTS"),
        ([right, "--score", 0.5], "are for a plan without RESULTS"),
        ([right], "t: m: all 9 clusters are alike"),
        ([bare], "has no samples of any task"),
    ):
        assert said in refusal(*arguments), arguments
