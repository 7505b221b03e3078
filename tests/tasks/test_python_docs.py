"""Questions about the language reference that ships with Python."""

from pydoc_data.topics import topics

import pytest

from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.smoke.python_docs import CHOICES, TOPICS, choice, topic


@pytest.mark.parametrize(("make", "count"), [(choice, CHOICES), (topic, TOPICS)])
def test_one_choice_is_right(make, count):
    with pytest.raises(ArgumentError, match="samples must be an integer of at least 1, found 0"):
        make(samples=0)
    for seed in range(5):
        rows = make(samples=100, seed=seed)["test"]
        assert all(len(set(row["choices"])) == count for row in rows)
    rows = make(samples=12, seed=3)["test"]
    assert len(rows) == 12 and len({row["topic"] for row in rows}) == 12
    assert rows["dataset_sha256"][0] == make(samples=12, seed=3)["test"]["dataset_sha256"][0]
    assert rows["dataset_sha256"][0] != make(samples=12, seed=4)["test"]["dataset_sha256"][0]
    for row in rows:
        assert len(row["choices"]) == len(set(row["choices"])) == count
        right, page = row["choices"][row["label"]], " ".join(topics[row["topic"]].split())
        if make is topic:  # pages share paragraphs
            holding = [c for c in row["choices"] if row["context"] in " ".join(topics[c].split())]
            assert holding == [row["topic"]]
        assert row["context"] in page and right in (page if make is choice else row["topic"])
