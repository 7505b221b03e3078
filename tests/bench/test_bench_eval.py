"""The benchmark of evaluations: FLOPs and tokens, comparisons, and a small run of each kind."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmark import benchmark
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import BASE, PAPER
from slow import examples
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.evaluation.lm_eval_runs import Run
from benchmarks.evaluation.plan import prompt_work, scoring_work
from benchmarks.evaluation.tokens import BY_RULE
from benchmarks.model_flops import logit_flops, reading_flops
from griffin_eval.checkpoints import folder
from griffin_eval.engine.tree import MAX_REPEATED, REPEATED, Scorable
from griffin_eval.kernels.attention import cpu_torch as attention
from griffin_eval.kernels.linear import cpu_torch as linear
from griffin_eval.model_torch.griffin import initialize

CONFIGS = {
    "griffin": BASE,
    "lru of another width": PAPER,
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


TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=7), max_size=8)


@settings(max_examples=examples(20))
@given(TEXTS, st.integers(1, 6))
def test_work_is_that_of_distinct_prefixes(texts, start):
    read = {tuple(ids[:n]) for ids in texts for n in range(1, len(ids))}
    flops = sum(reading_flops(BASE, np.array([len(prefix) - 1])) for prefix in read)
    counts = (sum(len(ids) - 1 for ids in texts), len(read))
    assert prompt_work(BASE, texts) == (*counts, flops)
    scorables = [Scorable(ids, min(start, len(ids) - 1)) for ids in texts]
    scored = {tuple(s.tokens[:n]) for s in scorables for n in range(s.start, len(s.tokens))}
    expected = (*counts, flops + len(scored) * logit_flops(BASE))
    assert scoring_work(BASE, scorables) == expected


def run(likelihoods=(-1.0, -20.0), texts=("yes", "no"), acc=0.5):
    answers = {"loglikelihood": list(likelihoods), "generate_until": list(texts)}
    return Run(1.0, 0.5, answers, {"acc": acc}, {})


@pytest.mark.slow
def test_bad_arguments_end_with_one_sentence(checkpoint):
    for arguments, said in (
        (["--frameworks", "torhc"], "unknown framework 'torhc'"),
        (["--lengths", "1e6"], "--lengths '1e6'"),
        (["--checkpoint", folder("bytes_griffin")], "--to hf"),
        (["--tasks", "griffin_nonesuch", "--checkpoint", checkpoint], "'griffin_nonesuch'"),
    ):
        done = benchmark("evaluation", *arguments)
        assert done.returncode == 2 and said in done.stderr, arguments
        assert done.stderr.count("\n") == 1 and not done.stdout, arguments


@pytest.mark.slow
def test_an_evaluation_is_timed_beside_hf_and_the_roofline(checkpoint):
    tasks = ["griffin_pydoc_choice", "griffin_phonebook", "griffin_pydoc_rolling"]
    arguments = ["--limit", 1, "--rounds", 1, "--lengths", "2000,4000", "--json"]
    done = benchmark(
        "evaluation", "--checkpoint", checkpoint, "--tasks", ",".join(tasks), *arguments
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    times, documents = found["tables"].values()
    names = ["hf", "griffin torch", "griffin jax"]
    conditions = [(task, "") for task in tasks] + [(tasks[0], "a busy process")]
    rows = {(row["task"], row["beside"], row["implementation"]): row for row in times}
    assert list(rows) == [(*condition, name) for condition in conditions for name in names]
    for (*condition, name), row in rows.items():
        assert 0 < row["in the model"][0] < row["whole command"][0] and row["x roofline"][0] > 1
        if name == "hf":
            continue
        hf = rows[(*condition, "hf")]["in the model"][0]
        assert row["speed-up over hf"][0] == pytest.approx(hf / row["in the model"][0])
        # Every token is read once, and some again to spare steps.
        most = row["requested"] + min(row["requested"] * REPEATED, MAX_REPEATED)
        assert 0 < row["computed"] <= most
    assert [row["implementation"] for row in documents] == ["griffin torch"] * 2 + [names[2]] * 2
    assert all(row["MB at most"][0] >= row["MB before"][0] for row in documents)
    assert found["notes"][-1] == "all answers agree with those of hf"


@pytest.mark.slow
def test_tokens_that_others_read_again(checkpoint):
    tasks = "griffin_pydoc_choice,griffin_phonebook"
    done = benchmark("evaluation.tokens", checkpoint, "--tasks", tasks, "--limit", 1, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    ((choice, generated),) = json.loads(done.stdout)["tables"].values()
    assert 1 <= choice["griffin"] < 1.1 < choice["hf"]
    assert choice[BY_RULE] == pytest.approx(choice["hf"], rel=0.3)  # hf pads
    assert BY_RULE not in generated and generated["hf"] == pytest.approx(1, abs=0.1)


@pytest.mark.slow
def test_a_sweep_is_timed_beside_a_command(tmp_path):
    sizes = ("--tasks", "griffin_induction_heads", "--limit", 2, "--checkpoints", 2, "--rounds", 1)
    model = folder("induction_heads_griffin")
    done = benchmark("evaluation.sweep", model, *sizes, "--json", "-o", tmp_path / "figures")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    picture = tmp_path / "figures" / "sweep_timing.png"
    assert found["notes"] == [str(picture)] and picture.stat().st_size > 10_000
    ((row,),) = found["tables"].values()
    command, model, sweep = (
        row[name][0] for name in ("one command", "model, one checkpoint", "sweep of 2")
    )
    assert 0 < model < command < 2 * sweep
    assert row["limit"][0] == pytest.approx(command + 1.1 * model)
    assert row["sweep / limit"][0] == pytest.approx(sweep / row["limit"][0])
