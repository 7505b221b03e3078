"""Phonebooks and questions about them, as plain data.

Everything follows from a seed. No name and no number occurs twice in a book, so that every question
has one answer. The two examples are random entries. The entries asked for are spread over the
others so that each is as likely as any other, and that the questions about one book, and also the
n-th questions about all books, are evenly far apart.
"""

import dataclasses
import random
from typing import Any, NamedTuple

from griffin_eval.arguments import integer_problems, is_integer
from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.phonebook.names import PEOPLE, person

ENTRIES = (20, 50, 100, 200)  # the last is longer than RecurrentGemma's window of 2048 tokens
EXAMPLES = 2
NUMBERS = range(6_000_000_000, 10_000_000_000)  # ten digits, the first from 6 to 9
GOLDEN = (5**0.5 - 1) / 2  # any number of its first multiples, modulo 1, is evenly spread


class Entry(NamedTuple):
    """A line of a book."""

    name: str
    number: str

    def __str__(self) -> str:
        return f"{self.name}: {self.number}"


class Book(NamedTuple):
    """A book and the questions about it.

    Attributes:
        entries: lines of the book.
        examples: positions of the two entries that are shown again after it.
        asked: position of the entry that each question asks for; none of them is an example.
        absent: for each question an entry whose name and number are not in the book.
        replacements: for each question a number that is in neither of these.
    """

    entries: list[Entry]
    examples: list[int]
    asked: list[int]
    absent: list[Entry]
    replacements: list[str]

    def text(self) -> str:
        """The prompt up to the name asked for."""
        examples = [str(self.entries[position]) for position in self.examples]
        return "\n".join([*map(str, self.entries), "", *examples, "", ""])

    def ask(self, name: str) -> str:
        """The prompt that asks for a name."""
        return f"{self.text()}{name}:"

    def with_number(self, position: int, number: str) -> "Book":
        """The book with another number at one position."""
        entries = list(self.entries)
        entries[position] = entries[position]._replace(number=number)
        return self._replace(entries=entries)

    def others(self) -> list[int]:
        """Positions of all entries but the examples."""
        return [i for i in range(len(self.entries)) if i not in self.examples]


@dataclasses.dataclass(frozen=True)
class Shelf:
    """The books of a task, and how many questions each has.

    Attributes:
        task: name of the task, for messages.
        entries: number of entries of a book, or several such lengths.
        tokens: lengths in tokens of the prompt instead, without BOS, into which as many entries go
            as fit; None for lengths in entries.
        samples: books of each length.
        seed: seed of everything that is drawn. A book depends on the seed, its length and its index
            alone: more books or lengths leave the other books as they are, and so do more
            questions.
        queries: questions about each book, at most one for each entry that is no example.
        candidates: numbers of the book that a ranking compares, with the right one; at most one for
            each entry that is no example.

    Raises:
        ArgumentError: names every value that cannot be used.
    """

    task: str
    entries: Any = ENTRIES
    tokens: Any = None
    samples: int = 30
    seed: int = 0
    queries: int = 8
    candidates: int = 16

    def __post_init__(self) -> None:
        names = ("samples", "queries", "candidates", "seed")
        problems = integer_problems({}, **{name: getattr(self, name) for name in names})
        name = "entries" if self.tokens is None else "tokens"
        given = getattr(self, name)
        lengths = list(given) if isinstance(given, (list, tuple)) else [given]
        low, high = EXAMPLES + 1, PEOPLE - (0 if problems else self.queries)
        if not lengths or not all(is_integer(n) and low <= n for n in lengths):
            problems.append(
                f"{name} must be an integer of at least {low} (two examples and the name asked "
                f"for), or a list of such, found {given!r}"
            )
        elif self.tokens is None and max(lengths) > high:
            problems.append(f"entries must be at most {high}, found {given!r}: names are used up")
        if problems:
            raise ArgumentError(f"{self.task}: {'; '.join(problems)}")
        object.__setattr__(self, name, list(dict.fromkeys(lengths)))

    @classmethod
    def of(cls, task: str, metadata: dict[str, Any], **fixed: Any) -> "Shelf":
        """The books that ``--metadata`` asks for; its other keys are ignored.

        Args:
            metadata: ``--metadata`` and the arguments of the model.
            fixed: fields that the task sets itself.
        """
        names = [field.name for field in dataclasses.fields(cls) if field.name != "task"]
        return cls(task, **{name: metadata[name] for name in names if name in metadata} | fixed)

    def kind(self, length: int) -> str:
        """The seed of the books of one length."""
        return f"{self.seed} {length}" + (" tokens" if self.tokens else "")


def draw_book(kind: str, index: int, entries: int, queries: int) -> Book:
    """One book.

    Args:
        kind: seed of the books of one length.
        index: index of the book among these. Of one kind and index, a shorter book is the start of
            a longer one.
        queries: largest number of names to ask for.
    """
    # Of Python's generator only random() gives the same numbers in every version: no sample().
    people, numbers, positions = (
        random.Random(f"griffin_phonebook {kind} {index} {what}")
        for what in ("people", "numbers", "places")
    )
    names = map(person, draw(people, PEOPLE, entries + queries))
    drawn = [str(NUMBERS[n]) for n in draw(numbers, len(NUMBERS), entries + 2 * queries)]
    listed = [Entry(*pair) for pair in zip(names, drawn, strict=False)]
    book = Book(
        entries=listed[:entries],
        examples=draw(positions, entries, EXAMPLES),
        asked=[],
        absent=listed[entries:],
        replacements=drawn[entries + queries :],
    )
    others = book.others()
    turn = (random.Random(f"griffin_phonebook {kind}").random() + index * GOLDEN) % 1
    return book._replace(asked=[others[i] for i in _spread(len(others), queries, turn)])


def _spread(positions: int, queries: int, turn: float) -> list[int]:
    """Different positions, equally far apart on a circle.

    Args:
        positions: number of positions on the circle.
        queries: how many to choose, if there are as many.
        turn: the first of them, as a part of a full turn.
    """
    queries = min(queries, positions)
    start = int(turn * positions * queries)
    return [(start + query * positions) // queries % positions for query in range(queries)]


def draw(rng: random.Random, population: int, count: int) -> list[int]:
    """The first ``count`` numbers of a random order of those below ``population``.

    This is a shuffle that stops early and stores only the numbers that it has swapped.
    """
    swapped: dict[int, int] = {}
    drawn = []
    for here in range(count):
        there = here + int(rng.random() * (population - here))
        drawn.append(swapped.get(there, there))
        swapped[there] = swapped.get(here, here)
    return drawn
