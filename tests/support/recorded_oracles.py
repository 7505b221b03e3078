"""The answers of public implementations, recorded by `tests/golden/make_oracles.py`.

A recorded oracle has the interface of the oracles in `parity_oracles` but needs no library. The key
of an answer is its question: implementation, architecture, tokens, targets and document starts.
The weights are always `parity.weights`.
"""

import functools
import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.config import GriffinConfig

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
ANSWERS, QUESTIONS = GOLDEN / "oracles.npz", GOLDEN / "oracles.json"
RECORDING = "GRIFFIN_EVAL_TESTS_QUESTIONS"  # file for recording questions


class Question(NamedTuple):
    """A question to an implementation.

    Attributes:
        name: Key of `parity_oracles.ORACLES`.
        kind: "logits", "gradients" or "generation".
        config: Fields of a `GriffinConfig`.
        arrays: Tokens, targets (for gradients) and document starts or None.
        recurrent_param: Value of Λ in every recurrent block, or None for Λ of `parity.weights`.
    """

    name: str
    kind: str
    config: dict[str, Any]
    arrays: list[Any]
    recurrent_param: float | None

    def key(self) -> str:
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()[:16]


class Recorded:
    """A public implementation of an architecture that returns its recorded answers."""

    def __init__(self, name: str, config: GriffinConfig, recurrent_param: float | None = None):
        self._name, self._config, self._recurrent_param = name, config, recurrent_param

    def logits(self, tokens, resets=None) -> np.ndarray:
        return self._answer("logits", tokens, resets)["logits"]

    def gradients(self, tokens, targets, resets) -> dict[str, np.ndarray]:
        return self._answer("gradients", tokens, targets, resets)

    def generation(self, tokens) -> np.ndarray:
        return self._answer("generation", tokens)["generation"]

    def _answer(self, kind: str, *arrays) -> dict[str, np.ndarray]:
        asked = [None if array is None else array.tolist() for array in arrays]
        fields = json.loads(json.dumps(asdict(self._config)))
        question = Question(self._name, kind, fields, asked, self._recurrent_param)
        if recording := os.environ.get(RECORDING):
            with open(recording, "a") as file:
                file.write(json.dumps(question) + "\n")
        found = _answers().get(question.key())
        assert found or recording, f"no answer of {self._name}: run tests/golden/make_oracles.py"
        return found or _NoAnswer()


class _NoAnswer(dict[str, np.ndarray]):
    """A mapping of every name to NaN, used while questions are recorded."""

    def __missing__(self, name: str) -> np.ndarray:
        return np.array(np.nan)


@functools.cache
def _answers() -> dict[str, dict[str, np.ndarray]]:
    """Return the recorded answers: question key -> name -> array."""
    answers: dict[str, dict[str, np.ndarray]] = {}
    if ANSWERS.exists():
        with np.load(ANSWERS) as file:
            for entry in file.files:
                key, _, name = entry.partition("/")
                answers.setdefault(key, {})[name] = file[entry]
    return answers


def questions() -> list[Question]:
    """Return the questions whose answers are recorded."""
    return [Question(*question) for question in json.loads(QUESTIONS.read_text())["questions"]]


def recorded(question: Question) -> dict[str, np.ndarray]:
    """Return the recorded answer."""
    return _answers()[question.key()]


def ask_library(question: Question) -> dict[str, np.ndarray]:
    """Return the answer of the implementation's library."""
    from parity import weights
    from parity_oracles import ORACLES

    fields = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in question.config.items()
    }
    config = GriffinConfig(**fields)
    values = weights(config)
    if question.recurrent_param is not None:
        values = with_recurrent_param(values, question.recurrent_param)
    arrays = [None if array is None else np.array(array) for array in question.arrays]
    arrays[0] = arrays[0].astype(np.int32)
    if question.kind == "gradients":
        arrays[1] = arrays[1].astype(np.int32)
    given = arrays if arrays[-1] is not None else arrays[:-1]
    answer = getattr(ORACLES[question.name](config, values), question.kind)(*given)
    return answer if question.kind == "gradients" else {question.kind: answer}


def with_recurrent_param(weights: dict[str, np.ndarray], value: float) -> dict[str, np.ndarray]:
    """Return the weights with the same value of Λ in every recurrent block."""
    return {
        name: np.full_like(array, value) if name.endswith("recurrent_param") else array
        for name, array in weights.items()
    }
