"""States on disk change how much is read, and no answer."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from fake_runner import CONFIG, FakeRunner
from fixtures_engine import (
    continuations_and_stats,
    random_ids,
    scores_and_stats,
    small_runner,
    states,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from parity import BASE
from slow import examples, slow
from typer.testing import CliRunner

import griffin_eval
from griffin_eval.cli.main import app
from griffin_eval.engine import kept
from griffin_eval.engine.generation import Prompt
from griffin_eval.engine.limits import Limits
from griffin_eval.engine.tree import Ablation, Scorable
from griffin_eval.errors import ArgumentError, BadInput
from griffin_eval.lm.model import GriffinLM
from griffin_eval.states import state_cache
from griffin_eval.states.state_cache import StateCache

CHECKPOINT = Path(griffin_eval.__file__).parent / "checkpoints" / "bytes_griffin"
LIMITS = Limits(32, 4)


@pytest.fixture(scope="module", autouse=True)
def short():
    """Beginnings short enough for small trees."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_cache, "STEP", 4)
        patch.setattr(kept, "MIN_TOKENS", 4)
        yield


def opened(folder, runner, limit=1 << 40, **other) -> StateCache:
    model = {
        "config": runner.config,
        "weights_sha256": "0" * 64,
        "tokenizer": None,
        "dtype": runner.dtype,
        "framework": runner.framework,
    }
    return StateCache(folder, limit, **(model | other))


@functools.cache
def runner_of(kind):
    config = dataclasses.replace(BASE, block_pattern=("global_attention",))
    return FakeRunner() if kind == "fake" else small_runner("torch", config)


@st.composite
def trees(draw):
    """Texts that share beginnings, and beginnings of these; some with a memory cleared."""
    books = [random_ids(draw(st.integers(1, 40)), seed) for seed in range(draw(st.integers(1, 3)))]
    sequences = []
    for number in range(draw(st.integers(1, 9))):
        book = draw(st.sampled_from(books))
        context = book[: draw(st.integers(1, len(book)))] if draw(st.booleans()) else book
        ids = [*context, *random_ids(draw(st.integers(1, 9)), 100 + number)]
        start = draw(st.integers(1, len(ids)))
        ablation = draw(st.sampled_from([Ablation.NOTHING, Ablation.NOTHING, Ablation.RECURRENT]))
        sequences.append(Scorable(ids, start, ablation))
    return sequences


@pytest.mark.parametrize("kind", ["fake", "global attention"])
@settings(max_examples=examples(4), phases=[Phase.generate])
@given(trees(), st.integers(1, 4))
def test_answers_are_the_same_whatever_is_on_disk(kind, sequences, fit):
    runner = runner_of(kind)
    limits = Limits(32, 4, states(runner, fit))
    expected, plain = scores_and_stats(runner, sequences, limits)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(3):
            asked = sequences[::2] if number == 0 else sequences
            found, stats = scores_and_stats(runner, asked, limits, cache=opened(folder, runner))
            right = expected[::2] if number == 0 else expected
            for mine, other in zip(found, right, strict=True):
                np.testing.assert_allclose(mine.logprobs, other.logprobs, rtol=1e-4, atol=1e-5)
            if number:
                assert stats.tokens_unique + stats.tokens_kept == plain.tokens_unique


BOOK = random_ids(61, 1)
QUESTIONS = [Scorable([*BOOK, *random_ids(6, seed)], 62) for seed in range(5)]
PROMPTS = [Prompt([*BOOK, *random_ids(6, seed)], 4) for seed in range(5)]
READ = 59  # a multiple of 4, less the last token, which is not in the state


@pytest.mark.parametrize(
    ("writer", "reader"), [("fake", "fake"), slow("torch", "jax"), slow("jax", "torch")]
)
def test_a_second_run_reads_no_book_in_either_framework(writer, reader, tmp_path):
    runner, again = (
        FakeRunner() if kind == "fake" else small_runner(kind) for kind in (writer, reader)
    )
    first, stats = scores_and_stats(runner, QUESTIONS, LIMITS, cache=opened(tmp_path, runner))
    assert stats.tokens_kept == 0 and len(list(tmp_path.glob("*.state"))) == 1
    second, stats = scores_and_stats(again, QUESTIONS, LIMITS, cache=opened(tmp_path, again))
    assert stats.tokens_kept == READ
    for mine, other in zip(second, first, strict=True):
        np.testing.assert_allclose(mine.logprobs, other.logprobs, rtol=1e-4, atol=1e-5)
    # Other questions of another kind, on the same book.
    found, stats = continuations_and_stats(again, PROMPTS, LIMITS, cache=opened(tmp_path, again))
    assert stats.tokens_kept == READ
    assert found == continuations_and_stats(again, PROMPTS, LIMITS)[0]


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_prompts_of_several_books_continue_their_own(rows, tmp_path):
    runner, limits = FakeRunner(), Limits(512, rows)
    books = [random_ids(61, seed) for seed in range(4)]
    prompts = [
        Prompt([*book, *random_ids(6, 10 * number + question)], 5)
        for number, book in enumerate(books)
        for question in range(2)
    ]
    expected = continuations_and_stats(runner, prompts, limits)[0]
    for tokens in (0, 4 * READ):
        cache = opened(tmp_path, runner)
        found, stats = continuations_and_stats(runner, prompts, limits, cache=cache)
        assert found == expected and stats.tokens_kept == tokens


def test_nothing_is_taken_of_another_model(tmp_path):
    runner = runner_of("fake")
    scores_and_stats(runner, QUESTIONS, LIMITS, cache=opened(tmp_path, runner))
    others: list[dict] = [
        {"weights_sha256": "1" * 64},
        {"dtype": "bfloat16"},
        {"tokenizer": "other"},
        {"config": dataclasses.replace(CONFIG, norm_eps=0.1)},
    ]
    for count, other in enumerate(others, 2):
        cache = opened(tmp_path, runner, **other)
        _, stats = scores_and_stats(runner, QUESTIONS, LIMITS, cache=cache)
        assert stats.tokens_kept == 0 and len(list(tmp_path.glob("*.state"))) == count, other


def test_a_damaged_state_is_read_again(tmp_path, caplog):
    runner = runner_of("fake")
    right, _ = scores_and_stats(runner, QUESTIONS, LIMITS, cache=opened(tmp_path, runner))
    other = [Scorable([*random_ids(61, 7), *random_ids(6, seed)], 62) for seed in range(2)]
    scores_and_stats(runner, other, LIMITS, cache=opened(tmp_path / "other", runner))
    (file,), (another,) = tmp_path.glob("*.state"), (tmp_path / "other").glob("*.state")
    whole = file.read_bytes()
    flipped = whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:]
    for content in (flipped, whole[:99], b"", another.read_bytes(), None):
        cache = opened(tmp_path, runner)
        caplog.clear()
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        found, stats = scores_and_stats(runner, QUESTIONS, LIMITS, cache=cache)
        assert stats.tokens_kept == 0
        assert ("its tokens are read again" in caplog.text) == (content is not None)
        for mine, other in zip(found, right, strict=True):
            np.testing.assert_allclose(mine.logprobs, other.logprobs, rtol=1e-5)
        # It is kept anew.
        _, stats = scores_and_stats(runner, QUESTIONS, LIMITS, cache=opened(tmp_path, runner))
        assert stats.tokens_kept == READ


def test_what_was_not_used_for_longest_is_removed(tmp_path):
    runner = runner_of("fake")
    asked = [
        [Scorable([*random_ids(61, b), *random_ids(6, s)], 62) for s in (8, 9)] for b in (1, 2, 3)
    ]
    scores_and_stats(runner, asked[0], LIMITS, cache=opened(tmp_path, runner))
    size = next(tmp_path.glob("*.state")).stat().st_size
    stranger = tmp_path / "notes.txt"
    stranger.write_text("not a state")
    for some in (asked[1], asked[0], asked[2]):  # the first one is used once more
        time.sleep(0.05)  # times of files are counted in steps of a few milliseconds
        cache = opened(tmp_path, runner, limit=2 * size + 100)
        scores_and_stats(runner, some, LIMITS, cache=cache)
    kept_now = []
    for some in asked:
        cache = opened(tmp_path, runner)
        kept_now.append(any(key in cache for key in keys_of(cache, some[0].path)))
    assert kept_now == [True, False, True] and stranger.exists()


def test_one_that_is_larger_than_the_limit_removes_no_other(tmp_path, caplog):
    runner = runner_of("fake")
    scores_and_stats(runner, QUESTIONS, LIMITS, cache=opened(tmp_path, runner))
    there = {path.name for path in tmp_path.iterdir()}
    cache = opened(tmp_path, runner, limit=10)
    asked = [Scorable([*random_ids(61, 9), *random_ids(6, s)], 62) for s in (8, 9)]
    scores_and_stats(runner, asked, LIMITS, cache=cache)
    assert there and {path.name for path in tmp_path.iterdir()} == there
    assert caplog.text.count("more than all may take (10), and is not kept") == 1


def test_other_users_read_what_one_has_kept(tmp_path, monkeypatch, caplog):
    """Files are as readable as the umask says, and need not be theirs."""
    runner = runner_of("fake")
    scores_and_stats(runner, QUESTIONS, LIMITS, cache=opened(tmp_path, runner))
    mask = os.umask(0)
    os.umask(mask)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~mask}

    def denied(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", denied)
    _, stats = scores_and_stats(runner, QUESTIONS, LIMITS, cache=opened(tmp_path, runner))
    assert stats.tokens_kept == READ and not caplog.text


def test_what_a_killed_process_left_is_removed(tmp_path):
    runner = runner_of("fake")
    old, new = (tmp_path / f".{'0' * 64}.state.{n}" for n in "ab")
    for path in (old, new):
        path.write_bytes(b"half of it")
    os.utime(old, (0, 0))
    scores_and_stats(runner, QUESTIONS, LIMITS, cache=opened(tmp_path, runner))
    assert new.exists() and not old.exists()


def keys_of(cache, path):
    return [each.key for each in cache.beginning().longer(path, len(path))]


def test_a_full_disk_ends_nothing(tmp_path, monkeypatch, caplog):
    runner = runner_of("fake")
    expected, _ = scores_and_stats(runner, QUESTIONS, LIMITS)

    def full(*_):
        raise BadInput("there cannot be written: No space left on device")

    monkeypatch.setattr(state_cache.SavedState, "save", full)
    found, _ = scores_and_stats(runner, QUESTIONS, LIMITS, cache=opened(tmp_path, runner))
    assert "no more states are kept" in caplog.text
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine.logprobs, other.logprobs, rtol=1e-5)


TEXT = "The cat sat on the mat, and the dog sat on the cat. " * 20
PAIRS = [
    (TEXT + question, answer) for question in ("Who sat?", "Where?") for answer in (" a", " b")
]


def log_likelihoods(lm, pairs):
    return lm.loglikelihood([Instance("loglikelihood", {}, p, i) for i, p in enumerate(pairs)])


@pytest.mark.parametrize("framework", ["torch", slow("jax")])
def test_in_lm_eval(framework, tmp_path, monkeypatch):
    monkeypatch.setattr(state_cache, "STEP", 32)
    monkeypatch.setattr(kept, "MIN_TOKENS", 512)

    def model(**more):
        return GriffinLM(str(CHECKPOINT), framework, dtype="float32", **more)

    expected = log_likelihoods(model(), PAIRS)
    folder = tmp_path / "states"
    first, second = (model(state_cache=str(folder), state_cache_size="1GB") for _ in range(2))
    assert log_likelihoods(first, PAIRS) == [
        (pytest.approx(x, rel=1e-4), greedy) for x, greedy in expected
    ]
    second = model(state_cache=str(folder))
    found = log_likelihoods(second, PAIRS)
    assert found == [(pytest.approx(x, rel=1e-4), greedy) for x, greedy in expected]
    info = second.get_model_info()
    assert len(TEXT) - 32 <= info["griffin_tokens_kept"] <= len(TEXT) + 1
    assert info["griffin_tokens_computed"] < 100


def test_what_cannot_be_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="state_cache=.* cannot be used"):
        GriffinLM(str(CHECKPOINT), "torch", state_cache=str(tmp_path / "file"))
    with pytest.raises(ArgumentError, match="state= and state_cache="):
        GriffinLM(str(CHECKPOINT), "torch", state="a", state_cache="b")
    with pytest.raises(ArgumentError, match="state_cache_size"):
        GriffinLM(str(CHECKPOINT), "torch", state_cache="b", state_cache_size="many")
    with pytest.raises(ArgumentError, match="state_cache_size= needs state_cache="):
        GriffinLM(str(CHECKPOINT), "torch", state_cache_size="1GB")
    done = CliRunner().invoke(app, ["serve", str(CHECKPOINT), "--state-cache-size", "1GB"])
    assert "--state-cache-size needs --state-cache" in str(done.exception)


SPLIT = """
import json, sys
from lm_eval.api.instance import Instance
from griffin_eval.lm.model import GriffinLM

pairs = [tuple(pair) for pair in json.loads(sys.argv[2])]
more = {"tensor_parallel_size": 2, "dtype": "float32"} | json.loads(sys.argv[3])
lm = GriffinLM(sys.argv[1], "torch", **more)
answers = lm.loglikelihood([Instance("loglikelihood", {}, p, i) for i, p in enumerate(pairs)])
info = lm.get_model_info()
print(json.dumps([answers, info["griffin_tokens_kept"], info["griffin_tokens_computed"]]))
"""


@pytest.mark.slow
def test_processes_that_share_a_model_share_its_states(tmp_path, monkeypatch):
    monkeypatch.setattr(state_cache, "STEP", 32)
    monkeypatch.setattr(kept, "MIN_TOKENS", 512)
    folder = tmp_path / "states"

    def split(pairs, **more):
        command = [sys.executable, "-c", SPLIT, CHECKPOINT, json.dumps(pairs), json.dumps(more)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        answers, kept, computed = json.loads(done.stdout)
        return [(logprob, greedy) for logprob, greedy in answers], kept, computed

    def same(found, expected):
        return found == [(pytest.approx(x, rel=1e-4), greedy) for x, greedy in expected]

    expected = log_likelihoods(GriffinLM(str(CHECKPOINT), "torch", dtype="float32"), PAIRS)
    found, kept_before, _ = split(PAIRS, state_cache=str(folder))
    assert same(found, expected) and kept_before == 0
    one = GriffinLM(str(CHECKPOINT), "torch", dtype="float32", state_cache=str(folder))
    assert same(log_likelihoods(one, PAIRS), expected)
    assert one.get_model_info()["griffin_tokens_kept"] >= len(TEXT) - 32
    found, kept_now, computed = split(PAIRS, state_cache=str(folder))
    assert same(found, expected) and kept_now >= len(TEXT) - 32 and computed < 100
