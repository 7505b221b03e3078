"""The live scheduler: the answers of each request alone, whatever comes and goes meanwhile."""

import json
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from fake_runner import FakeRunner, continuation_alone, scores_alone
from fixtures_engine import (
    Around,
    Damaged,
    OneAtATime,
    continuations,
    random_ids,
    reference_scores,
    small_runner,
)
from parity import BASE
from scheduler_worker import Answer, ask
from slow import ci

from griffin_eval.checkpoints import folder
from griffin_eval.engine.generation import Prompt
from griffin_eval.engine.live import prompt_reader
from griffin_eval.engine.live import scheduler as live
from griffin_eval.engine.live.requests import Request
from griffin_eval.engine.live.scheduler import Scheduler
from griffin_eval.engine.live.tree import LiveEdge, insert
from griffin_eval.engine.sampling import Chooser, Sampling

FRAMEWORKS = pytest.mark.parametrize("framework", ["torch", "jax"])


def few(runner=None, states=8, **arguments):
    runner = runner or FakeRunner()
    budget = states * (runner.state_bytes(1 << 10) + 4 * runner.config.vocab_size)
    arguments = {"rows": 2, "capacity": 1 << 10, "state_bytes": budget} | arguments
    return Scheduler(runner, **arguments)


def check_scores(tokens, scores, first=1, reference=scores_alone, tolerance=1e-5):
    logprobs, greedy = reference(tuple(tokens))
    np.testing.assert_allclose(scores.logprobs, logprobs[first - 1 :], atol=tolerance)
    best = scores.top_tokens[:, 0] == np.array(tokens[first:])
    assert (best == greedy[first - 1 :]).all()
    np.testing.assert_array_equal(scores.top_logprobs[best, 0], scores.logprobs[best])


@pytest.mark.parametrize("framework", ["torch", ci("jax")])
def test_choices_and_continuations_equal_the_engines(framework):
    runner, equations = small_runner(framework), (reference_scores, 2e-4)
    scheduler = few(runner, rows=3)
    context = random_ids(90, 1)
    choices = [context + random_ids(n, 7 + n) for n in (1, 2, 5, 30)]
    prompts = [context[:n] for n in (1, 40, 90)]
    scored = [ask(scheduler, ids, score_from=1, top=1, max_new_tokens=1) for ids in choices]
    continued = [ask(scheduler, ids, max_new_tokens=6) for ids in prompts]
    scheduler.run()
    for ids, answer in zip(choices, scored, strict=True):
        check_scores(ids, answer.scores, 1, *equations)
        assert (answer.reason, len(answer.tokens)) == ("length", 1)
        assert answer.tokens[0].logprob == answer.tokens[0].top_logprobs[0]
    expected = continuations(runner, [Prompt(ids, 6) for ids in prompts])
    assert [answer.ids for answer in continued] == expected
    assert scheduler.unfinished == scheduler.generating == 0
    read = scheduler.counts.tokens_read
    again = ask(scheduler, context[:60], score_from=20, top=1)
    scheduler.run()
    check_scores(context[:60], again.scores, 20, *equations)
    assert scheduler.counts.tokens_read == read  # it had been scored already


def test_more_likely_tokens_are_found_again():
    scheduler, ids = few(), random_ids(50, 3)
    for top in (1, 4, 2):
        answer = ask(scheduler, ids, score_from=1, top=top, max_new_tokens=3)
        scheduler.run()
        check_scores(ids, answer.scores)
        assert answer.scores.top_logprobs.shape == (49, top)
        assert (np.diff(answer.scores.top_logprobs) <= 0).all()
        assert all(len(token.top_tokens) == top for token in answer.tokens)


def test_sampling_is_the_requests_own():
    prompts, scheduler = [random_ids(12, 1), random_ids(9, 2)], few()
    sampling = Sampling(1.5, 20, 0.9)
    answers = [
        ask(scheduler, ids, max_new_tokens=8, sampling=sampling, seed=(3, index))
        for index, ids in enumerate(prompts)
    ]
    scheduler.run()
    for index, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert answer.ids == continuation_alone(ids, 8, Chooser(sampling, 3, index))


def test_a_cancelled_request_frees_everything():
    scheduler = few(states=20)
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
    monkeypatch.setattr(live, "MIN_TREE", 24_000)
    scheduler = few()
    for number in range(60):
        ids = random_ids(20, number)
        answer = ask(scheduler, ids, score_from=1, top=1)
        scheduler.run()
        check_scores(ids, answer.scores)
        (root,) = scheduler._prompts.roots.values()
        held = sum(edge.nbytes + prompt_reader.EDGE_BYTES for edge in root.below())
        assert held < 30_000


@pytest.mark.parametrize("length", [1, 20, 300])
def test_an_edge_counts_all_of_its_memory(length):
    root = LiveEdge(np.empty(0, np.int32), 0, None)
    tracemalloc.start()
    try:
        for number in range(300):  # each one diverges from the text before it
            ids = [number // 2, *random_ids(length, number)]
            edge = insert(root, np.array(ids, np.int32))
            scores = np.zeros((len(edge.tokens), 1))
            edge.learn(np.arange(len(scores)), scores[:, 0], scores, scores)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.3 < taken / sum(edge.nbytes for edge in root.below()) < 1


def test_other_threads_and_the_end():
    scheduler = few()
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
    assert len(answers) == 12
    assert all(answer.ids == continuation_alone(one, 4) for one, answer in answers)
    with pytest.raises(RuntimeError, match="ended"):
        ask(scheduler, [1])


def test_every_request_is_told_that_no_memory_came_back(monkeypatch):
    runner = FakeRunner()
    scheduler = few(runner)
    answers = [ask(scheduler, random_ids(20, n), max_new_tokens=40) for n in range(12)]
    assert scheduler._step() and scheduler.unfinished == 12

    def full(*_):
        raise MemoryError("full")

    for name in ("read", "decode_step", "open_pool", "start_decoding"):
        monkeypatch.setattr(runner, name, full)
    scheduler.serve()
    assert scheduler.unfinished == 0 and isinstance(scheduler.failed, MemoryError)
    assert {answer.reason for answer in answers} == {"error"}


@pytest.mark.parametrize("failing", ["read", "decode_step"])
def test_a_failed_step_keeps_no_pool_in_memory(failing):
    scheduler = few(OneAtATime(FakeRunner(), failing, batches=2))
    answers = [ask(scheduler, random_ids(20, n), max_new_tokens=4) for n in range(3)]
    scheduler.run()
    expected = [continuation_alone(random_ids(20, n), 4) for n in range(3)]
    assert [answer.ids for answer in answers] == expected


def test_a_state_from_disk_that_does_not_fit_fails_its_request_only(monkeypatch):
    scheduler = few()
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
    scheduler = few()

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
    last = BASE.vocab_size - 1
    plain = [[token for token in random_ids(40, n) if token != last] for n in range(4)]
    scheduler = few(OutOfMemory(FakeRunner(), last), states=1000)
    answers = [ask(scheduler, ids, max_new_tokens=5) for ids in plain[:2]]
    scheduler._step()
    bad = ask(scheduler, [3, last, 4], max_new_tokens=5)
    answers += [ask(scheduler, ids, max_new_tokens=5) for ids in plain[2:]]
    scheduler.run()
    assert bad.reason == "error" and isinstance(bad.error, MemoryError)
    assert [answer.ids for answer in answers] == [continuation_alone(ids, 5) for ids in plain]


def test_what_is_not_finite_waits_for_no_state():
    scheduler = few(Damaged(FakeRunner(), 7), states=1, rows=1)
    long = [[token for token in random_ids(700, n) if token != 7] for n in range(3)]
    good = [ask(scheduler, ids, max_new_tokens=3) for ids in long]
    bad = [ask(scheduler, [*ids[:600], 7, 1, 2], score_from=5) for ids in long]
    assert any(not scheduler._step() for _ in range(1000))
    assert scheduler.unfinished == 0
    assert {answer.reason for answer in bad} == {"error"}
    assert [each.ids for each in good] == [continuation_alone(ids, 3) for ids in long]


def test_what_is_not_finite_fails_its_request_only():
    stem = [1, 2, 3, 4] * 5
    good = [[*stem, 9, 8, 9], [*stem, 9, 9, 9], [2, 3, 3, 4]]
    asked = [*good[:1], [*stem, 7, 4, 4], *good[1:]]
    scheduler = few(Damaged(FakeRunner(), 7), states=1000, rows=4)
    scored = [ask(scheduler, ids, score_from=1, top=1) for ids in asked]
    continued = [ask(scheduler, ids, max_new_tokens=4) for ids in asked]
    scheduler.run()
    assert scheduler.unfinished == 0
    for answers in (scored, continued):
        bad = answers.pop(1)
        assert bad.reason == "error" and "not finite: the weights may be damaged" in str(bad.error)
    for ids, answer in zip(good, scored, strict=True):
        check_scores(ids, answer.scores)
    expected = [continuation_alone(ids, 4) for ids in good]
    assert [answer.ids for answer in continued] == expected
    assert expected and not any(7 in ids for ids in expected)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_is_not_finite_fails_its_request_only(temperature, monkeypatch):
    runner, sampling = FakeRunner(), Sampling(temperature)
    how = {"max_new_tokens": 6, "sampling": sampling, "seed": (0, 1)}
    prompts = [[3, 5], [4, 4, 4], random_ids(30, 2)]
    scheduler = few(runner, rows=4)
    answers = [ask(scheduler, ids, **how) for ids in prompts]
    decode_step, damaged = runner.decode_step, []

    def sometimes(state, tokens, active):
        hidden, state = decode_step(state, tokens, active)
        damaged.append(active.sum() > 1 and len(damaged) % 2 == 0)
        return (hidden * np.nan if damaged[-1] else hidden), state

    monkeypatch.setattr(runner, "decode_step", sometimes)
    scheduler.run()
    assert any(damaged)
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.ids == continuation_alone(ids, 6, Chooser(sampling, 0, 1))
    assert {answer.reason for answer in answers} == {"length"}


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up():
    scheduler = few(small_runner("jax"), rows=3)
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
