"""The recorded answers of the public implementations are what these compute today."""

import numpy as np
import pytest
from parity import relative_error
from recorded_oracles import ask_library, questions, recorded

TOLERANCE = 2e-5  # of the largest value: rounding of float32 in another order


@pytest.mark.slow
def test_the_libraries_answer_as_recorded():
    found = questions()
    assert {question.name for question in found} == {
        "transformers",
        "deepmind-jax",
        "deepmind-torch",
    }
    for question in found:
        expected, answer = recorded(question), ask_library(question)
        assert answer.keys() == expected.keys()
        for name, value in answer.items():
            error = relative_error(np.asarray(value), expected[name])
            assert error <= TOLERANCE, (question.name, question.kind, name)
