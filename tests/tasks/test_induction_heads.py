"""Induction heads: its sequences, models whose score is known, and both frameworks beside hf."""

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("lm_eval")

from hypothesis import given
from hypothesis import strategies as st
from symbol_models import Rule, evaluate, guessing, points

from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.symbols import induction_heads, sequences

TASK = "griffin_induction_heads"


def rows(**metadata):
    return list(induction_heads.dataset(**metadata)["test"])


def solve(context: str) -> str:
    return context[context.index("#") + 1]


# The sequences


@given(seed=st.integers(0, 2**32), length=st.integers(3, 100))
def test_a_sequence_is_as_documented(seed, length):
    tokens, (answer,) = sequences.induction_heads(sequences.generator("t", seed, length, 0), length)
    assert len(tokens) == length
    first, last = np.flatnonzero(tokens == sequences.TRIGGER)  # exactly one before the question
    assert last == length - 1
    assert tokens[first + 1] == answer != sequences.TRIGGER
    assert set(tokens) - {sequences.TRIGGER} <= set(sequences.ORDINARY)


def test_places_and_symbols_are_drawn_evenly():
    found = rows(lengths=12, samples=3000)
    places = Counter(row["distance"] for row in found)
    assert sorted(places) == list(range(2, 12))
    answers = Counter(row["answers"] for row in found)
    assert sorted(answers) == sorted(sequences.ALPHABET[:15])
    for counts in (places, answers):
        expected = counts.total() / len(counts)
        chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
        assert chi_squared < 45  # 99.99% of such samples, at 14 degrees of freedom or less


def test_the_same_everywhere():
    """The hash of default documents, whatever the process, platform or version of numpy."""
    expected = "3e9eda857a68438b62cdee200852e5176689ced2e582e75474c2276e16fa8ff6"
    assert rows(samples=3)[0]["dataset_sha256"] == expected


def test_lengths_take_turns():
    found = rows(samples=2)
    assert [row["length"] for row in found] == [64, 128, 256, 512, 1024, 2048, 4096] * 2
    assert rows(lengths=64, samples=1)[0]["tokens"] == found[0]["tokens"]


def test_a_million_tokens():
    (row,) = rows(lengths=2**20, samples=1)
    assert len(row["tokens"]) == 2**20 and row["tokens"].count("#") == 2
    assert solve(row["tokens"]) == row["answers"]


def test_metadata_that_cannot_be():
    for metadata, message in (
        ({"lengths": 2}, "lengths must be integers of at least 3, found 2"),
        ({"lengths": [64, "a"]}, r"found \[64, 'a'\]"),
        ({"samples": 0}, "samples must be an integer of at least 1, found 0"),
        ({"visible_keys": 0}, "visible_keys must be an integer of at least 1, found 0"),
        ({"window": 0}, "window must be an integer of at least 1, found 0"),
        ({"visible_keys": 8, "window": 9}, "give visible_keys alone"),
        ({"window": "wide"}, "window .* found 'wide'"),
    ):
        with pytest.raises(ArgumentError, match=message):
            induction_heads.dataset(**metadata)


# Models whose score is known


def test_a_model_that_solves_it():
    results = evaluate(Rule(solve), TASK, {"lengths": [16, 32], "samples": 6, "visible_keys": 8})
    found = points(results, TASK)
    values = {key: value for key, value in found.items() if not key.endswith(("_low", "_high"))}
    assert set(values.values()) == {1.0}
    assert {key.partition("@")[0] for key in values} == {
        "accuracy", "accuracy_by_distance", "accuracy_by_distance_over_window",
    }  # fmt: skip
    assert all(0 <= found[f"{key}_low"] < 1 for key in values)
    assert results["configs"][TASK]["metadata"]["chance"] == {"accuracy": 1 / 15}


def test_the_interval_of_guessing_holds_chance():
    results = evaluate(guessing(sequences.ALPHABET[:15]), TASK, {"lengths": 16, "samples": 300})
    found = points(results, TASK)
    assert found["accuracy@16_low"] < 1 / 15 < found["accuracy@16_high"] < 0.15


def test_a_model_that_sees_no_further_than_its_window():
    """The model recalls within 8 keys only, and the query's own key is one of them."""

    def near(context):
        seen = context[-8:-1]
        return solve(seen) if "#" in seen else "?"

    metadata = {"lengths": [16, 40], "samples": 60, "window": 8}
    found = points(evaluate(Rule(near), TASK, metadata), TASK)
    over_window = {k: v for k, v in found.items() if k.startswith("accuracy_by_distance_over")}
    assert {key.partition("@")[2] for key in over_window} == {
        f"{x}{suffix}" for x in ("0.25", "0.5", "1", "2", "4") for suffix in ("", "_low", "_high")
    }
    for x, expected in (("0.25", 1), ("0.5", 1), ("1", 0), ("2", 0), ("4", 0)):
        assert found[f"accuracy_by_distance_over_window@{x}"] == expected
    for distance, expected in ((2, 1), (4, 1), (8, 0), (16, 0), (32, 0)):
        assert found[f"accuracy_by_distance@{distance}"] == expected
    assert 0 < found["accuracy@40"] < found["accuracy@16"] < 1


def test_a_limit_that_leaves_a_length_out():
    found = points(evaluate(Rule(solve), TASK, {"lengths": [16, 32], "samples": 2}, limit=1), TASK)
    assert found["accuracy@16"] == 1 and found["accuracy@32"] == "N/A"


# A checkpoint, in both frameworks and in transformers


def test_no_sequence_depends_on_the_window():
    assert rows(lengths=8, samples=2, window=5) == rows(lengths=8, samples=2)
