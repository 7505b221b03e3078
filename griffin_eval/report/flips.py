"""Items that are right in one run and wrong in another, for reading."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from griffin_eval.report.paired import common_items, item_of, metrics_of
from griffin_eval.report.results import Run
from griffin_eval.report.samples import read_samples

MAX_FLIPS = 8  # shown items of a task and a pair of runs
MAX_LETTERS = 700  # shown letters of a prompt, from its end
MAX_ANSWER = 300  # shown letters of an answer


class Flip(NamedTuple):
    """An item that one of two runs answers right, with the end of its prompt."""

    prompt: str
    target: str
    right: str
    wrong: str
    right_run: str
    wrong_run: str


class Flips(NamedTuple):
    """The items of a task that flipped between two runs.

    Attributes:
        metric: Metric by which an answer is right.
        number: Number of all flipped items.
        shown: First flipped items.
    """

    task: str
    metric: str
    run: str
    baseline: str
    number: int
    shown: list[Flip]


def flips(runs: Sequence[Run]) -> list[Flips]:
    """Return the flips between each run and the first run that has samples of the task."""
    found = []
    for task in dict.fromkeys(task for run in runs for task in run.samples):
        baseline, *others = (run for run in runs if task in run.samples)
        theirs = read_samples(baseline.samples[task]) if others else {}
        for run in others:
            common = common_items(read_samples(run.samples[task]), theirs)
            for items in list(common.values())[:1]:
                metric, changed = _changed(items)
                shown = [
                    _flip(run, baseline, own, other, gained)
                    for own, other, gained in changed[:MAX_FLIPS]
                ]
                if shown:
                    found.append(
                        Flips(task, metric, run.label, baseline.label, len(changed), shown)
                    )
    return found


def _changed(items: list[Any]) -> tuple[str, list[tuple[dict[str, Any], dict[str, Any], bool]]]:
    """Return the first metric with only right and wrong values, and its flipped items."""
    for metric in metrics_of(*(sample for _, _, sample in items)):
        pairs = [
            (own, other, *(item_of(metric, each.get(metric), "") for each in (own, other)))
            for _, own, other in items
        ]
        values = {each[0] for *_, a, b in pairs for each in (a, b) if each is not None}
        if values and values <= {0.0, 1.0}:
            return metric, [(x, y, a[0] > b[0]) for x, y, a, b in pairs if a and b and a[0] != b[0]]
    return "", []


def _flip(run: Run, baseline: Run, sample: Any, other: Any, gained: bool) -> Flip:
    answers = [(_answer(sample), run.label), (_answer(other), baseline.label)]
    (right, right_run), (wrong, wrong_run) = answers if gained else reversed(answers)
    prompt = str(_arguments(sample)[0].get("arg_0", ""))
    prompt = prompt if len(prompt) <= MAX_LETTERS else f"…{prompt[-MAX_LETTERS:]}"
    return Flip(prompt, _target(sample), right, wrong, right_run, wrong_run)


def _arguments(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return list((sample.get("arguments") or {}).values()) or [{}]


def _answer(sample: dict[str, Any]) -> str:
    """Return the generated text, the likeliest choice, or the log-likelihood."""
    responses = sample.get("filtered_resps") or [""]
    if not all(isinstance(response, list) and len(response) == 2 for response in responses):
        return _cut(responses[0])
    scores = [float(score) for score, _ in responses]
    if len(scores) == 1:
        return f"log-likelihood {scores[0]:.4g} (greedy: {responses[0][1]})"
    return _choice(sample, scores.index(max(scores)))


def _target(sample: dict[str, Any]) -> str:
    target = str(sample.get("target", ""))
    several = len(_arguments(sample)) > 1 and target.isdecimal()
    return _choice(sample, int(target)) if several else _cut(target)


def _choice(sample: dict[str, Any], index: int) -> str:
    choices = [argument.get("arg_1", "") for argument in _arguments(sample)]
    return f"{index}: {_cut(choices[index])}" if index < len(choices) else str(index)


def _cut(text: Any) -> str:
    text = str(text)
    return text if len(text) <= MAX_ANSWER else f"{text[:MAX_ANSWER]}…"
