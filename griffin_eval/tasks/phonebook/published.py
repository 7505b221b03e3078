"""The phonebook exactly as published, but seeded.

The source is Jelassi et al., "Repeat After Me" (2024): `PhoneBookDataset` of
``pretrained_exps/data_utils.py`` in github.com/sjelassi/transformers_ssm_copy, with the names of
the Python package `names`. Nothing is seeded there. Here each prompt has its own seed, and equals
the output of the published code after
``random.seed("griffin_phonebook_jelassi SEED ENTRIES BOOK")``.

Unlike `griffin_phonebook`, names and numbers may occur twice in a book, so that a question may have
two answers, one of which counts; and there is one question about each book.
"""

import random
from collections.abc import Sequence
from typing import Any

from griffin_eval.tasks.curves import as_split
from griffin_eval.tasks.phonebook.books import Shelf
from griffin_eval.tasks.phonebook.names import census

NAME = "griffin_phonebook_jelassi"
SAMPLES = 96  # three batches of 32 per length, the defaults of the published evaluation


def dataset(samples: int = SAMPLES, **metadata: Any) -> dict[str, Any]:
    """Return the split ``test``.

    Args:
        samples: Number of books of each length.
        metadata: ``entries`` and ``seed`` as in `Shelf`; other keys are ignored.
    """
    chosen = {key: metadata[key] for key in ("entries", "seed") if key in metadata}
    shelf = Shelf(NAME, samples=samples, queries=1, **chosen)
    rows = documents(shelf.entries, samples, shelf.seed)
    return as_split(rows, [{"inside_window": None}] * len(rows))


def documents(entries: Sequence[int], samples: int, seed: int) -> list[dict[str, Any]]:
    """Return a row for each prompt, with ``samples`` books of each length; lengths vary fastest."""
    rows = []
    for book in range(samples):
        for length in entries:
            where = {"length": length, "entries": length, "book": book, "query": 0, "seed": seed}
            rng = random.Random(f"{NAME} {seed} {length} {book}")
            rows.append(where | _draw(rng, length))
    return rows


def _draw(rng: random.Random, length: int) -> dict[str, Any]:
    entries = []
    for _ in range(length):
        first = census()[rng.choice(("male", "female"))].draw(rng)
        name = f"{first} {census()['last'].draw(rng)}"
        digits = [rng.randint(6, 9), *(rng.randint(0, 9) for _ in range(9))]
        entries.append((name, "".join(map(str, digits))))
    lines = [f"{name}: {number}" for name, number in entries]
    *examples, position = rng.sample(range(length), 3)
    shared = [*lines, "", *(lines[example] for example in examples), "", ""]
    name, number = entries[position]
    prompt = "\n".join(shared) + f"{name}:"
    return {"prompt": prompt, "answer": number, "name": name, "position": position}
