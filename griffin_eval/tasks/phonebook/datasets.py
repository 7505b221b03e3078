"""The questions of the phonebook tasks as datasets.

lm_eval passes ``--metadata`` and the arguments of the model. `Shelf` documents the keys; the
tokenizer and the number of visible keys are the model's by default. The hash of a dataset covers
its questions but not their spans in tokens, which depend on the model.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from griffin_eval.arguments import check_integers, visible_keys_argument
from griffin_eval.tasks.curves import as_split
from griffin_eval.tasks.metadata import visible_keys_of
from griffin_eval.tasks.phonebook.books import Book, Shelf, draw
from griffin_eval.tasks.phonebook.lengths import EntrySpan, entry_spans, fill, find_tokenizer

TASK = "griffin_phonebook"
NO_SPAN = {"prompt_tokens": None, "reach": None, "gap": None, "inside_window": None}


class Question(NamedTuple):
    """A question about a book.

    Attributes:
        length: Length of the book, in entries or in tokens.
        number: Index of the book among the books of this length.
        query: Index of the question among the questions about this book.
        kind: Seed of the books of this length.
    """

    length: int
    number: int
    query: int
    kind: str
    book: Book

    def row(self) -> dict[str, Any]:
        """Return the row of the question in `griffin_phonebook`."""
        position = self.book.requested[self.query]
        name, number = self.book.entries[position]
        return {
            "prompt": self.book.ask(name),
            "answer": number,
            "name": name,
            "position": position,
            "length": self.length,
            "entries": len(self.book.entries),
            "book": self.number,
            "query": self.query,
        }


def dataset(**metadata: Any) -> dict[str, Any]:
    """Return questions about entries of the book."""
    return _split(Shelf.of(TASK, metadata), metadata, Question.row)


def absent_dataset(**metadata: Any) -> dict[str, Any]:
    """Return questions for names that are not in the book, with answers that are not in it."""

    def row(question: Question) -> dict[str, Any]:
        name, number = question.book.absent[question.query]
        other = {"prompt": question.book.ask(name), "answer": number, "name": name, "position": -1}
        return question.row() | other

    return _split(Shelf.of(f"{TASK}_absent", metadata), metadata, row, located=False)


def rank_dataset(**metadata: Any) -> dict[str, Any]:
    """Return questions with candidate numbers of the book, in its order, and the same question for
    a name that is not in the book."""
    shelf = Shelf.of(f"{TASK}_rank", metadata)

    def row(question: Question) -> dict[str, Any]:
        book = question.book
        position, absent = book.requested[question.query], book.absent[question.query]
        others = [other for other in book.others() if other != position]
        seed = f"{TASK} {question.kind} {question.number} {question.query} candidates"
        count = min(shelf.candidates - 1, len(others))
        drawn = [others[i] for i in draw(random.Random(seed), len(others), count)]
        return question.row() | {
            "candidates": [book.entries[each].number for each in sorted([*drawn, position])],
            "absent_prompt": book.ask(absent.name),
            "absent_number": absent.number,
        }

    return _split(shelf, metadata, row)


def counterfactual_dataset(**metadata: Any) -> dict[str, Any]:
    """Return the first question about each book, and the same with another number as its answer.

    There is only one question for each book: the model must read half of the changed book again on
    average.
    """

    def row(question: Question) -> dict[str, Any]:
        old, new = question.row(), question.book.replacements[question.query]
        changed = question.book.with_number(old["position"], new)
        return old | {"new_prompt": changed.ask(old["name"]), "new_number": new}

    return _split(Shelf.of(f"{TASK}_counterfactual", metadata, queries=1), metadata, row)


def _split(
    shelf: Shelf,
    metadata: dict[str, Any],
    make_row: Callable[[Question], dict[str, Any]],
    *,
    located: bool = True,
) -> dict[str, Any]:
    """Return the split ``test``.

    Lengths vary fastest, then books: the first few rows cover all lengths, different books, and
    entries at different depths.
    """
    check_integers(shelf.task, **visible_keys_argument(**metadata))
    tokenizer, visible_keys = find_tokenizer(metadata), visible_keys_of(**metadata)
    books = fill(shelf, tokenizer)
    spans: dict[tuple[int, int], list[EntrySpan]] = {}
    if tokenizer is not None and located:
        spans = {key: entry_spans(tokenizer, book) for key, book in books.items()}
    rows, measured = [], []
    for query in range(shelf.queries):
        for index in range(shelf.samples):
            for length in shelf.tokens or shelf.entries:
                book = books[length, index]
                if query < len(book.requested):
                    question = Question(length, index, query, shelf.kind(length), book)
                    rows.append(make_row(question) | {"seed": shelf.seed})
                    measured.append(_measured(spans.get((length, index)), query, visible_keys))
    return as_split(rows, measured)


def _measured(
    spans: list[EntrySpan] | None, query: int, visible_keys: int | None
) -> dict[str, Any]:
    """Return the columns of a row that depend on the model."""
    if spans is None:
        return NO_SPAN
    inside = None if visible_keys is None else spans[query].inside(visible_keys)
    return spans[query]._asdict() | {"inside_window": inside}
