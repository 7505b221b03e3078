"""Phonebooks and questions about them, as plain data.

Everything follows from a seed. No name and no number occurs twice in a book, so that every question
has one answer. The two examples are entries at random; the entries asked for are spread over the
others so that each is as likely as any other, that the questions of one book are evenly far apart,
and that the n-th questions of all books are, too.
"""

import dataclasses
import random
from typing import Any, NamedTuple

from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.metadata import is_integer
from griffin_eval.tasks.phonebook_names import PEOPLE, person

ENTRIES = (20, 50, 100, 200)  # the last is longer than RecurrentGemma's window of 2048 tokens
EXAMPLES = 2
NUMBERS = range(6_000_000_000, 10_000_000_000)  # ten digits, the first from 6 to 9
GOLDEN = (5**0.5 - 1) / 2  # its multiples, modulo 1, stay evenly spread however many there are


class Entry(NamedTuple):
    """A line of a book."""

    name: str
    number: str

    def __str__(self) -> str:
        return f"{self.name}: {self.number}"


class Book(NamedTuple):
    """A book and what is asked of it.

    Attributes:
        entries: its lines.
        examples: positions of the two that are shown again.
        asked: positions, one for each question; none of them an example.
        absent: for each question an entry that is not in the book, neither name nor number.
        replacements: for each question another number, in neither of these.
    """

    entries: list[Entry]
    examples: list[int]
    asked: list[int]
    absent: list[Entry]
    replacements: list[str]

    def text(self) -> str:
        """A prompt up to the last name."""
        examples = [str(self.entries[position]) for position in self.examples]
        return "\n".join([*map(str, self.entries), "", *examples, "", ""])

    def ask(self, name: str) -> str:
        """A prompt."""
        return f"{self.text()}{name}:"

    def with_number(self, position: int, number: str) -> "Book":
        """The book with another number at a place."""
        entries = list(self.entries)
        entries[position] = entries[position]._replace(number=number)
        return self._replace(entries=entries)

    def others(self) -> list[int]:
        """Positions of all entries but the examples."""
        return [i for i in range(len(self.entries)) if i not in self.examples]


@dataclasses.dataclass(frozen=True)
class Shelf:
    """Which books there are.

    Attributes:
        task: whose they are, for messages.
        entries: of a book, or several such lengths.
        tokens: lengths in tokens of the prompt instead, BOS not counted: as many entries as fit.
        samples: books of each length.
        seed: of all that is drawn. A book depends on the seed, its length and its index alone: more
            books or lengths leave the others as they are, more questions the books.
        queries: questions asked of each book; of one with fewer entries, as many as it has besides
            the examples.
        candidates: numbers of the book that a ranking compares, the right one among them; at most
            as many as there are besides the examples.

    Raises:
        ArgumentError: naming all that cannot be.
    """

    task: str
    entries: Any = ENTRIES
    tokens: Any = None
    samples: int = 30
    seed: int = 0
    queries: int = 8
    candidates: int = 16

    def __post_init__(self) -> None:
        least = {"samples": 1, "queries": 1, "candidates": 2, "seed": 0}
        problems = [
            f"{name} must be an integer of at least {bound}, found {value!r}"
            for name, bound in least.items()
            if not is_integer(value := getattr(self, name)) or value < bound
        ]
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
        """What ``--metadata`` says, which also holds the arguments of the model."""
        names = [field.name for field in dataclasses.fields(cls) if field.name != "task"]
        return cls(task, **{name: metadata[name] for name in names if name in metadata} | fixed)

    def kind(self, length: int) -> str:
        """Seed of the books of a length."""
        return f"{self.seed} {length}" + (" tokens" if self.tokens else "")


def draw_book(kind: str, index: int, entries: int, queries: int) -> Book:
    """A book.

    Args:
        kind: seed of the books of one length.
        index: among these. Of the same kind and index a shorter book is the start of a longer one.
        entries: how many.
        queries: names to ask for, at most.
    """
    # Of Python's generator only random() gives the same numbers in every version: no sample().
    people, numbers, places = (
        random.Random(f"griffin_phonebook {kind} {index} {what}")
        for what in ("people", "numbers", "places")
    )
    names = map(person, draw(people, PEOPLE, entries + queries))
    drawn = [str(NUMBERS[n]) for n in draw(numbers, len(NUMBERS), entries + 2 * queries)]
    listed = [Entry(*pair) for pair in zip(names, drawn, strict=False)]
    book = Book(
        entries=listed[:entries],
        examples=draw(places, entries, EXAMPLES),
        asked=[],
        absent=listed[entries:],
        replacements=drawn[entries + queries :],
    )
    others = book.others()
    turn = (random.Random(f"griffin_phonebook {kind}").random() + index * GOLDEN) % 1
    return book._replace(asked=[others[i] for i in _spread(len(others), queries, turn)])


def _spread(places: int, queries: int, turn: float) -> list[int]:
    """Different places below ``places``, equally far apart around a circle, from a part of a turn
    on."""
    queries = min(queries, places)
    start = int(turn * places * queries)
    return [(start + query * places) // queries % places for query in range(queries)]


def draw(rng: random.Random, population: int, count: int) -> list[int]:
    """Distinct numbers below ``population``: a shuffle that stops after ``count`` and stores only
    what it has moved."""
    moved: dict[int, int] = {}
    drawn = []
    for here in range(count):
        there = here + int(rng.random() * (population - here))
        drawn.append(moved.get(there, there))
        moved[there] = moved.get(here, here)
    return drawn
