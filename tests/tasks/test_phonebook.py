"""The phonebook tasks: questions, and whole runs of lm_eval."""

import hashlib
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import examples, fast

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

import griffin_eval.tasks
from griffin_eval.errors import ArgumentError
from griffin_eval.lm.model import GriffinLM
from griffin_eval.tasks.metadata import visible_keys_of
from griffin_eval.tasks.phonebook import datasets, published
from griffin_eval.tasks.phonebook.lengths import EntrySpan
from griffin_eval.tasks.phonebook.metrics import first_line

FOLDER = Path(griffin_eval.tasks.__file__).parent / "phonebook"
TASK = "griffin_phonebook"
ENTRY = re.compile(r"[A-Z][A-Za-z]+ [A-Z][A-Za-z]+: [6-9][0-9]{9}")


def rows(kind="", **metadata):
    make = getattr(datasets, f"{kind}_dataset" if kind else "dataset")
    return list(make(**metadata)["test"])


def entries(prompt):
    """Return the names and numbers in a prompt's book."""
    return [tuple(line.split(": ")) for line in prompt.split("\n\n")[0].split("\n")]


def look_up(prompt):
    """Return the number asked for, or "" if the name is not in the book."""
    return dict(entries(prompt)).get(prompt.rsplit("\n", 1)[-1].removesuffix(":"), "")


class Model(LM):
    """A model that answers every prompt with ``answer(prompt)``, and gives a number the
    log-likelihood ``score(prompt, number)``."""

    def __init__(self, answer=lambda prompt: "", score=lambda prompt, number: 0.0):
        super().__init__()
        self.answer, self.score = answer, score

    def generate_until(self, requests):
        assert all(r.args[1]["until"] == ["\n"] for r in requests)
        assert not any(r.args[1]["do_sample"] for r in requests)
        return [self.answer(request.args[0]) for request in requests]

    def loglikelihood(self, requests):
        assert all(re.fullmatch(" [6-9][0-9]{9}", r.args[1]) for r in requests)
        pairs = [(prompt, number.strip()) for prompt, number in (r.args for r in requests)]
        return [(self.score(*pair), self.answer(pair[0]) == pair[1]) for pair in pairs]

    loglikelihood_rolling = None


def run(lm, task=TASK, metadata=None, **arguments):
    """Return lm_eval's results, and the task's metrics without lm_eval's endings."""
    tasks = TaskManager(include_path=FOLDER, include_defaults=False, metadata=metadata)
    results = simple_evaluate(lm, tasks=[task], task_manager=tasks, bootstrap_iters=2, **arguments)
    assert results is not None
    values = {key.removesuffix(",none"): v for key, v in results["results"].get(task, {}).items()}
    return results, {key: v for key, v in values.items() if "_stderr" not in key}


# Questions


@settings(max_examples=examples(20))
@given(
    length=st.integers(3, 40), queries=st.integers(1, 70), samples=st.integers(1, 3),
    seed=st.integers(0, 5),
)  # fmt: skip
def test_every_question_has_one_answer(length, queries, samples, seed):
    asked = rows(entries=length, queries=queries, samples=samples, seed=seed)
    assert len(asked) == samples * min(queries, length - 2)
    for row in asked:
        book, examples, question = row["prompt"].split("\n\n")
        lines, pair = book.split("\n"), examples.split("\n")
        assert all(ENTRY.fullmatch(line) for line in lines)
        assert len(lines) == row["entries"] == row["length"] == length
        assert len(set(pair)) == 2 and set(pair) <= set(lines)
        assert question == f"{row['name']}:"  # no space after it
        assert lines[row["position"]] == f"{row['name']}: {row['answer']}"
        assert row["prompt"].count(row["answer"]) == 1  # not among the examples
        assert look_up(row["prompt"]) == row["answer"]
        names, numbers = zip(*entries(row["prompt"]), strict=True)
        assert len(set(names)) == len(set(numbers)) == length
    assert len({(row["book"], row["position"]) for row in asked}) == len(asked)


@settings(max_examples=examples(8))
@given(length=st.integers(20, 80), queries=st.integers(1, 16), seed=st.integers(0, 5))
def test_depths_are_balanced(length, queries, seed):
    asked = rows(entries=length, queries=queries, samples=30, seed=seed)

    def depths(some):
        """Return each row's position among the entries that are no examples, from 0 to 1."""
        found = []
        for row in some:
            book, examples, _ = row["prompt"].split("\n\n")
            lines = [line for line in book.split("\n") if line not in examples]
            found.append(lines.index(f"{row['name']}: {row['answer']}") / len(lines))
        return np.sort(found)

    def discrepancy(some):  # largest distance from the uniform distribution
        return np.abs(some - (np.arange(len(some)) + 0.5) / len(some)).max()

    step = 1 / (length - 2)
    first = [row for row in asked if row["query"] == 0]
    assert discrepancy(depths(first)) < 0.1 + step  # these are the rows that --limit leaves
    for book in range(30):  # questions on a book are as far apart as can be
        gaps = np.diff(depths([row for row in asked if row["book"] == book]))
        assert (np.abs(gaps - 1 / queries) <= step + 1e-9).all()


HASHES = {
    "dataset": "ea47d515225c60ecfe27a1f7a8450bf85b4c65ff335e6798336c55c805adf5e8",
    "absent_dataset": "143b0cc32e6439bf0e3d04beaa3fb09d96b07bbe109cc33db1ead8f018453a35",
    "rank_dataset": "5c1832539c6efa9787aba89c3138650c5075ab912c505333051aebf719782b6d",
    "counterfactual_dataset": "25bbe10cfae6b1982c88a09f0647ff8b53c5e791421e4366c1b52d9380354bd0",
}


def test_the_same_everywhere():
    """The hashes of the defaults, whatever the process, platform or version of Python."""
    found = [getattr(datasets, name)()["test"][0]["dataset_sha256"] for name in HASHES]
    assert found == list(HASHES.values())


def test_lengths_take_turns_then_books():
    asked = rows(entries=[3, 10, 60, 10], samples=2, queries=2)
    assert [row["length"] for row in asked[:6]] == [3, 10, 60] * 2
    assert [(row["book"], row["query"]) for row in asked[:9:3]] == [(0, 0), (1, 0), (0, 1)]


def test_more_books_lengths_and_questions_leave_the_others_as_they_are():
    def books(**metadata):
        return {
            (row["length"], row["book"]): row["prompt"].rsplit("\n", 1)[0]
            for row in rows(**metadata)
        }

    few = books(entries=10, samples=7, seed=5)
    many = books(entries=[4, 10], samples=9, queries=3, seed=5)
    assert few.items() <= many.items()


def test_metadata_that_cannot_be():
    for metadata, message in (
        ({"entries": 2}, "entries must be an integer of at least 3 .* found 2"),
        ({"entries": [20, 2]}, r"found \[20, 2\]"),
        ({"entries": 10**6}, "entries must be at most [0-9]+, found 1000000"),
        ({"entries": "20"}, "found '20'"),
        ({"entries": []}, r"found \[\]"),
        ({"entries": [20.5]}, r"found \[20.5\]"),
        ({"samples": 0}, "samples must be an integer of at least 1, found 0"),
        ({"samples": None, "queries": True}, "samples .* found None; queries .* found True"),
        ({"seed": 1 << 63}, "seed must be an integer of at least 0, found 9223372036854775808"),
        ({"seed": "a"}, "seed must be an integer of at least 0, found 'a'"),
        ({"candidates": 1}, "candidates must be an integer of at least 2, found 1"),
        ({"tokens": "many"}, "tokens must be an integer .* found 'many'"),
        ({"tokens": 1000}, "lengths in tokens need a tokenizer"),
        ({"visible_keys": 0}, "visible_keys must be an integer of at least 1, found 0"),
        ({"window": 0}, "window must be an integer of at least 1, found 0"),
        (
            {"visible_keys": 8, "window": 9},
            "visible_keys=8 and window=9 .* give visible_keys alone",
        ),
    ):
        with pytest.raises(ArgumentError, match=message) as caught:
            rows(**metadata)
        assert "\n" not in str(caught.value)


# Controls


def test_absent_names_and_numbers_stand_nowhere():
    asked, absent = rows(entries=12, samples=4), rows("absent", entries=12, samples=4)
    for question, other in zip(asked, absent, strict=True):
        names, numbers = zip(*entries(other["prompt"]), strict=True)
        assert other["name"] not in names and other["answer"] not in numbers
        shared = question["prompt"].removesuffix(f"{question['name']}:")
        assert other["prompt"] == f"{shared}{other['name']}:"
    assert len({(row["book"], row["name"]) for row in absent}) == len(absent)


def test_candidates_are_of_the_book_and_no_examples():
    for row in rows("rank", entries=[6, 40], samples=5, candidates=7):
        book, examples, _ = row["prompt"].split("\n\n")
        numbers = [number for _, number in entries(book) if number not in examples]
        assert len(set(row["candidates"])) == len(row["candidates"]) == min(7, row["entries"] - 2)
        assert row["candidates"] == [n for n in numbers if n in row["candidates"]]
        assert row["answer"] in row["candidates"]
        assert row["absent_number"] not in row["prompt"]
        assert row["absent_prompt"].rsplit("\n", 1)[0] == row["prompt"].rsplit("\n", 1)[0]


def test_a_changed_book_differs_in_one_number():
    asked = rows("counterfactual", entries=[6, 40], samples=5)
    assert len(asked) == 10  # one question a book
    first = [row for row in rows(entries=[6, 40], samples=5) if row["query"] == 0]
    for row, plain in zip(asked, first, strict=True):
        assert row["prompt"] == plain["prompt"] and row["new_number"] not in row["prompt"]
        assert row["prompt"].replace(row["answer"], row["new_number"]) == row["new_prompt"]
        assert look_up(row["new_prompt"]) == row["new_number"]


# Comparison with the published code


def test_the_published_generator_gives_the_same():
    """The hash is of the published code's output (commit 1f32ac6, names 0.3.0) for these seeds."""
    asked = published.documents([3, 20, 200], samples=4, seed=0)
    asked.sort(key=lambda row: (row["length"], row["book"]))
    text = "\n".join(f"{row['prompt']}|{row['answer']}" for row in asked)
    assert hashlib.sha256(text.encode()).hexdigest() == PUBLISHED


PUBLISHED = "884b238d5bb8de82171dc962340f8a7fddb1c620da5a2cf00154cc072d0937f8"


def test_published_format_and_defaults():
    asked = list(published.dataset(entries=[3, 30], queries=9, tokens=5)["test"])
    assert [row["length"] for row in asked[:4]] == [3, 30, 3, 30]
    assert len(asked) == 2 * 96  # three batches of 32
    for row in asked:
        book, examples, question = row["prompt"].split("\n\n")
        lines, pair = book.split("\n"), examples.split("\n")
        assert len(lines) == row["length"] and all(ENTRY.fullmatch(line) for line in lines)
        assert question == f"{row['name']}:"
        assert lines[row["position"]] == f"{row['name']}: {row['answer']}"
        drawn = Counter([*pair, lines[row["position"]]])
        assert drawn <= Counter(lines)  # without replacement


# Lengths in tokens


def test_tokens_are_filled(checkpoint):
    metadata = {"tokens": [200, 700], "samples": 3, "queries": 4, "pretrained": str(checkpoint)}
    asked = rows(**metadata)
    tokenizer = datasets.find_tokenizer(metadata)
    for row in asked:
        used = len(tokenizer.encode(row["prompt"]))
        assert row["prompt_tokens"] == used <= row["length"]
        assert used > row["length"] - 60  # another entry would not fit
    assert {row["length"] for row in asked} == {200, 700}
    with pytest.raises(ArgumentError, match="tokens must be at least [0-9]+ for a book of 3"):
        rows(**metadata | {"tokens": 20})


def test_entry_spans_count_keys_from_the_end(checkpoint):
    metadata = {"entries": [5, 30], "samples": 2, "pretrained": str(checkpoint)}
    tokenizer = datasets.find_tokenizer(metadata)
    for row in rows(**metadata):
        lines = row["prompt"].split("\n")
        start = "\n".join(lines[: row["position"]])
        tail = row["prompt"][len(start) :].lstrip("\n")
        assert row["reach"] == len(tokenizer.encode(tail))
        between = row["prompt"].split(f"{row['name']}: {row['answer']}")[1]
        between = between.removesuffix(f"{row['name']}:")
        assert row["gap"] == len(tokenizer.encode(between)) + 2
        assert row["inside_window"] == EntrySpan(0, row["reach"], row["gap"]).inside(128)


def test_inside_and_outside():
    span = EntrySpan(prompt_tokens=500, reach=100, gap=80)
    assert [span.inside(keys) for keys in (79, 80, 99, 100)] == [False, None, None, True]


def test_window(checkpoint):
    assert visible_keys_of() is visible_keys_of(pretrained="/nowhere") is None
    assert visible_keys_of(pretrained=str(checkpoint)) == 128
    for known in ({"visible_keys": 77}, {"window": 77}, {"visible_keys": 77, "window": 77}):
        assert visible_keys_of(pretrained=str(checkpoint), **known) == 77
    with pytest.raises(ArgumentError, match="visible_keys=77 and window=78 are two names of one"):
        visible_keys_of(pretrained=str(checkpoint), visible_keys=77, window=78)


def test_the_hash_is_of_the_questions_alone(checkpoint):
    plain, measured = rows(entries=5), rows(entries=5, pretrained=str(checkpoint))
    assert plain[0]["prompt_tokens"] is None is not measured[0]["prompt_tokens"]
    assert plain[0]["dataset_sha256"] == measured[0]["dataset_sha256"]


# Runs of lm_eval


def test_what_counts_as_the_answer():
    for generated, answer in (
        (" 6123456789", "6123456789"),
        ("6123456789  \nJohn Smith: 7123456789", "6123456789"),
        ("\n6123456789", ""),
        ("6123456789.", "6123456789."),
    ):
        assert first_line(generated) == answer


def test_a_model_that_looks_it_up():
    metadata = {"entries": [3, 10], "samples": 30, "queries": 2}
    results, found = run(Model(lambda prompt: f" {look_up(prompt)}\nSo"), metadata=metadata)
    assert found["exact_match"] == found["exact_match@3"] == found["exact_match@10"] == 1
    assert found["exact_match@3_high"] == 1 > found["exact_match@3_low"] > 0.85
    assert found["capacity"] == found["capacity_low"] == found["capacity_high"] == ">10"
    assert "exact_match@inside_window" not in found
    assert results["n-samples"][TASK] == {"original": 90, "effective": 90}
    assert set(results["higher_is_better"][TASK].values()) == {True}


def test_accuracy_by_length_and_capacity():
    def answer(prompt):
        return look_up(prompt) if len(entries(prompt)) < 10 else "6000000000"

    found = run(Model(answer), metadata={"entries": [4, 9, 16], "samples": 10})[1]
    assert (found["exact_match@9"], found["exact_match@16"]) == (1, 0)
    assert found["capacity"] == pytest.approx(12)  # half of the way over the logarithm
    assert 9 < found["capacity_low"] < 12 < found["capacity_high"] < 16


def test_by_depth():
    def answer(prompt):  # finds names in the first two fifths of a book
        book = entries(prompt)
        known = [name for name, _ in book[: len(book) * 2 // 5]]
        return look_up(prompt) if prompt.rsplit("\n", 1)[-1].removesuffix(":") in known else "6"

    results, found = run(Model(answer), metadata={"entries": [20, 50], "samples": 10})
    by_depth = [found[f"exact_match_by_depth@{depth}"] for depth in (10, 30, 50, 70, 90)]
    assert by_depth == [1, 1, 0, 0, 0]
    digest = results["configs"][TASK]["metadata"]["dataset_sha256"]
    assert digest == rows(entries=[20, 50], samples=10)[0]["dataset_sha256"]


def test_by_window(checkpoint):
    def answer(prompt):  # sees only the context of a model without a state
        near = Model.rows[prompt]["inside_window"]
        return look_up(prompt) if near else "6000000000"

    metadata = {"entries": [3, 30], "samples": 3, "pretrained": str(checkpoint)}
    Model.rows = {row["prompt"]: row for row in rows(**metadata)}
    found = run(Model(answer), metadata=metadata)[1]
    assert (found["exact_match@inside_window"], found["exact_match@outside_window"]) == (1, 0)


def test_absent_names():
    def answer(prompt):
        return look_up(prompt) or entries(prompt)[0][1]

    task = f"{TASK}_absent"
    found = run(Model(answer), task, {"entries": [5, 9], "samples": 3})[1]
    assert (found["from_book"], found["exact_match"]) == (1, 0)
    found = run(Model(lambda prompt: "unknown"), task, {"entries": [5, 9], "samples": 3})[1]
    assert found["from_book@9"] == 0


def test_no_space_follows_a_chat_template():
    folder, metadata = str(Path(griffin_eval.tasks.__file__).parent), {"entries": [4], "samples": 1}
    manager = TaskManager(include_path=folder, include_defaults=False, metadata=metadata)
    task = manager.load([f"{TASK}_rank"])["tasks"][f"{TASK}_rank"]
    doc = next(iter(task.test_docs()))
    for templated, space in ((True, ""), (False, " ")):
        options = {"metadata": ("a", 0, 1), "apply_chat_template": templated}
        found = [
            each.args for each in task.construct_requests(doc, doc["prompt"] + "\n", **options)
        ]
        assert (doc["prompt"] + "\n", space + doc["answer"]) in found


def test_ranks_of_a_model_that_looks_it_up():
    def score(prompt, number):
        return -1.0 if number == look_up(prompt) else -30.0 if number in prompt else -50.0

    metadata = {"entries": [10, 40], "samples": 3}
    results, found = run(Model(score=score), f"{TASK}_rank", metadata)
    assert (found["rank"], found["first@40"], found["loglikelihood@10"]) == (1, 1, -1)
    assert (found["name_effect"], found["absent_loglikelihood"]) == (29, -50)
    chance = results["configs"][f"{TASK}_rank"]["metadata"]["chance"]
    assert chance == {"rank@10": 4.5, "first@10": 1 / 8, "rank@40": 8.5, "first@40": 1 / 16}


def test_ranks_are_at_chance_without_the_name():
    def score(prompt, number):  # prefers the latest number
        return float(prompt.index(number) if number in prompt else 0)

    found = run(Model(score=score), f"{TASK}_rank", {"entries": 40, "samples": 60})[1]
    assert found["rank_low"] <= 8.5 <= found["rank_high"]
    assert found["rank_high"] - found["rank_low"] < 3
    assert found["first_low"] < 1 / 16 < found["first_high"]


def test_counterfactual_numbers():
    def score(prompt, number):
        return -1.0 if number == look_up(prompt) else -30.0

    metadata, task = {"entries": [10, 40], "samples": 3}, f"{TASK}_counterfactual"
    found = run(Model(look_up, score), task, metadata)[1]
    assert (found["follows"], found["prefers@40"], found["effect"]) == (1, 1, 29)
    known = {}  # a model that never revises its first answer

    def stuck(prompt):
        return known.setdefault(prompt.rsplit("\n", 1)[-1], look_up(prompt))

    found = run(Model(stuck, lambda p, n: -float(n != stuck(p))), task, metadata)[1]
    assert (found["follows"], found["prefers"], found["effect"]) == (0, 0, 0)


def test_a_limit_that_leaves_a_length_out():
    found = run(Model(look_up), limit=3)[1]
    assert found["exact_match@20"] == found["exact_match@100"] == 1
    assert found["exact_match@200"] == "N/A"


@pytest.mark.parametrize(
    "kind", fast([""], ["", "_absent", "_rank", "_counterfactual", "_jelassi"])
)
def test_every_document_scores_every_key(kind):
    # If several processes share the documents, lm_eval fails on keys that one process lacks.
    task = TASK + kind
    results, _ = run(Model(look_up), task, {"entries": [4, 5], "samples": 1})
    keys = {frozenset(sample["metrics"]) for sample in results["samples"][task]}
    assert len(keys) == 1
    assert run(Model(look_up), task, predict_only=True, limit=2)[1].keys() <= {
        *("alias", "name", "sample_len", "bypass", " ")
    }


def test_the_prompt_takes_no_examples_and_no_other_changes():
    prompts = []
    metadata = {"entries": 5, "samples": 2}
    run(Model(lambda prompt: prompts.append(prompt) or ""), metadata=metadata, num_fewshot=3)
    assert prompts == [row["prompt"] for row in rows(**metadata)]


def test_cached_requests_of_another_book_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path))
    metadata, lm = {"entries": 5, "samples": 2}, Model(look_up)
    for _ in range(2):
        assert run(lm, metadata=metadata, cache_requests=True)[1]["exact_match"] == 1
    assert list(tmp_path.iterdir())
    metadata |= {"seed": 1}
    with pytest.raises(ArgumentError, match="--cache_requests refresh"):
        run(lm, metadata=metadata, cache_requests=True)
    again = run(lm, metadata=metadata, cache_requests=True, rewrite_requests_cache=True)
    assert again[1]["exact_match"] == 1


# With models


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self, tokenizer):
        self._tokenizer, self.characters = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode_batch(self, texts):
        self.characters += sum(map(len, texts))
        return self._tokenizer.encode_batch(texts)


def test_many_questions_cost_one_reading_of_the_book(checkpoint):
    """Beyond the book itself, only questions are read and answers written."""
    asked = rows(entries=400, samples=1, queries=64, pretrained=str(checkpoint))
    lm = GriffinLM(str(checkpoint), framework="torch", max_batch_size=64)
    lm.tokenizer = counting = Counting(lm.tokenizer)
    arguments = {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}
    lm.generate_until(
        [Instance("generate_until", {}, (row["prompt"], arguments), 0) for row in asked]
    )
    assert counting.characters < 1.1 * len(asked[0]["prompt"])
    names = sum(len(lm.tokenizer.encode(f"{row['name']}:")) for row in asked)
    prefill = max(row["prompt_tokens"] for row in asked)
    read = lm.stats.tokens_computed - lm.stats.tokens_generated
    assert len(asked) == 64 and lm.stats.states_evicted == 0
    assert prefill <= read <= prefill + names
    assert read <= 1.1 * prefill
