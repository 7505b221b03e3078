"""Extrapolation: its differences and controls against requests one by one, and runs of lm_eval."""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import griffin_eval.tasks
from griffin_eval.errors import ArgumentError
from griffin_eval.lm.model import GriffinLM
from griffin_eval.tasks.long_text import extrapolation
from griffin_eval.text.load import load_tokenizer

FOLDER = Path(griffin_eval.tasks.__file__).parent / "long_text"
PYTHON = "\n\n".join(topics[name] for name in sorted(topics))
TASK = "griffin_extrapolation"
PLAIN = {"nats_difference@2", "nats_difference@4", "reset_train@2", "reset_train@4"}
WINDOW = {"reset_window@2", "reset_window@4"}  # at 1 times 100, a window of 128 resets nothing
MEMORIES = {f"no_{memory}@{n}" for memory in ("recurrent", "attention") for n in (1, 2, 4)}


@pytest.fixture(scope="module")
def metadata(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for index in range(3):
        text = PYTHON[index * 3000 : (index + 1) * 3000]
        (folder / f"{index}.txt").write_text(text, encoding="utf-8")
    return {
        "document": str(folder),
        "pretrained": str(checkpoint),
        "train_length": 100,
        "multiples": [2, 4],
        "targets": 2,
        "span": 30,
    }


def rows(**arguments):
    return list(extrapolation.dataset(**arguments)["test"])


def evaluate(lm, **metadata):
    manager = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=metadata)
    results = simple_evaluate(lm, tasks=[TASK], task_manager=manager, bootstrap_iters=0)
    assert results is not None
    for name, better in results["higher_is_better"][TASK].items():
        # Only differences between contexts have a direction, never metrics without a memory.
        assert better is (False if name.startswith("nats_difference") else None), name
    return {
        name.removesuffix(",none"): value
        for name, value in results["results"][TASK].items()
        if "@" in name and "stderr" not in name
    }


def points(found):
    return {name for name in found if not name.endswith(("_low", "_high"))}


# Rows


def test_contexts_and_controls_end_in_the_same_target(checkpoint, metadata):
    tokenizer = load_tokenizer(checkpoint)
    found = rows(**metadata)
    assert len(found) == 6 and len({row["name"] for row in found[:3]}) == 3
    lengths = {"1": 100, "2": 200, "4": 400, "window": 128}
    for row in found:
        assert row["label"][:3] == ["1", "2", "4"] and row["label"][-1] == "window"
        assert set(row["label"]) == {*lengths} | {
            f"{n} {memory}" for n in (1, 2, 4) for memory in ("recurrent", "attention")
        }
        assert len({*row["start"]}) == len({*row["end"]}) == 1
        for label, context, forget in zip(row["label"], row["context"], row["forget"], strict=True):
            n, _, memory = label.partition(" ")
            text = row["text"][context : row["start"][0]]
            assert len(tokenizer.encode(text)) == lengths[n]
            assert forget == (memory or ("" if n == "window" else "nothing"))


def test_the_window_is_the_checkpoints_unless_it_is_named(metadata):
    assert {row["window"] for row in rows(**metadata)} == {128}
    named = rows(**metadata, visible_keys=64)
    assert {row["window"] for row in named} == {64} and named == rows(**metadata, window=64)
    assert "reset_window@1" in extrapolation.differences(
        dict.fromkeys(named[0]["label"], 0.0), named[0]
    )
    assert "window" not in rows(**metadata, window=400)[0]["label"]  # the longest text has 400


def test_no_family_no_window_and_no_memories(metadata, tmp_path, checkpoint, monkeypatch):
    """A model of another kind, of which only the tokenizer is known, has no such labels."""
    monkeypatch.delitem(sys.modules, "griffin_eval.lm.model")
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((checkpoint / name).read_bytes())
    found = rows(**metadata | {"pretrained": str(other)})
    assert found[0]["label"] == ["1", "2", "4"] and set(found[0]["forget"]) == {""}
    with pytest.raises(ArgumentError, match="memories=true needs --model griffin"):
        rows(**metadata, memories=True)
    assert rows(**metadata)[0]["label"] == ["1", "2", "4", "window"]


def test_differences():
    doc = {"window": 150, "train_length": 100}
    nats = {"1": 9.0, "2": 7.0, "window": 8.0, "1 recurrent": 9.5, "2 recurrent": 11.0}
    nats |= {"1 attention": 9.25, "2 attention": 7.0}
    assert extrapolation.differences(nats, doc) == {
        "nats_difference@2": -2.0,
        "reset_train@2": 2.0,
        "reset_window@2": 1.0,
        "no_recurrent@1": 0.5,
        "no_recurrent@2": 4.0,
        "no_attention@1": 0.25,
        "no_attention@2": 0.0,
    }


def test_metadata_that_cannot_be(metadata):
    for arguments, message in (
        ({"train_length": None}, "length of training sequences is unknown.*--metadata"),
        ({"train_length": 0}, "train_length must be an integer of at least 1, found 0"),
        ({"multiples": [1, 2.5]}, r"multiples must be integers of at least 1, found \[1, 2.5\]"),
        ({"visible_keys": 0}, "visible_keys must be an integer of at least 1, found 0"),
        ({"window": "all"}, "window must be an integer of at least 1, found 'all'"),
        ({"visible_keys": 8, "window": 9}, "give visible_keys alone"),
        ({"memories": "yes"}, "memories must be true or false, found 'yes'"),
        ({"multiples": 64}, "no document has the .* 2 targets of 30 after contexts of 6400 need"),
    ):
        with pytest.raises(ArgumentError, match=message):
            rows(**metadata | arguments)


# Runs of lm_eval


@pytest.fixture(scope="module")
def found(checkpoint, metadata):
    return evaluate(GriffinLM(pretrained=str(checkpoint), framework="torch"), **metadata)


def test_every_memory_is_worth_something_here(found):
    assert points(found) == PLAIN | WINDOW | MEMORIES
    for n in (2, 4):
        assert found[f"reset_train@{n}"] == -found[f"nats_difference@{n}"]
        assert abs(found[f"no_recurrent@{n}"]) > 1e-3 and abs(found[f"no_attention@{n}"]) > 1e-3
        assert found[f"no_recurrent@{n}"] != pytest.approx(found[f"no_attention@{n}"], abs=1e-3)
