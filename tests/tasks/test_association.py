"""The association task, whose questions use other words than the text, in lm_eval's runs."""

import re
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from lm_eval.api.model import LM
from symbol_models import evaluate

from griffin_eval.errors import ArgumentError
from griffin_eval.lm.model import GriffinLM
from griffin_eval.tasks.long_text import association

TASK = "griffin_association"
SMALL = set("a an as the to in of has been which person with next and for from is out".split())


@pytest.fixture(scope="module")
def source(checkpoint, tmp_path_factory):
    """Return metadata with a model and a text."""
    file = tmp_path_factory.mktemp("texts") / "text.txt"
    file.write_text("\n\n".join(topics[name] for name in sorted(topics))[:30_000])
    return {"pretrained": str(checkpoint), "document": str(file)}


def known() -> dict[str, str]:
    """Return what the text says, by what the question asks."""
    return {asked: said for kind in association.KINDS for said, asked in kind.facts}


def look_up(prompt: str) -> str:
    """Answer as a model that reads everything and knows all facts."""
    question = prompt.splitlines()[-2]
    (said,) = [said for asked, said in known().items() if re.search(rf"\b{asked}\b", question)]
    (name,) = re.findall(rf"^(\w+) .*{re.escape(said)}\.$", prompt, re.M)
    return name


class Model(LM):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def generate_until(self, requests):
        return [self.answer(request.args[0]) for request in requests]

    loglikelihood = loglikelihood_rolling = None


def test_needles_and_questions_share_no_word():
    for kind in association.KINDS:
        for said, asked in kind.facts:
            needle = set(re.findall("[a-z]+", kind.needle.format(name="", said=said).lower()))
            question = set(re.findall("[a-z]+", kind.question.format(asked=asked).lower()))
            assert not (needle & question) - SMALL, (said, asked)
            stems = ({word[:5] for word in words - SMALL} for words in (needle, question))
            assert not set.intersection(*stems), (said, asked)
        for side in zip(*kind.facts, strict=True):
            assert len(set(side)) == len(kind.facts)


def test_a_model_that_knows_all_and_one_that_looks_back_half(source):
    metadata = source | {"lengths": [400, 800], "depths": [10, 90], "samples": 6}
    found = evaluate(Model(look_up), TASK, metadata)["results"][TASK]
    assert found["accuracy@400,none"] == found["accuracy@800,none"] == 1
    assert found["effective_length,none"] == ">800"

    rows = association.dataset(**metadata)["test"]
    lengths = dict(zip(rows["prompt"], rows["length"], strict=True))

    def near(prompt):
        return look_up(prompt) if lengths[prompt] == 400 else "nobody"

    found = evaluate(Model(near), TASK, metadata)["results"][TASK]
    assert (found["accuracy@400,none"], found["accuracy@800,none"]) == (1, 0)
    assert found["effective_length,none"] == 400 == found["effective_length_low,none"]


def test_a_guess_of_any_person_is_right_as_often_as_the_results_say(source):
    def guess(prompt):
        return re.search(rf"^({'|'.join(association.NAMES)}) ", prompt, re.M)[1]

    metadata = source | {"lengths": [500], "depths": [0, 50, 100], "samples": 30, "needles": 3}
    results = evaluate(Model(guess), TASK, metadata)
    config = results["configs"][TASK]["metadata"]
    assert config["chance"] == {"accuracy@500": 1 / 3}
    assert results["results"][TASK]["accuracy@500,none"] == pytest.approx(1 / 3, abs=0.15)


def test_scoring():
    for generated, right in (
        (" Marisol.", True),
        ("It is Marisol, not Kenji", True),
        ("Kenji or Marisol", False),
        ("nobody\nMarisol", False),
        ("Marisols", False),
        ("", False),
    ):
        assert association.is_correct(generated, "Marisol") is right


def test_a_model_of_random_weights(checkpoint, source):
    lm = GriffinLM(pretrained=str(checkpoint), framework="torch")
    metadata = source | {"lengths": [300, 400], "depths": [50], "samples": 1}
    found = evaluate(lm, TASK, metadata)["results"][TASK]
    assert found["accuracy@300,none"] == 0
    assert found["effective_length,none"] == "N/A"


def test_names_that_the_text_holds_are_not_used(source, tmp_path):
    text = Path(source["document"]).read_text()
    file = tmp_path / "named.txt"
    file.write_text(" ".join(association.NAMES) + text)
    with pytest.raises(ArgumentError, match=r"named.txt holds all but \d of the names"):
        metadata = source | {"document": str(file), "max_tokens": 600}
        association.dataset(lengths=[590], samples=1, **metadata)


def test_more_needles_than_facts(source):
    with pytest.raises(ArgumentError, match="there are 10 facts of each kind, found needles=11"):
        association.dataset(needles=11, **source)
