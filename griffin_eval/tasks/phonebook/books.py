"""Phonebooks and questions about them, as plain data.

Everything follows from a seed. No name and no number occurs twice in a book, so that every question
has one answer. The two examples are random entries. The requested entries are spread over the
others so that each is equally likely, and that the questions about one book, and also the n-th
questions about all books, are evenly spaced.
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
GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, are evenly spread


class Entry(NamedTuple):
    """A line of a book."""

    name: str
    number: str

    def __str__(self) -> str:
        return f"{self.name}: {self.number}"


class Book(NamedTuple):
    """A book and the questions about it.

    Attributes:
        examples: Positions of the two entries that are repeated after the book.
        requested: Position of the requested entry of each question, never an example.
        absent: Entry for each question whose name and number are not in the book.
        replacements: Number for each question that is neither in the book nor in ``absent``.
    """

    entries: list[Entry]
    examples: list[int]
    requested: list[int]
    absent: list[Entry]
    replacements: list[str]

    def text(self) -> str:
        """Return the prompt up to the requested name."""
        examples = [str(self.entries[position]) for position in self.examples]
        return "\n".join([*map(str, self.entries), "", *examples, "", ""])

    def ask(self, name: str) -> str:
        """Return the prompt that asks for a name."""
        return f"{self.text()}{name}:"

    def with_number(self, position: int, number: str) -> "Book":
        """Return the book with another number at one position."""
        entries = list(self.entries)
        entries[position] = entries[position]._replace(number=number)
        return self._replace(entries=entries)

    def others(self) -> list[int]:
        """Return the positions of all entries but the examples."""
        return [i for i in range(len(self.entries)) if i not in self.examples]


@dataclasses.dataclass(frozen=True)
class Shelf:
    """The books of a task, and the number of questions about each.

    Attributes:
        task: Name of the task, for messages.
        entries: Number of entries of a book, or several such lengths.
        tokens: Lengths of the prompt in tokens without BOS, filled with as many entries as fit;
            None for lengths in entries.
        samples: Number of books of each length.
        seed: Seed of all random numbers. A book depends only on the seed, its length and its index,
            so that more books, lengths or questions leave the other books unchanged.
        queries: Number of questions about each book, at most one per entry that is no example.
        candidates: Number of the book's numbers that a ranking compares, including the right one;
            at most one per entry that is no example.

    Raises:
        ArgumentError: Values are invalid; the message names all of them.
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
        value = getattr(self, name)
        lengths = list(value) if isinstance(value, (list, tuple)) else [value]
        low, high = EXAMPLES + 1, PEOPLE - (0 if problems else self.queries)
        if not lengths or not all(is_integer(n) and low <= n for n in lengths):
            problems.append(
                f"{name} must be an integer of at least {low} (two examples and the name asked "
                f"for), or a list of such, found {value!r}"
            )
        elif self.tokens is None and max(lengths) > high:
            problems.append(f"entries must be at most {high}, found {value!r}: names are used up")
        if problems:
            raise ArgumentError(f"{self.task}: {'; '.join(problems)}")
        object.__setattr__(self, name, list(dict.fromkeys(lengths)))

    @classmethod
    def of(cls, task: str, metadata: dict[str, Any], **fixed: Any) -> "Shelf":
        """Return the books that ``--metadata`` asks for; its other keys are ignored."""
        names = [field.name for field in dataclasses.fields(cls) if field.name != "task"]
        return cls(task, **{name: metadata[name] for name in names if name in metadata} | fixed)

    def kind(self, length: int) -> str:
        """Return the seed of the books of one length."""
        return f"{self.seed} {length}" + (" tokens" if self.tokens else "")


def draw_book(kind: str, index: int, entries: int, queries: int) -> Book:
    """Draw one book.

    Args:
        kind: Seed of the books of one length.
        index: Index of the book. For one kind and index, a shorter book is the start of a longer
            one.
        queries: Largest number of requested names.
    """
    # random() is the only method with the same numbers in every version of Python: no sample().
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
        requested=[],
        absent=listed[entries:],
        replacements=drawn[entries + queries :],
    )
    others = book.others()
    turn = (random.Random(f"griffin_phonebook {kind}").random() + index * GOLDEN) % 1
    return book._replace(requested=[others[i] for i in _spread(len(others), queries, turn)])


def _spread(positions: int, queries: int, turn: float) -> list[int]:
    """Return distinct positions, equally far apart on a circle of ``positions``.

    Args:
        queries: Number of positions to choose, if there are as many.
        turn: First position, as a fraction of a full turn.
    """
    queries = min(queries, positions)
    start = int(turn * positions * queries)
    return [(start + query * positions) // queries % positions for query in range(queries)]


def draw(rng: random.Random, population: int, count: int) -> list[int]:
    """Return the first ``count`` numbers of a random order of the numbers below ``population``.

    This is a shuffle that stops early and stores only swapped numbers.
    """
    swapped: dict[int, int] = {}
    drawn = []
    for here in range(count):
        there = here + int(rng.random() * (population - here))
        drawn.append(swapped.get(there, there))
        swapped[there] = swapped.get(here, here)
    return drawn
