"""The phonebook task: its prompts against the published format, and whole runs of lm_eval."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

import griffin_eval.tasks
from griffin_eval.errors import ArgumentError
from griffin_eval.tasks import phonebook

FOLDER = Path(griffin_eval.tasks.__file__).parent
TASK = "griffin_phonebook"
ENTRY = re.compile(r"[A-Z][A-Za-z]+ [A-Z][A-Za-z]+: [6-9][0-9]{9}")


def run(answer, metadata=None, **arguments):
    """What lm_eval makes of a model that answers each prompt with ``answer(prompt)``."""

    class Model(LM):
        def generate_until(self, requests):
            assert all(r.args[1]["until"] == ["\n"] for r in requests)
            assert not any(r.args[1]["do_sample"] for r in requests)
            return [answer(request.args[0]) for request in requests]

        loglikelihood = loglikelihood_rolling = None

    tasks = TaskManager(include_path=FOLDER, include_defaults=False, metadata=metadata)
    results = simple_evaluate(
        Model(), tasks=[TASK], task_manager=tasks, bootstrap_iters=2, **arguments
    )
    assert results is not None
    return results


def look_up(prompt):
    name = prompt.rsplit("\n", 1)[-1]
    return re.search(f"^{re.escape(name)} ([0-9]+)$", prompt, re.M)[1]


# The documents


@pytest.fixture(scope="module")
def documents():
    return phonebook.documents(entries=[3, 10, 60], samples=40, seed=5)


def test_format_as_published(documents):
    for doc in documents:
        book, examples, question = doc["prompt"].split("\n\n")
        lines, pair = book.split("\n"), examples.split("\n")
        assert all(ENTRY.fullmatch(line) for line in lines)
        assert len(lines) == doc["entries"]
        assert len(set(pair)) == 2 and set(pair) <= set(lines)
        assert question == f"{doc['name']}:"  # no space after it
        # The three are drawn without replacement, and there is one answer.
        asked = f"{doc['name']}: {doc['answer']}"
        assert asked not in pair
        assert lines[doc["position"]] == asked
        assert doc["prompt"].count(doc["answer"]) == doc["prompt"].count(asked) == 1
        assert look_up(doc["prompt"]) == doc["answer"]


def test_no_name_and_no_number_twice_in_a_book():
    (doc,) = phonebook.documents(entries=3000, samples=1)
    names, numbers = zip(
        *(line.split(": ") for line in doc["prompt"].split("\n\n")[0].split("\n")), strict=True
    )
    assert len(set(names)) == len(set(numbers)) == 3000


def test_draws_are_even():
    # As published: first digits 6 to 9 alike, every place of the book asked for alike.
    docs = phonebook.documents(entries=5, samples=1000, seed=1)
    digits = Counter(re.findall(r": ([0-9])", "".join(doc["prompt"] for doc in docs)))
    assert sorted(digits) == list("6789")
    places = Counter(doc["position"] for doc in docs)
    assert sorted(places) == list(range(5))
    for counts in (digits, places):
        expected = counts.total() / len(counts)
        chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
        assert chi_squared < 20  # 99.9% of such samples, at 4 degrees of freedom or less


def test_names():
    for names in (phonebook.FIRST_NAMES, phonebook.LAST_NAMES):
        assert 200 <= len(set(names)) == len(names)
        assert all(name.isascii() and name.isalpha() for name in names)


def test_the_same_everywhere():
    """The hash of the default documents, whatever the process, platform or version of Python."""
    expected = "721c43d886f804a82e0dacb196892953a42a39a211ed1a4c5a34b0b52c129193"
    code = "from griffin_eval.tasks.phonebook import documents as d; print(d()[0])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert expected in output.stdout, output.stderr
    assert phonebook.documents()[0]["dataset_sha256"] == expected


def test_seeds_differ():
    some, others = (phonebook.documents(entries=10, samples=20, seed=seed) for seed in (0, 1))
    assert not {doc["answer"] for doc in some} & {doc["answer"] for doc in others}
    assert some[0]["dataset_sha256"] != others[0]["dataset_sha256"]


def test_lengths_take_turns(documents):
    assert [doc["entries"] for doc in documents[:6]] == [3, 10, 60, 3, 10, 60]
    assert [doc["book"] for doc in documents[:6]] == [0, 0, 0, 1, 1, 1]


def test_more_samples_and_lengths_leave_the_others_as_they_are(documents):
    fewer = phonebook.documents(entries=10, samples=7, seed=5)
    same = [doc for doc in documents if doc["entries"] == 10][:7]
    assert [doc["prompt"] for doc in fewer] == [doc["prompt"] for doc in same]


def test_several_questions_of_one_book():
    docs = phonebook.documents(entries=[12, 6], samples=2, queries=4)
    assert [doc["entries"] for doc in docs[:4]] == [12, 6, 12, 6]
    for length in (12, 6):
        asked = [doc for doc in docs if doc["entries"] == length and doc["book"] == 1]
        assert len({doc["name"] for doc in asked}) == 4
        assert len({doc["prompt"].removesuffix(f"{doc['name']}:") for doc in asked}) == 1
        assert all(look_up(doc["prompt"]) == doc["answer"] for doc in asked)


def test_a_length_given_twice_or_alone():
    once = phonebook.documents(entries=5, samples=2)
    assert phonebook.documents(entries=[5], samples=2) == once
    assert phonebook.documents(entries=[5, 5], samples=2) == once


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"entries": 2}, "entries must be integers from 3 .* found 2"),
        ({"entries": [20, 2]}, r"found \[20, 2\]"),
        ({"entries": 5, "queries": 4}, "from 6 "),
        ({"entries": 10**6}, "found 1000000"),
        ({"entries": "20"}, "found '20'"),
        ({"entries": []}, r"found \[\]"),
        ({"entries": [20.5]}, r"found \[20.5\]"),
        ({"samples": 0}, "samples must be an integer of at least 1, found 0"),
        ({"samples": None, "queries": True}, "samples .* found None; queries .* found True"),
        ({"seed": "a"}, "seed must be an integer, found 'a'"),
    ],
)
def test_arguments_that_cannot_be(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        phonebook.documents(**arguments)


@pytest.mark.parametrize(
    "generated, correct",
    [
        (" 6123456789", True),
        ("6123456789  \nJohn Smith: 7123456789", True),
        ("\n6123456789", False),
        ("6123456789.", False),
        ("612-345-6789", False),
        ("", False),
    ],
)
def test_scoring(generated, correct):
    assert phonebook.is_correct(generated, "6123456789") is correct


# Runs of lm_eval


def test_a_model_that_looks_it_up():
    metadata = {"entries": [3, 10], "samples": 4, "seed": 1}
    results = run(lambda prompt: f" {look_up(prompt)}\nAnd so on", metadata)
    found = results["results"][TASK]
    assert found["exact_match,none"] == 1
    assert found["exact_match_3,none"] == found["exact_match_10,none"] == 1
    assert results["n-samples"][TASK] == {"original": 8, "effective": 8}
    assert results["higher_is_better"][TASK] == dict.fromkeys(
        ["exact_match", "exact_match_3", "exact_match_10"], True
    )
    docs = [sample["doc"] for sample in results["samples"][TASK]]
    assert docs == phonebook.documents(**metadata)


def test_a_model_that_answers_wrong():
    found = run(lambda prompt: "6000000000", {"entries": 10, "samples": 3})["results"][TASK]
    assert found["exact_match,none"] == found["exact_match_10,none"] == 0


def test_accuracy_by_length():
    def answer(prompt):
        return look_up(prompt) if prompt.count("\n") < 10 else ""

    found = run(answer, {"entries": [3, 30], "samples": 3})["results"][TASK]
    assert found["exact_match,none"] == 0.5
    assert (found["exact_match_3,none"], found["exact_match_30,none"]) == (1, 0)


def test_a_limit_that_leaves_a_length_out():
    found = run(look_up, limit=3)["results"][TASK]
    assert found["exact_match_20,none"] == found["exact_match_100,none"] == 1
    assert found["exact_match_200,none"] == "N/A"


def test_every_document_scores_every_key():
    # With documents dealt out to several processes lm_eval fails on keys that one of them lacks.
    for_every = [
        set(sample["metrics"])
        for sample in run(look_up, {"entries": [3, 4], "samples": 1})["samples"][TASK]
    ]
    assert for_every == [{"exact_match", "exact_match_3", "exact_match_4"}] * 2


def test_the_prompt_takes_no_examples_and_no_other_changes():
    prompts = []
    run(lambda prompt: prompts.append(prompt) or "", {"entries": 5, "samples": 2}, num_fewshot=3)
    assert prompts == [doc["prompt"] for doc in phonebook.documents(entries=5, samples=2)]


def test_predict_only():
    found = run(look_up, {"entries": 5, "samples": 2}, predict_only=True)["results"][TASK]
    assert [key for key in found if key.startswith("exact_match")] == []


def test_cached_requests_of_another_book_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path))
    cached = {"cache_requests": True}
    for _ in range(2):
        found = run(look_up, {"entries": 5, "samples": 2}, **cached)["results"][TASK]
        assert found["exact_match,none"] == 1
    assert list(tmp_path.iterdir())
    with pytest.raises(ArgumentError, match="--cache_requests refresh"):
        run(look_up, {"entries": 5, "samples": 2, "seed": 1}, **cached)
    again = run(look_up, {"entries": 5, "samples": 2, "seed": 1}, **cached,
                rewrite_requests_cache=True)  # fmt: skip
    assert again["results"][TASK]["exact_match,none"] == 1
