"""The passkey task: its prompts against the published ones, and whole runs of lm_eval."""

import functools
import importlib
import re
from pathlib import Path
from pydoc_data.topics import topics

import lm_eval.tasks
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from slow import examples
from symbol_models import evaluate

from griffin_eval.engine.tree import build_prompts
from griffin_eval.errors import ArgumentError
from griffin_eval.lm.model import GriffinLM
from griffin_eval.tasks.long_text import documents, passkey
from griffin_eval.text.load import load_tokenizer
from griffin_eval.text.shared_prefixes import encode_all

PYTHON = "\n\n".join(topics[name] for name in sorted(topics))
RULER = Path(lm_eval.tasks.__file__).parent / "ruler"
TASK = "griffin_passkey"
DEPTHS = [0, 25, 50, 75, 100]


@pytest.fixture(scope="module")
def source(checkpoint, tmp_path_factory):
    """Return metadata with a model and a folder of texts."""
    folder = tmp_path_factory.mktemp("texts")
    for index in range(2):
        text = PYTHON[index * 20_000 : (index + 1) * 20_000]
        (folder / f"{index}.txt").write_text(text, encoding="utf-8")
    return {"pretrained": str(checkpoint), "document": str(folder)}


def rows(source, **arguments):
    return list(passkey.dataset(**source, **arguments)["test"])


def look_up(prompt: str) -> str:
    """Answer as a model that reads everything."""
    if "pass key" in prompt.splitlines()[-1]:
        (number,) = re.findall(
            r"^The pass key is (\d+)\. Remember it\. \1 is the pass", prompt, re.M
        )
        return number
    key = re.search(r"number for (\w+) mentioned", prompt)[1]
    (number,) = re.findall(
        rf"^One of the special magic numbers for {key} is: (\d+)\.$", prompt, re.M
    )
    return number


# Prompts


@settings(max_examples=examples(15))
@given(
    length=st.integers(200, 600),
    depth=st.integers(0, 100),
    needles=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_a_prompt_has_one_answer_where_it_is_asked_for(
    checkpoint, source, length, depth, needles, seed
):
    tokenizer = load_tokenizer(checkpoint)
    given = {"lengths": length + 100 * needles, "depths": depth, "needles": needles, "seed": seed}
    (row,) = rows(source, samples=1, **given)
    prompt, answer = row["prompt"], row["answer"]
    assert re.fullmatch("[1-9][0-9]{4}", answer) and look_up(prompt) == answer
    assert prompt.count(answer) == (2 if needles == 1 else 1)
    count = len(tokenizer.encode(prompt))
    assert abs(count - given["lengths"]) < 2 * documents.SLACK
    lines = prompt.split("\n")
    description, needle, question = passkey.PASSKEY if needles == 1 else passkey.NEEDLES
    assert lines[0] == description and not prompt[-1].isspace()
    hidden = [i for i, line in enumerate(lines) if line.startswith(needle[:16])]
    assert len(hidden) == needles
    # Where the needle is, in tokens of the text around it, other needles left out.
    at = next(i for i in hidden if answer in lines[i])
    before, after = (
        len(tokenizer.encode("\n".join(line for i, line in part if i not in hidden)))
        for part in (
            [(i, lines[i]) for i in range(1, at)],
            [(i, lines[i]) for i in range(at + 1, len(lines) - 1)],
        )
    )
    assert abs(before - depth / 100 * (before + after)) <= documents.SLACK


def test_the_published_prompt(source):
    (row,) = rows(source, lengths=300, depths=50, samples=1)
    number = row["answer"]
    lines = row["prompt"].split("\n")
    assert lines[0] == (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
        "them. I will quiz you about the important information there."
    )
    assert f"The pass key is {number}. Remember it. {number} is the pass key." in lines
    assert lines[-1] == "What is the pass key? The pass key is"


def test_the_words_of_ruler():
    """The words are those in the source of lm_eval's own task."""
    source = (RULER / "prepare_niah.py").read_text() + (RULER / "niah_utils.py").read_text()
    template = re.search(r'TEMPLATE = """(.*?)"""', source)[1].encode().decode("unicode_escape")
    for many, one in (("Some", "A"), ("are all", "is"), ("are", "is")):
        template = template.replace(many, one)
    prefix = re.search(r'f"(The special magic .* is)"', source)[1]
    prefix = prefix.replace("{type_needle_v[:-1]}", "number").replace("{query}", "{key}")
    needle = re.search(r'NEEDLE = "(.*)"', source)[1]
    first, _, last = template.format(type_needle_v="number", context="", query="{key}").split("\n")
    assert passkey.NEEDLES == (
        first,
        needle.format(type_needle_v="numbers", key="{key}", value="{number}"),
        f"{last} {prefix}",
    )


def test_lengths_and_depths_take_turns(source):
    found = rows(source, lengths=[200, 300, 400], depths=DEPTHS, samples=2)
    assert len(found) == 30
    assert {row["length"] for row in found[:3]} == {200, 300, 400}
    assert len({row["depth"] for row in found[:3]}) == 3
    assert len({(row["length"], row["depth"]) for row in found[:15]}) == 15
    assert len({row["answer"] for row in found}) == 30
    assert len({row["dataset_sha256"] for row in found}) == 1
    again = rows(source, lengths=[200, 300, 400], depths=DEPTHS, samples=2)
    other = rows(source, lengths=[200, 300, 400], depths=DEPTHS, samples=2, seed=1)
    assert found == again and found[0]["dataset_sha256"] != other[0]["dataset_sha256"]


def test_prompts_of_a_sample_share_all_before_the_first_needle(checkpoint, source):
    found = rows(source, lengths=[1000, 2000], depths=DEPTHS, samples=1)
    prompts = encode_all(load_tokenizer(checkpoint), [row["prompt"] for row in found])
    # One prompt of 2000 tokens (the deepest) is read whole, all others from the needle on.
    shares = sum(1 - depth / 100 for depth in DEPTHS)
    expected = 2000 + 2000 * shares + 1000 * shares
    needles = 10 * 60
    read = build_prompts(prompts).tokens
    assert expected - needles < read < expected + needles
    assert read < 0.65 * sum(map(len, prompts))


def test_scoring():
    for generated, correct in (
        (" 12345. Remember it.", True),
        (" the number 12345", True),
        (" 123456", False),
        (" 1234", False),
        ("\n12345", False),
        (" 1 12345", False),
        ("", False),
    ):
        assert passkey.is_correct(generated, "12345") is correct


def test_metadata_that_cannot_be(source):
    for arguments, message in (
        ({"lengths": [1000, "x"]}, r"lengths must be integers .* found \[1000, 'x'\]"),
        ({"lengths": 50}, "lengths must be more than .* the needles and the question, found 50"),
        ({"lengths": 10**7}, "no document has 10000000 tokens, the longest has"),
        ({"depths": [0, 101]}, r"depths are percents, from 0 to 100, found \[0, 101\]"),
        ({"needles": 0}, "needles must be an integer of at least 1, found 0"),
        ({"needles": 1000}, "there are .* key words, found needles=1000"),
        ({"samples": None}, "samples must be an integer of at least 1, found None"),
        ({"samples": [1, 2]}, r"samples must be an integer of at least 1, found \[1, 2\]"),
    ):
        with pytest.raises(ArgumentError, match=message):
            rows(source, **arguments)


# Runs of lm_eval


def of_model(answer, source, **metadata):
    class Model(LM):
        def generate_until(self, requests):
            return [answer(request.args[0]) for request in requests]

        loglikelihood = loglikelihood_rolling = None

    return evaluate(Model(), TASK, source | metadata)["results"][TASK]


@pytest.mark.parametrize("needles", [1, 3])
def test_a_model_that_looks_it_up(source, needles):
    given = {"lengths": [300, 500], "depths": [10, 90], "samples": 3, "needles": needles}
    found = of_model(lambda prompt: f" {look_up(prompt)}.", source, **given)
    for name in ("accuracy", "accuracy_depth_10", "accuracy_depth_90"):
        for length in (300, 500):
            assert found[f"{name}@{length},none"] == found[f"{name}@{length}_high,none"] == 1
            assert found[f"{name}@{length}_low,none"] < 0.8


def test_accuracy_by_depth(source):
    def answer(prompt):
        lines = prompt.split("\n")
        near = any("Remember it" in line for line in lines[len(lines) // 2 :])
        return look_up(prompt) if near else "none"

    found = of_model(answer, source, lengths=[400, 800], depths=[0, 100], samples=4)
    for length in (400, 800):
        assert found[f"accuracy@{length},none"] == 0.5
        assert found[f"accuracy_depth_0@{length},none"] == 0
        assert found[f"accuracy_depth_100@{length},none"] == 1


# lm_eval's own RULER tasks


def run_ruler(task, folder, checkpoint):
    lm = GriffinLM(pretrained=str(checkpoint), framework="torch", max_batch_size=2)
    metadata = {"pretrained": str(checkpoint), "max_seq_lengths": [4096]}
    manager = TaskManager(include_path=str(folder), include_defaults=False, metadata=metadata)
    results = simple_evaluate(lm, tasks=[task], task_manager=manager, bootstrap_iters=0, limit=2)
    assert results["n-samples"][task]["effective"] == 2
    assert 0 <= results["results"][task]["4096,none"] <= 1
    assert all(isinstance(sample["resps"][0][0], str) for sample in results["samples"][task])
    assert 4000 < lm.stats.tokens_computed < 2 * 4096


@pytest.mark.ci
def test_frequent_words_of_ruler(checkpoint, tmp_path, monkeypatch):
    """A RULER task that needs no data runs from its own files, without those about needles."""
    for name in ("niah_single_1", "fwe"):
        lines = (RULER / f"{name}.yaml").read_text().splitlines()
        kept = [line for line in lines if "niah_utils" not in line]
        text = "\n".join(kept).replace("!function ", "!function lm_eval.tasks.ruler.")
        (tmp_path / f"{name}.yaml").write_text(text)
    module = importlib.import_module("lm_eval.tasks.ruler.fwe_utils")
    few = functools.partial(module.sys_kwext, num_samples=2)  # drawing 500 samples takes long
    monkeypatch.setattr(module, "sys_kwext", few)
    run_ruler("ruler_fwe", tmp_path, checkpoint)
