"""A scheduler's states on disk change how much is read, and no answer."""

import shutil
import tempfile

import numpy as np
import pytest
import scheduler_worker
from fake_runner import FakeRunner, continuation_alone, scores_alone
from fixtures_engine import random_ids
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from slow import examples

from griffin_eval.engine.live import kept
from griffin_eval.engine.live.scheduler import Scheduler
from griffin_eval.states import state_cache
from griffin_eval.states.state_cache import StateCache

BOOK = random_ids(61, 1)
QUESTIONS = [[*BOOK, *random_ids(6, seed)] for seed in range(5)]
READ = 59  # a multiple of 4, less the last token, which is not in the state


@pytest.fixture(scope="module", autouse=True)
def short():
    """Beginnings short enough for small trees."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_cache, "STEP", 4)
        patch.setattr(kept, "MIN_TOKENS", 8)
        yield


def opened(folder, runner=None, states=8, limit=1 << 40):
    runner = runner or FakeRunner()
    cache = StateCache(folder, limit, runner.config, "0" * 64, None, runner.dtype, runner.framework)
    budget = states * (runner.state_bytes(1 << 10) + 4 * runner.config.vocab_size)
    return Scheduler(runner, rows=2, capacity=1 << 10, state_bytes=budget, cache=cache)


def ask(scheduler, *prompts, scored=False, new=4):
    """Asks one after the other; gives their answers."""
    answers = []
    for ids in prompts:
        more = {"score_from": 1, "top": 1} if scored else {}
        answers.append(scheduler_worker.ask(scheduler, ids, max_new_tokens=new, **more))
        scheduler.run()
    return answers


def expected(prompts, new=4):
    return [continuation_alone(ids, new) for ids in prompts]


@pytest.mark.parametrize("padded", [False, True])
def test_a_later_server_reads_no_book(padded, tmp_path):
    first = opened(tmp_path, FakeRunner(padded=padded))
    assert [a.ids for a in ask(first, *QUESTIONS[:3])] == expected(QUESTIONS[:3])
    assert first.counts.tokens_kept == 0 and len([*tmp_path.glob("*.state")]) == 1
    second = opened(tmp_path, FakeRunner(padded=padded))
    assert [a.ids for a in ask(second, *QUESTIONS)] == expected(QUESTIONS)
    assert second.counts.tokens_kept == READ
    assert second.counts.tokens_read <= len(BOOK) - READ + sum(len(q) - 61 for q in QUESTIONS) + 10


def test_a_book_that_was_asked_for_alone_is_kept_once_others_go_on_from_it(tmp_path):
    first = opened(tmp_path)
    ask(first, BOOK)
    assert not [*tmp_path.glob("*.state")]
    read = first.counts.tokens_read
    ask(first, QUESTIONS[0])
    assert len([*tmp_path.glob("*.state")]) == 1
    assert first.counts.tokens_read - read < 12  # its state was there
    second = opened(tmp_path)
    assert [a.ids for a in ask(second, QUESTIONS[1])] == expected([QUESTIONS[1]])
    assert second.counts.tokens_kept == READ


def check_scores(answers, prompts):
    for answer, ids in zip(answers, prompts, strict=True):
        logprobs, greedy = scores_alone(ids)
        np.testing.assert_allclose(answer.scores.logprobs, logprobs, atol=1e-5)
        assert np.array_equal(answer.scores.top_tokens[:, 0] == ids[1:], greedy)
        at_top = answer.scores.top_logprobs[greedy, 0]
        np.testing.assert_allclose(at_top, logprobs[greedy], atol=1e-5)


def test_a_later_server_scores_no_book_again(tmp_path):
    check_scores(ask(opened(tmp_path), *QUESTIONS[:2], scored=True, new=0), QUESTIONS[:2])
    again = opened(tmp_path)
    answers = ask(again, *QUESTIONS[1:], scored=True, new=2)
    check_scores(answers, QUESTIONS[1:])
    assert [answer.ids for answer in answers] == expected(QUESTIONS[1:], 2)
    assert again.counts.tokens_kept == READ
    assert again.counts.tokens_read <= sum(len(ids) - READ for ids in QUESTIONS[1:]) + 10


def test_a_book_that_was_kept_without_its_scores_is_scored_once(tmp_path):
    ask(opened(tmp_path), *QUESTIONS[:2])
    assert not [*tmp_path.glob("*.scores")]
    second = opened(tmp_path)
    check_scores(ask(second, QUESTIONS[2], scored=True, new=0), QUESTIONS[2:3])
    assert second.counts.tokens_kept == 0 and len([*tmp_path.glob("*.scores")]) == 1
    third = opened(tmp_path)
    check_scores(ask(third, QUESTIONS[3], scored=True, new=0), QUESTIONS[3:4])
    assert third.counts.tokens_kept == READ


def test_more_likeliest_tokens_than_are_kept_are_computed(tmp_path):
    ask(opened(tmp_path), *QUESTIONS[:2], scored=True, new=0)
    again = opened(tmp_path)
    answer = scheduler_worker.ask(again, QUESTIONS[2], score_from=1, top=3)
    again.run()
    check_scores([answer], QUESTIONS[2:3])
    assert answer.scores.top_tokens.shape == (len(QUESTIONS[2]) - 1, 3)
    assert again.counts.tokens_kept == 0


def test_damaged_scores_are_computed_again(tmp_path, caplog):
    ask(opened(tmp_path), *QUESTIONS[:2], scored=True, new=0)
    (file,) = tmp_path.glob("*.scores")
    whole, again = file.read_bytes(), opened(tmp_path)
    unknown = load_file(file)
    unknown["top_tokens"][3] = 1 << 40
    again._prompts._cache.save_scores(file.name, unknown)
    flipped = whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]
    for content in (file.read_bytes(), flipped, whole[:99]):
        file.write_bytes(content)
        again = opened(tmp_path)
        caplog.clear()
        check_scores(ask(again, *QUESTIONS, scored=True, new=0), QUESTIONS)
        assert again.counts.tokens_kept == 0 and "its tokens are read again" in caplog.text


def test_servers_that_run_at_once_see_what_others_keep(tmp_path):
    first, second = opened(tmp_path), opened(tmp_path)
    ask(first, *QUESTIONS[:2])
    ask(second, QUESTIONS[2])
    assert second.counts.tokens_kept == READ


def test_a_damaged_state_is_read_again(tmp_path, caplog):
    folder = tmp_path / "states"
    ask(opened(folder), *QUESTIONS[:2])
    (file,) = folder.glob("*.state")
    whole = file.read_bytes()
    for content in (whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:], None):
        again = opened(folder)
        caplog.clear()
        if content:
            file.write_bytes(content)
        else:
            shutil.rmtree(folder)
        assert [a.ids for a in ask(again, *QUESTIONS)] == expected(QUESTIONS)
        assert again.counts.tokens_kept == 0
        assert ("its tokens are read again" in caplog.text) == (content is not None)


@st.composite
def talks(draw):
    """Prompts that begin alike, to be scored or continued, and where a new server begins."""
    books = [random_ids(draw(st.integers(1, 40)), seed) for seed in range(draw(st.integers(1, 3)))]
    asked = []
    for number in range(draw(st.integers(2, 8))):
        book = draw(st.sampled_from(books))
        own = random_ids(draw(st.integers(1, 20)), 100 + number)
        ids = [*book[: draw(st.integers(0, len(book)))], *own]
        asked.append((ids, draw(st.booleans()), draw(st.integers(0, 4)) == 0))
    return asked


@settings(max_examples=examples(8), phases=[Phase.generate])
@given(talks(), st.integers(1, 6))
def test_answers_are_the_same_whatever_is_on_disk(asked, states):
    with tempfile.TemporaryDirectory() as folder:
        scheduler, answers = opened(folder, states=states), []
        for ids, scored, anew in asked * 2:
            if anew:
                scheduler.run()
                scheduler = opened(folder, states=states, limit=100_000)
            more = {"score_from": 1, "top": 1} if scored else {}
            answers.append(scheduler_worker.ask(scheduler, ids, max_new_tokens=3, **more))
            scheduler._step()
        scheduler.run()
    right = expected([ids for ids, *_ in asked], 3)
    for (ids, scored, _), answer, new in zip(asked * 2, answers, right * 2, strict=True):
        assert answer.ids == new and answer.reason == "length"
        if scored:
            logprobs, _ = scores_alone(ids)
            np.testing.assert_allclose(answer.scores.logprobs, logprobs, atol=1e-5)
