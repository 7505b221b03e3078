"""The recorded answers of the public implementations are what these compute today."""

import numpy as np
import pytest
from parity import relative_error
from recorded_oracles import ask_library, questions, recorded

TOLERANCE = 2e-5  # share of the largest value: rounding of float32 in another order
LIBRARIES = ("transformers", "deepmind-jax", "deepmind-torch")


def check(asked):
    for question in asked:
        expected, answer = recorded(question), ask_library(question)
        assert answer.keys() == expected.keys()
        for name, value in answer.items():
            error = relative_error(np.asarray(value), expected[name])
            assert error <= TOLERANCE, (question.name, question.kind, name)


@pytest.mark.ci
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_answers_as_recorded(name):
    """One question of each kind; the releases that are installed decide."""
    check({question.kind: question for question in questions() if question.name == name}.values())


@pytest.mark.slow
def test_the_libraries_answer_as_recorded():
    assert {question.name for question in questions()} == set(LIBRARIES)
    check(questions())
