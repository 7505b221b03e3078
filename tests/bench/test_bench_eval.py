"""The benchmark of the engine: its counts against brute force and torch's own, its reports."""

import functools
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import BASE, PAPER
from rich.console import Console
from slow import examples
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer
from typer.testing import CliRunner

from benchmarks.evaluation.compare import (
    Timing,
    compare,
    differing_flags,
    differing_metrics,
    timing_table,
    tokens_and_limit,
)
from benchmarks.evaluation.plan import UNCLEAR, _Plan, plan
from benchmarks.evaluation.run import Workload, parse_workloads
from benchmarks.flops import prompt_work, scoring_work
from benchmarks.model_flops import logit_flops, reading_flops
from griffin_eval._plugin import TASKS
from griffin_eval.cli.main import app
from griffin_eval.engine.tree import MOST_REPEATED, REPEATED, Scorable
from griffin_eval.errors import ArgumentError
from griffin_eval.kernels.attention import cpu_torch as attention
from griffin_eval.kernels.linear import cpu_torch as linear
from griffin_eval.model_torch.griffin import initialize
from griffin_eval.tasks.smoke.python_docs import rolling

CONFIGS = {
    "griffin": BASE,
    "lru of another width": PAPER,
    "gates of many blocks": replace(PAPER, gate_blocks=12),
    "global attention": replace(BASE, block_pattern=("recurrent", "global_attention")),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_of_a_token_are_those_torch_counts(name, monkeypatch):
    config = CONFIGS[name]
    # The twin multiplies with all keys that a state can hold, which a token sees at their end.
    capacity = config.visible_keys
    model = initialize(config)
    state = model.init_state(1, capacity)
    # torch counts no operations of compiled kernels, only plain products.
    for kernel in (attention, linear):
        monkeypatch.setattr(kernel, "unsupported", lambda *arrays: "not asked for")
    monkeypatch.setattr(linear, "_has_onednn", lambda: False)
    counter = FlopCounterMode(display=False)
    with counter, torch.inference_mode(), sdpa_kernel(SDPBackend.MATH):
        hidden, _ = model.step(torch.tensor([[1]]), torch.tensor([1]), state)
    assert reading_flops(config, np.array([capacity - 1])) == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model.logits(hidden[0])
    assert logit_flops(config) == counter.get_total_flops()


def test_a_token_sees_what_is_before_it_within_the_window():
    for position in range(2 * BASE.visible_keys):
        seen = replace(BASE, visible_keys=min(position + 1, BASE.visible_keys))
        expected = reading_flops(seen, np.array([10**6]))
        assert reading_flops(BASE, np.array([position])) == expected
    everywhere = replace(BASE, block_pattern=("global_attention",))
    local = replace(BASE, block_pattern=("local_attention",), visible_keys=10**6)
    assert reading_flops(everywhere, np.arange(40)) == reading_flops(local, np.arange(40))


SEQUENCES = st.lists(
    st.lists(st.integers(0, 2), min_size=2, max_size=7).flatmap(
        lambda ids: st.integers(1, len(ids) - 1).map(lambda start: Scorable(ids, start))
    ),
    max_size=8,
)


@settings(max_examples=examples(20))
@given(SEQUENCES)
def test_work_of_scoring_is_that_of_distinct_prefixes(sequences):
    read = {tuple(s.tokens[:n]) for s in sequences for n in range(1, len(s.tokens))}
    scored = {tuple(s.tokens[:n]) for s in sequences for n in range(s.start, len(s.tokens))}
    flops = sum(reading_flops(BASE, np.array([len(prefix) - 1])) for prefix in read)
    work = scoring_work(BASE, sequences)
    assert work.requested == sum(len(s.tokens) - 1 for s in sequences)
    assert work.unique == len(read)
    assert work.flops == flops + len(scored) * logit_flops(BASE)


@settings(max_examples=examples(20))
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), max_size=8))
def test_work_of_prompts_is_that_of_distinct_prefixes(prompts):
    read = {tuple(ids[:n]) for ids in prompts for n in range(1, len(ids))}
    flops = sum(reading_flops(BASE, np.array([len(prefix) - 1])) for prefix in read)
    expected = (sum(len(ids) - 1 for ids in prompts), len(read), flops)
    assert prompt_work(BASE, prompts) == expected


@pytest.fixture
def planned(checkpoint, monkeypatch):
    from lm_eval.tasks import TaskManager

    # Indexing the thousands of tasks that come with lm_eval takes seconds.
    quick = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", quick)

    def run(task, limit, characters=None):
        requests = {"task": task, "limit": limit, "characters": characters}
        return plan(str(checkpoint), [], tasks_path=TASKS, **requests)

    return run


@pytest.mark.slow
def test_plan_of_rolling_is_one_pass_of_transformers(planned, checkpoint, reference_logprobs):
    found = planned("griffin_pydoc_rolling", 2, characters=600)
    assert found["kinds"] == ["loglikelihood_rolling"]
    texts = [text[:600] for text in rolling()["test"]["text"][:2]]
    documents = [AutoTokenizer.from_pretrained(checkpoint)(text)["input_ids"] for text in texts]
    expected = [reference_logprobs(ids)[0].sum() for ids in documents]
    assert found["rolling"] == pytest.approx(expected, rel=1e-6)
    assert found["requested"] == sum(len(ids) - 1 for ids in documents)
    assert found["unique"] <= found["requested"]


@pytest.mark.slow
def test_plan_of_generation(planned):
    found = planned("griffin_phonebook", 2)
    assert found["kinds"] == ["generate_until"] and found["rolling"] == found["unclear"] == []
    assert found["decode_flops"] > 0 and found["unique"] == found["requested"] - 1  # BOS


def test_a_task_that_does_not_exist_is_refused(planned):
    with pytest.raises(ArgumentError, match="task 'griffin_nonesuch'"):
        planned("griffin_nonesuch", 1)


@pytest.mark.parametrize(
    ("leads", "unclear"),
    [
        ((1.0, 1.0), False),
        ((1.0, -1.0), False),
        ((1.0, UNCLEAR / 2), True),
        ((1.0, -UNCLEAR / 2), True),
        ((-1.0, UNCLEAR / 2), False),  # the first is not the likeliest, whatever the second is
        ((-UNCLEAR / 2, UNCLEAR / 2), True),
    ],
)
def test_rounding_decides_where_the_likeliest_token_leads_by_little(leads, unclear):
    ids, start = [5, 6, 2, 3], 2
    logits = torch.zeros(4, 8).double()
    logits[[0, 3]] = torch.nan  # nothing is scored there
    logits[1, 2], logits[2, 3] = leads
    model = SimpleNamespace(_logits=lambda tokens: logits if tokens == ids else None)
    assert _Plan._is_unclear(model, ids, start) == unclear  # type: ignore[arg-type]


def test_generated_tokens_count_towards_the_limit():
    plan = {"requested": 90, "unique": 40, "flops": 4000, "decode_flops": 100}
    stats = {"tokens_computed": 57, "tokens_again": 7, "tokens_unique": 40}
    assert tokens_and_limit(plan, stats, 1000.0) == ((100, 50, 57), 5.0)


def test_workloads():
    assert parse_workloads("a,b:3,c:3:0,d:3:9", 8) == [
        Workload("a", 8, 8),
        Workload("b", 3, 3),
        Workload("c", 3, 0),
        Workload("d", 3, 9),
    ]
    for wrong in ("", "a,", ":3", "a:0", "a:-1", "a:x", "a:1:2:3", "a:1:-1"):
        with pytest.raises(ArgumentError, match="--tasks"):
            parse_workloads(wrong, 8)
    with pytest.raises(ArgumentError, match="a more than once"):
        parse_workloads("a,b,a:2", 8)


def test_table_has_the_ratios():
    rows = [
        Timing("one", "in the model", 20, "torch", 30.0, 4.0, 0.5, (900, 300, 310)),
        Timing("one", "whole command", 60, "torch", 90.0, 10.0),
    ]
    out = io.StringIO()
    Console(width=160, file=out).print(timing_table(rows))
    lines = [line.replace("│", " ").split() for line in out.getvalue().splitlines()]
    model = "one in the model torch 20 30.00 4.00 7.5 0.500 8.0 900 300 310".split()
    assert model in lines
    assert "one whole command torch 60 90.00 10.00 9.0".split() in lines


def answers(**changes):
    usual = {
        "loglikelihood": [[-1.0, False], [-20.0, True]],
        "generate_until": ["yes", "no"],
        "loglikelihood_rolling": [-300.0],
    }
    return {
        "answers": usual | changes.pop("answers", {}),
        "metrics": {"acc": 0.5},
        "stats": {"tokens_unique": 7},
    } | changes


PLAN = {"rolling": [-300.0], "unique": 7}


def test_what_is_the_same_is_counted():
    theirs = answers(answers={"loglikelihood_rolling": [-310.0]})  # its windows differ
    near = answers(
        answers={
            "loglikelihood": [[-1.00005, False], [-20.001, True]],
            "loglikelihood_rolling": [-300.02],
        }
    )
    same, problems = compare(near, theirs, PLAN, frozenset())
    assert not problems
    counts = ["1/1 metrics", "2/2 log-likelihoods", "2/2 greedy flags", "2/2 texts"]
    assert same[:4] == counts and same[4].startswith("1/1 documents")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"metrics": {"acc": 0.501}}, "1 of 1 metrics: acc 0.501, not 0.5"),
        ({"metrics": {}}, "1 of 1 metrics: acc None, not 0.5"),
        (
            {"answers": {"loglikelihood": [[-1.0002, False], [-20.0, True]]}},
            "1 of 2 log-likelihoods",
        ),
        (
            {"answers": {"loglikelihood": [[float("nan"), False], [-20.0, True]]}},
            "1 of 2 log-likelihoods",
        ),
        (
            {"answers": {"loglikelihood": [[-1.0, False], [-20.0, False]]}},
            "1 of 2 greedy flags: requests 1",
        ),
        (
            {"answers": {"generate_until": ["yes", "maybe"]}},
            "1 of 2 texts: 'maybe', not 'no'",
        ),
        ({"answers": {"loglikelihood_rolling": [-300.1]}}, "1 of 1 documents"),
        ({"stats": {"tokens_unique": 8}}, "8 unique tokens, 7"),
    ],
)
def test_what_is_not_the_same_is_said(changes, problem):
    _, problems = compare(answers(**changes), answers(), PLAN, frozenset())
    assert len(problems) == 1 and problems[0].startswith(problem)


def test_in_sixteen_bits_log_likelihoods_alone_are_compared():
    ours = answers(
        metrics={"acc": 0.25},
        answers={
            "loglikelihood": [[-1.04, True], [-20.5, True]],
            "generate_until": ["no", "no"],
            "loglikelihood_rolling": [-303.0],
        },
    )
    same, problems = compare(ours, answers(), PLAN, frozenset(), "bfloat16")
    assert not problems and [text.split()[0] for text in same] == ["2/2", "1/1"]
    _, problems = compare(ours, answers(), PLAN, frozenset(), "float16")
    assert problems == ["2 of 2 log-likelihoods"]


def test_flags_that_rounding_decides_may_differ():
    ours = answers(answers={"loglikelihood": [[-1.0, True], [-20.0, True]]})
    assert differing_flags(ours, answers()) == [0]
    assert compare(ours, answers(), PLAN, frozenset([0]))[1] == []
    assert compare(ours, answers(), PLAN, frozenset([1]))[1] != []


def test_metrics_that_differ_by_rounding_are_the_same():
    assert differing_metrics({"x": 1.0000001, "more": 1.0}, {"x": 1.0}) == []
    assert differing_metrics({"x": 1.00001}, {"x": 1.0}) == ["x 1.00001, not 1.0"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tasks", "x:y"], "--tasks 'x:y'"),
        (["--frameworks", "torhc"], "unknown framework 'torhc'"),
        (["--lengths", "1e6"], "--lengths '1e6'"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_measured(arguments, said):
    result = CliRunner().invoke(app, ["bench", "eval", *arguments])
    assert isinstance(result.exception, ArgumentError) and said in str(result.exception)
    assert result.stdout == ""


def test_a_checkpoint_that_hf_cannot_read_is_refused(checkpoint, tmp_path):
    other = str(tmp_path / "flax")
    runner = CliRunner()
    assert runner.invoke(app, ["convert", str(checkpoint), other, "--to", "griffin"]).exit_code == 0
    result = runner.invoke(app, ["bench", "eval", "--checkpoint", other])
    assert isinstance(result.exception, ArgumentError) and "--to hf" in str(result.exception)


@pytest.mark.slow
def test_benchmark_measures_and_compares(checkpoint):
    done = subprocess.run(
        [Path(sys.executable).with_name("griffin-eval"), "bench", "eval"]
        + ["--checkpoint", checkpoint, "--rounds", "1", "--lengths", "2000,4000", "--tasks"]
        + ["griffin_pydoc_choice:2:1,griffin_phonebook:1:0,griffin_pydoc_rolling:1:0"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    rows = [line.replace("│", " ").split() for line in lines if "│" in line]
    times = ["choice in", "choice whole", "phonebook in", "rolling in"]
    expected = [f"griffin_pydoc_{t}" if "phone" not in t else f"griffin_{t}" for t in times]
    for framework in ("torch", "jax"):
        mine = [row for row in rows if framework in row]
        found = [" ".join(row[:2]) for row in mine if row[0].startswith("griffin_")]
        assert found == expected
        assert [row[0] for row in mine if not row[0].startswith("griffin_")] == [framework] * 2
        for row in mine:
            if "model" in row:
                documents, hf, ours, over, limit, times_limit = map(float, row[5:11])
                requested, unique, computed = map(int, row[11:])
                # As near as two decimals of a time and one of a ratio tell.
                least, most = (hf - 0.005) / (ours + 0.005), (hf + 0.005) / (ours - 0.005)
                assert least - 0.051 <= over <= most + 0.051
                assert requested >= unique and times_limit > 1
                assert unique <= computed <= unique + min(unique * REPEATED, MOST_REPEATED)
    assert sum(" bytes a token" in line for line in lines) == 2
    assert sum("matrix products" in line for line in lines) == 4
    assert sum("the same are" in line for line in lines) == 6 and "NOT" not in done.stdout
