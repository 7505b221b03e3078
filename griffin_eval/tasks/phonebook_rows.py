"""The questions of the phonebook tasks as data sets.

lm_eval passes to each what ``--metadata`` says and the arguments of the model; `Shelf` says what
counts, and `phonebook_places` how a tokenizer and a window are found. The hash of a data set is
over its questions alone: where an entry is in tokens is not part of it.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from griffin_eval.tasks.curves import as_split
from griffin_eval.tasks.metadata import integers, window_of
from griffin_eval.tasks.phonebook_books import Book, Shelf, draw
from griffin_eval.tasks.phonebook_places import Place, fill, find_tokenizer, places

TASK = "griffin_phonebook"
NO_PLACE = {"prompt_tokens": None, "reach": None, "gap": None, "inside_window": None}


class Question(NamedTuple):
    """A question about a book.

    Attributes:
        length: of the book, in entries or in tokens.
        number: of the book among those of this length.
        query: number of the question among those on this book.
        kind: seed of the books of this length.
    """

    length: int
    number: int
    query: int
    kind: str
    book: Book

    def row(self) -> dict[str, Any]:
        """The question as `griffin_phonebook` asks it."""
        position = self.book.asked[self.query]
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
    """Questions that have an answer."""
    return _split(Shelf.of(TASK, metadata), metadata, Question.row)


def absent_dataset(**metadata: Any) -> dict[str, Any]:
    """Questions for names that are not in the book; the answer is a number that is not, either."""

    def row(question: Question) -> dict[str, Any]:
        name, number = question.book.absent[question.query]
        other = {"prompt": question.book.ask(name), "answer": number, "name": name, "position": -1}
        return question.row() | other

    return _split(Shelf.of(f"{TASK}_absent", metadata), metadata, row, located=False)


def rank_dataset(**metadata: Any) -> dict[str, Any]:
    """Questions with numbers of the book to choose from, in the book's order, and the question for
    a name that is not in it."""
    shelf = Shelf.of(f"{TASK}_rank", metadata)

    def row(question: Question) -> dict[str, Any]:
        book = question.book
        position, absent = book.asked[question.query], book.absent[question.query]
        others = [other for other in book.others() if other != position]
        seed = f"{TASK} {question.kind} {question.number} {question.query} candidates"
        count = min(shelf.candidates - 1, len(others))
        drawn = [others[i] for i in draw(random.Random(seed), len(others), count)]
        return question.row() | {
            "candidates": [book.entries[place].number for place in sorted([*drawn, position])],
            "absent_prompt": book.ask(absent.name),
            "absent_number": absent.number,
        }

    return _split(shelf, metadata, row)


def counterfactual_dataset(**metadata: Any) -> dict[str, Any]:
    """The first question of each book, and once more of the book with another number there. One
    alone, since for every one a changed book has to be read, half of it on the average."""

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
    """The split ``test``. The lengths take turns, then the books: the first few documents have all
    lengths, different books, and entries at different depths."""
    if (given := metadata.get("window")) is not None:
        integers(shelf.task, window=given)
    tokenizer, window = find_tokenizer(metadata), window_of(**metadata)
    books = fill(shelf, tokenizer)
    where: dict[tuple[int, int], list[Place]] = {}
    if tokenizer is not None and located:
        where = {key: places(tokenizer, book) for key, book in books.items()}
    rows, measured = [], []
    for query in range(shelf.queries):
        for index in range(shelf.samples):
            for length in shelf.tokens or shelf.entries:
                book = books[length, index]
                if query < len(book.asked):
                    question = Question(length, index, query, shelf.kind(length), book)
                    rows.append(make_row(question) | {"seed": shelf.seed})
                    measured.append(_measure(where.get((length, index)), query, window))
    return as_split(rows, measured)


def _measure(where: list[Place] | None, query: int, window: int | None) -> dict[str, Any]:
    if where is None:
        return NO_PLACE
    inside = None if window is None else where[query].inside(window)
    return where[query]._asdict() | {"inside_window": inside}
