"""The live scheduler: the same answers as the engine gives, whatever comes and goes meanwhile."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from fixtures_engine import (
    Around,
    Damaged,
    continuations,
    random_ids,
    reference_scores,
    small_runner,
)
from parity import BASE
from scheduler_worker import Answer, ask
from slow import ci, slow

from griffin_eval.checkpoints import folder
from griffin_eval.engine.generation import Prompt
from griffin_eval.engine.live import prompt_reader
from griffin_eval.engine.live import scheduler as live
from griffin_eval.engine.live.requests import Request
from griffin_eval.engine.live.scheduler import Scheduler
from griffin_eval.engine.sampling import Sampling

FRAMEWORKS = pytest.mark.parametrize("framework", ["torch", "jax"])
TORCH_QUICKLY = pytest.mark.parametrize("framework", ["torch", slow("jax")])


def few(framework, states=8, **arguments):
    runner = small_runner(framework)
    budget = states * runner.state_bytes(runner.padded_tokens(1 << 10))
    arguments = {"rows": 2, "capacity": 1 << 10, "state_bytes": budget} | arguments
    return Scheduler(runner, **arguments)


def check_scores(tokens, scores, first=1, tolerance=2e-4):
    logprobs, greedy = reference_scores(tuple(tokens))
    np.testing.assert_allclose(scores.logprobs, logprobs[first - 1 :], atol=tolerance)
    best = scores.top_tokens[:, 0] == np.array(tokens[first:])
    assert (best == greedy[first - 1 :]).all()
    np.testing.assert_array_equal(scores.top_logprobs[best, 0], scores.logprobs[best])


@pytest.mark.parametrize("framework", ["torch", ci("jax")])
def test_choices_and_continuations_equal_the_engines(framework):
    scheduler = few(framework, rows=3)
    context = random_ids(90, 1)
    choices = [context + random_ids(n, 7 + n) for n in (1, 2, 5, 30)]
    prompts = [context[:n] for n in (1, 40, 90)]
    scored = [ask(scheduler, ids, score_from=1, top=1, max_new_tokens=1) for ids in choices]
    continued = [ask(scheduler, ids, max_new_tokens=6) for ids in prompts]
    scheduler.run()
    for ids, answer in zip(choices, scored, strict=True):
        check_scores(ids, answer.scores)
        assert (answer.reason, len(answer.tokens)) == ("length", 1)
        assert answer.tokens[0].logprob == answer.tokens[0].top_logprobs[0]
    expected = continuations(small_runner(framework), [Prompt(ids, 6) for ids in prompts])
    assert [answer.ids for answer in continued] == expected
    assert scheduler.unfinished == scheduler.generating == 0
    read = scheduler.counts.tokens_read
    again = ask(scheduler, context[:60], score_from=20, top=1)
    scheduler.run()
    check_scores(context[:60], again.scores, 20)
    assert scheduler.counts.tokens_read == read  # it had been scored already


@TORCH_QUICKLY
def test_more_likely_tokens_are_found_again(framework):
    scheduler, ids = few(framework), random_ids(50, 3)
    for top in (1, 4, 2):
        answer = ask(scheduler, ids, score_from=1, top=top, max_new_tokens=3)
        scheduler.run()
        check_scores(ids, answer.scores)
        assert answer.scores.top_logprobs.shape == (49, top)
        assert (np.diff(answer.scores.top_logprobs) <= 0).all()
        assert all(len(token.top_tokens) == top for token in answer.tokens)


def test_sampling_is_the_requests_own():
    prompts = [random_ids(12, 1), random_ids(9, 2)]
    alone, together = [], few("torch")
    for index, ids in enumerate(prompts):
        scheduler = few("torch")
        alone.append(
            ask(
                scheduler,
                ids,
                max_new_tokens=8,
                sampling=Sampling(1.5, 20, 0.9),
                seed=(3, index),
            )
        )
        scheduler.run()
    both = [
        ask(together, ids, max_new_tokens=8, sampling=Sampling(1.5, 20, 0.9), seed=(3, index))
        for index, ids in enumerate(prompts)
    ]
    together.run()
    assert [answer.ids for answer in both] == [answer.ids for answer in alone]


def test_a_cancelled_request_frees_everything():
    scheduler = few("torch", states=20)
    ids = random_ids(400, 1)
    generating = ask(scheduler, random_ids(5, 1), max_new_tokens=10**6)
    reading = ask(scheduler, ids, max_new_tokens=5)
    for _ in range(3):
        scheduler._step()
    assert scheduler.generating
    other = ask(scheduler, random_ids(20, 9), max_new_tokens=3)
    scheduler.cancel(generating.request)
    scheduler.cancel(reading.request)
    scheduler.run()
    assert generating.reason == "cancelled" and generating.tokens
    assert other.reason == "length" and len(other.tokens) == 3
    assert scheduler.unfinished == scheduler.generating == 0
    root = scheduler._prompts.roots[None]
    pool = scheduler._prompts.pool
    held = [pool.slot_of(edge) for edge in root.below() if edge in pool]
    assert len(set(held)) == len(held) == scheduler.states
    assert all(edge.working is None and not edge.requests for edge in root.below())


def test_a_tree_of_many_requests_is_cut(monkeypatch):
    monkeypatch.setattr(live, "LEAST_TREE", 24_000)
    scheduler = few("torch")
    for number in range(60):
        ids = random_ids(20, number)
        answer = ask(scheduler, ids, score_from=1, top=1)
        scheduler.run()
        check_scores(ids, answer.scores)
        (root,) = scheduler._prompts.roots.values()
        held = sum(edge.nbytes + prompt_reader.EDGE_BYTES for edge in root.below())
        assert held < 30_000


def test_other_threads_and_the_end():
    scheduler = few("torch")
    scheduler.start()
    answers, ids = [], [random_ids(20 + n, 4) for n in range(12)]

    def client(part):
        answers.extend((one, ask(scheduler, one, max_new_tokens=4)) for one in part)

    threads = [threading.Thread(target=client, args=(ids[n::3],)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    scheduler.close()  # answers the requests that are left
    expected = continuations(small_runner("torch"), [Prompt(one, 4) for one, _ in answers])
    assert [answer.ids for _, answer in answers] == expected
    with pytest.raises(RuntimeError, match="ended"):
        ask(scheduler, [1])


def test_every_request_is_told_that_no_memory_came_back(monkeypatch):
    runner, scheduler = small_runner("torch"), few("torch")
    answers = [ask(scheduler, random_ids(20, n), max_new_tokens=40) for n in range(12)]
    assert scheduler._step() and scheduler.unfinished == 12

    def full(*_):
        raise MemoryError("full")

    for name in ("read", "decode_step", "open_pool", "start_decoding"):
        monkeypatch.setattr(runner, name, full)
    scheduler.serve()
    assert scheduler.unfinished == 0 and isinstance(scheduler.failed, MemoryError)
    assert {answer.reason for answer in answers} == {"error"}


def test_a_state_from_disk_that_does_not_fit_fails_its_request_only(monkeypatch):
    scheduler = few("torch")
    enter = scheduler._prompts.enter

    def sometimes(request):
        if request.tokens[0] == 7:
            raise MemoryError("full")
        enter(request)

    monkeypatch.setattr(scheduler._prompts, "enter", sometimes)
    bad, good = (ask(scheduler, ids, max_new_tokens=4) for ids in ([7, 8], [8, 9]))
    scheduler.run()
    assert bad.reason == "error" and good.reason == "length" and scheduler.unfinished == 0


def test_a_listener_that_fails_ends_its_request_only():
    scheduler = few("torch")

    class Broken(Answer):
        def token(self, token):
            raise ZeroDivisionError("mine")

    broken = Broken()
    scheduler.add(Request(np.array([1, 2], np.int32), broken, max_new_tokens=3))
    other = ask(scheduler, [1, 2, 3], max_new_tokens=3, stop_after=2)
    scheduler.run()
    assert broken.reason == "error" and isinstance(broken.error, ZeroDivisionError)
    assert (other.reason, len(other.tokens)) == ("stop", 2)


class OutOfMemory(Around):
    """A runner that has no memory for steps which read a certain token."""

    def __init__(self, runner, token):
        super().__init__(runner)
        self._token = token

    def read(self, pool, tokens, *arguments):
        if self._token in tokens:
            raise RuntimeError("CUDA out of memory")
        return self._runner.read(pool, tokens, *arguments)


def test_out_of_memory_of_one_request_fails_that_one():
    runner = small_runner("torch")
    last = BASE.vocab_size - 1
    plain = [[token for token in random_ids(40, n) if token != last] for n in range(4)]
    scheduler = Scheduler(OutOfMemory(runner, last), rows=2, capacity=1 << 10, state_bytes=1 << 24)
    answers = [ask(scheduler, ids, max_new_tokens=5) for ids in plain[:2]]
    scheduler._step()
    bad = ask(scheduler, [3, last, 4], max_new_tokens=5)
    answers += [ask(scheduler, ids, max_new_tokens=5) for ids in plain[2:]]
    scheduler.run()
    assert bad.reason == "error" and isinstance(bad.error, MemoryError)
    expected = continuations(runner, [Prompt(ids, 5) for ids in plain])
    assert [answer.ids for answer in answers] == expected


def test_what_is_not_finite_waits_for_no_state():
    runner = small_runner("torch")
    budget = runner.state_bytes(runner.padded_tokens(1 << 10))
    scheduler = Scheduler(Damaged(runner, 7), rows=1, capacity=1 << 10, state_bytes=budget)
    long = [[token for token in random_ids(700, n) if token != 7] for n in range(3)]
    good = [ask(scheduler, ids, max_new_tokens=3) for ids in long]
    bad = [ask(scheduler, [*ids[:600], 7, 1, 2], score_from=5) for ids in long]
    assert any(not scheduler._step() for _ in range(1000))
    assert scheduler.unfinished == 0
    assert {answer.reason for answer in bad} == {"error"}
    assert [each.ids for each in good] == continuations(runner, [Prompt(ids, 3) for ids in long])


@TORCH_QUICKLY
def test_what_is_not_finite_fails_its_request_only(framework):
    runner = small_runner(framework)
    stem = [1, 2, 3, 4] * 5
    good = [[*stem, 9, 8, 9], [*stem, 9, 9, 9], [2, 3, 3, 4]]
    asked = [*good[:1], [*stem, 7, 4, 4], *good[1:]]
    scheduler = Scheduler(Damaged(runner, 7), rows=4, capacity=1 << 10, state_bytes=1 << 24)
    scored = [ask(scheduler, ids, score_from=1, top=1) for ids in asked]
    continued = [ask(scheduler, ids, max_new_tokens=4) for ids in asked]
    scheduler.run()
    assert scheduler.unfinished == 0
    for answers in (scored, continued):
        bad = answers.pop(1)
        assert bad.reason == "error" and "not finite: the weights may be damaged" in str(bad.error)
    for ids, answer in zip(good, scored, strict=True):
        check_scores(ids, answer.scores)
    expected = continuations(runner, [Prompt(ids, 4) for ids in good])
    assert [answer.ids for answer in continued] == expected
    assert expected and not any(7 in ids for ids in expected)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_is_not_finite_fails_its_request_only(temperature, monkeypatch):
    runner = small_runner("torch")
    how = {"max_new_tokens": 6, "sampling": Sampling(temperature), "seed": (0, 1)}
    prompts = [[3, 5], [4, 4, 4], random_ids(30, 2)]
    alone = few("torch", rows=4)
    expected = [ask(alone, ids, **how) for ids in prompts]
    alone.run()
    scheduler = few("torch", rows=4)
    answers = [ask(scheduler, ids, **how) for ids in prompts]
    decode_step, damaged = runner.decode_step, []

    def sometimes(state, tokens, active):
        hidden, state = decode_step(state, tokens, active)
        damaged.append(active.sum() > 1 and len(damaged) % 2 == 0)
        return (hidden * np.nan if damaged[-1] else hidden), state

    monkeypatch.setattr(runner, "decode_step", sometimes)
    scheduler.run()
    assert any(damaged)
    assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
    assert {answer.reason for answer in answers} == {"length"}


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up():
    scheduler = few("jax", rows=3)
    scheduler.warm_up()
    runner = scheduler._runner
    compiled, rng = runner.compilations, np.random.default_rng(0)
    answers = []
    for number in range(24):
        tokens = rng.integers(BASE.vocab_size, size=int(np.exp(rng.uniform(0, 6))))
        sampling = Sampling(temperature=0.8) if number % 3 == 1 else Sampling()
        asked = {"top": 1, "score_from": 1} if number % 2 and len(tokens) > 1 else {}
        new = (0, 1, 7)[number % 3] if asked else 5
        answers.append(ask(scheduler, tokens, max_new_tokens=new, sampling=sampling, **asked))
        if number % 4 == 3:
            scheduler.run()
    stem = rng.integers(BASE.vocab_size, size=14).tolist()
    for choice in range(40):  # more branches than a small step has tokens
        ids = [*stem, choice, *stem[: choice % 3]]
        answers.append(ask(scheduler, ids, score_from=14, top=choice % 2))
    scheduler.run()
    assert {answer.reason for answer in answers} == {"length"}
    assert runner.compilations == compiled


WORKER = Path(__file__).parent.parent / "support" / "scheduler_worker.py"


def answers_on(framework, devices):
    """Return the answers of a scheduler in another process, on processors instead of devices."""
    done = subprocess.run(
        [sys.executable, WORKER, folder("bytes_griffin"), framework, str(devices)],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@FRAMEWORKS
def test_devices_that_share_a_model_answer_as_one(framework):
    one, two = answers_on(framework, 1), answers_on(framework, 2)
    assert (one.pop("devices"), two.pop("devices")) == (1, 2)
    assert set(one["reasons"]) == {"length"}
    for what in ("reasons", "ids", "top", "ranks"):
        assert two[what] == one[what]
    for what in ("logprobs", "top_logprobs", "entropies"):
        for mine, theirs in zip(two[what], one[what], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
