"""Metrics that are points of curves, from what documents say to what lm_eval reports."""

import pytest

pytest.importorskip("lm_eval")

from griffin_eval import intervals
from griffin_eval.tasks.curves import LengthObservation, Observation, as_split, estimate


def test_documents_that_say_nothing_are_left_out():
    observations = [
        None,
        Observation(1, 1, "a"),
        None,
        Observation(0, 1, "b"),
        Observation(1, 1, "b"),
    ]
    expected = intervals.proportion([1, 0, 1], "abb")
    for field in ("value", "low", "high"):
        assert estimate(observations, "proportion", field) == getattr(expected, field)
    assert estimate([None, None], "proportion", "value") == "N/A"


def test_several_answers_of_a_document():
    expected = intervals.proportion([1, 1, 0, 0], "aaab")
    assert (
        estimate([Observation(2, 3, "a"), Observation(0, 1, "b")], "proportion", "high")
        == expected.high
    )


def test_bounds_that_are_not_known():
    assert estimate([Observation(3.0, 2, "a")], "ratio", "value") == 1.5
    assert estimate([Observation(3.0, 2, "a")], "ratio", "low") == "N/A"


@pytest.mark.parametrize(
    ("shares", "value"), [((1, 1), ">200"), ((0, 0), "<20"), ((1, 0), pytest.approx(4000**0.5))]
)
def test_capacities_that_are_not_reached(shares, value):
    observations = [
        LengthObservation(share, length, f"{length} {book}")
        for share, length in zip(shares, (20, 200), strict=True)
        for book in range(30)
    ]
    assert estimate([*observations, None], "capacity", "value") == value


def test_the_hash_is_of_what_is_asked():
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    plain, measured = as_split(rows)["test"], as_split(rows, [{"tokens": 5}, {"tokens": 6}])["test"]
    (digest,) = set(plain["dataset_sha256"])
    assert set(measured["dataset_sha256"]) == {digest}
    assert measured["tokens"] == [5, 6] and measured["prompt"] == ["a", "b"]
    assert set(as_split(rows[:1])["test"]["dataset_sha256"]) != {digest}
