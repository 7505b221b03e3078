"""Phonebook tasks: find the number of a name somewhere in the prompt.

A prompt (Jelassi et al., "Repeat After Me", 2024; section 6.2 of the Griffin paper) is

    First Last: 9876543210      the book, one entry a line
    ...
                                an empty line
    First Last: 8765432109      two entries of the same book, as examples
    First Last: 7654321098
                                an empty line
    First Last:                 the requested name, another entry; no space after the colon

Four tasks ask about the same books. They are separate because lm-eval pads the requests of several
processes by the single request type of a task. A run of several tasks still reads each book once
for all generated texts and once for all log-likelihoods; only a changed book is read again, from
the change on.

Every metric exists over all questions, and for each length as ``metric@length``. Clusters of the
intervals are books (`griffin_eval.intervals`). A question is inside the window if the model's local
attention sees the whole entry from the end of the prompt, and outside if it sees no token of the
entry from the start of the question on.
"""

import re
from typing import Any

from lm_eval.api.instance import Instance

from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.curves import (
    OF_LENGTHS,
    AnyObservation,
    CurveTask,
    LengthObservation,
    Observation,
)

NUMBER = re.compile(r": ([0-9]{10})$", re.MULTILINE)
WINDOW = {True: "inside_window", False: "outside_window"}
DEPTHS = (10, 30, 50, 70, 90)  # middle of each fifth of a book, in percent


class BookTask(CurveTask):
    """Base class of the phonebook tasks: metrics over all questions, and for each length."""

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        rows = self.dataset["test"]
        self._lengths = sorted(set(rows["length"]))
        self._split = any(inside is not None for inside in rows["inside_window"])

    def declare_points(
        self,
        metric: str,
        kind: str,
        *,
        higher_is_better: bool = True,
        by_window: bool = False,
        by_depth: bool = False,
    ) -> None:
        """Declare a metric over all questions and at each length; optionally also inside and
        outside the window, if that is known, and in each fifth of the book."""
        names = [metric, *(f"{metric}@{length}" for length in self._lengths)]
        if by_window and self._split:
            names += [f"{metric}@{where}" for where in WINDOW.values()]
        if by_depth:
            names += [f"{metric}_by_depth@{depth}" for depth in DEPTHS]
        for name in names:
            self.declare(name, kind, higher_is_better=higher_is_better)

    def score_points(
        self, doc: dict[str, Any], values: dict[str, float], **more: AnyObservation
    ) -> dict[str, Any]:
        """Return the scores of a document."""
        depth = DEPTHS[doc["position"] * len(DEPTHS) // doc["entries"]]
        points = ["", f"@{doc['length']}", f"@{WINDOW.get(doc['inside_window'])}"]
        points.append(f"_by_depth@{depth}")
        observations: dict[str, AnyObservation] = {
            metric + point: Observation(float(value), 1.0, cluster_of(doc))
            for metric, value in values.items()
            for point in points
        }
        return self.scores(observations | more)


class Phonebook(BookTask):
    """Exact match: the generated text up to its first newline, stripped, equals the number.

    ``capacity`` is the length, in the unit of the books, up to which at least half of the answers
    are right; ``effective_length`` is the last length at which the score is at least 85% of the
    score at the shortest length (`griffin_eval.intervals.effective_length`).
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        self.declare_points("exact_match", "proportion", by_window=True, by_depth=True)
        for metric in OF_LENGTHS:
            self.declare(metric, metric, higher_is_better=True)

    def process_results(self, doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
        if "bypass" in self._metric_fn_list:  # --predict_only
            return super().process_results(doc, results)
        right = float(first_line(results[0]) == doc["answer"])
        at = LengthObservation(right, length=doc["length"], cluster=cluster_of(doc))
        return self.score_points(doc, {"exact_match": right}, **dict.fromkeys(OF_LENGTHS, at))


class PhonebookAbsent(BookTask):
    """Questions for a name that is not in the book, so that no answer is right.

    ``from_book`` is the share of answers that are a number of the book. ``exact_match`` compares
    with a random number that occurs nowhere in the prompt; a score above 0 is a sign of an error.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        for metric in ("from_book", "exact_match"):
            self.declare_points(metric, "proportion", higher_is_better=False)

    def process_results(self, doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
        if "bypass" in self._metric_fn_list:
            return super().process_results(doc, results)
        answer = first_line(results[0])
        values = {
            "from_book": answer in NUMBER.findall(doc["prompt"]),
            "exact_match": answer == doc["answer"],
        }
        return self.score_points(doc, values)


class LikelihoodTask(BookTask):
    """Several log-likelihoods for each document, one for each of its `pairs`."""

    def pairs(self, doc: dict[str, Any]) -> list[tuple[str, str]]:
        """Return prompts and the numbers to score after them, in the order of the results."""
        raise NotImplementedError

    def construct_requests(self, doc: dict[str, Any], ctx: Any, **kwargs: Any) -> list[Instance]:
        metadata, prompt = kwargs["metadata"], doc["prompt"]
        # No space follows a chat template, as in lm_eval's tasks.
        space = "" if kwargs.get("apply_chat_template") else " "
        if ctx.count(prompt) != 1:
            raise ArgumentError(
                f"{self.config.task}: the chat template changes the text of the question, so that "
                "no other question can be put in its place"
            )
        return [
            Instance(
                "loglikelihood", doc, (ctx.replace(prompt, other), f"{space}{number}"), i, metadata
            )
            for i, (other, number) in enumerate(self.pairs(doc))
        ]


class PhonebookRank(LikelihoodTask):
    """The right number among numbers of its book, in nats and by rank.

    ``loglikelihood`` is log p(number | book, name); a guess among all phone numbers has -22.1.
    ``rank`` is the rank of the right number among the ``candidates`` of the book, 1 for the
    likeliest (ties count half), and ``first`` the share of questions in which it is strictly the
    likeliest. A model that ignores the name scores the chance recorded in the config, however it
    uses the book: requested and compared entries are drawn alike, and the examples, which stand in
    the prompt twice, are neither.

    ``name_effect`` is log p(number | book, name) - log p(number | book, absent name), and
    ``absent_loglikelihood`` log p(absent number | book, absent name).
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        self.declare_points("loglikelihood", "ratio", by_window=True)
        self.declare_points("rank", "ratio", higher_is_better=False, by_window=True)
        self.declare_points("first", "proportion", by_window=True)
        self.declare_points("name_effect", "ratio")
        self.declare_points("absent_loglikelihood", "ratio", higher_is_better=False)
        chance = {}
        for length in self._lengths:
            rows = (row for row in self.dataset["test"] if row["length"] == length)
            counts = [len(row["candidates"]) for row in rows]
            chance[f"rank@{length}"] = sum(1 + n for n in counts) / 2 / len(counts)
            chance[f"first@{length}"] = sum(1 / n for n in counts) / len(counts)
        self.state_chance(chance)

    def pairs(self, doc: dict[str, Any]) -> list[tuple[str, str]]:
        return [
            *((doc["prompt"], number) for number in doc["candidates"]),
            (doc["absent_prompt"], doc["answer"]),
            (doc["absent_prompt"], doc["absent_number"]),
        ]

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        *others, absent_name, absent = (score for score, _ in results)
        right = others.pop(doc["candidates"].index(doc["answer"]))
        above, equal = sum(o > right for o in others), sum(o == right for o in others)
        values = {
            "loglikelihood": right,
            "rank": 1 + above + equal / 2,
            "first": above == equal == 0,
            "name_effect": right - absent_name,
            "absent_loglikelihood": absent,
        }
        return self.score_points(doc, values)


class PhonebookCounterfactual(LikelihoodTask):
    """The book with the right number replaced and everything else unchanged.

    ``follows`` is the share of books for which the model then says the new number; ``prefers`` the
    share for which it finds the new number likelier than the old one (chance: a half); ``effect``
    the nats by which the change makes the old number less likely.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        self.declare_points("follows", "proportion", by_window=True)
        self.declare_points("prefers", "proportion", by_window=True)
        self.declare_points("effect", "ratio", by_window=True)
        self.state_chance({"prefers": 0.5})

    def pairs(self, doc: dict[str, Any]) -> list[tuple[str, str]]:
        new, old = doc["new_number"], doc["answer"]
        return [(doc["prompt"], old), (doc["new_prompt"], old), (doc["new_prompt"], new)]

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        (before, _), (after, _), (new, follows) = results
        values = {"follows": follows, "prefers": new > after, "effect": before - after}
        return self.score_points(doc, values)


def first_line(generated: str) -> str:
    """Return the part of a generated text that counts as the answer."""
    return generated.split("\n", 1)[0].strip()


def cluster_of(doc: dict[str, Any]) -> str:
    """Return the book of a row, since questions about one book are dependent."""
    return f"{doc['length']} {doc['book']}"
