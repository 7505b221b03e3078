"""Smoke tests on a real text that ships with Python: the language reference, `pydoc_data.topics`.

They need no download and show whether an installation works and two models agree; they are not
benchmarks. The text differs a little between versions of Python, so results.json holds its hash.
"""

import hashlib
import random
from collections import Counter
from pydoc_data.topics import topics

import datasets

from griffin_eval.arguments import check_integers

CHOICES = 4
TOPICS = 18  # choices of a topic question
PARAGRAPH = (80, 500)  # smallest and largest number of characters of a usable paragraph


def choice(samples: int = 40, seed: int = 0, **_) -> dict[str, datasets.Dataset]:
    """Return the split of ``griffin_pydoc_choice``: which of four paragraphs comes next?

    Each of the ``samples`` questions is about another topic; wrong answers are of other topics.
    """
    check_integers("griffin_pydoc_choice", samples=samples)
    rng = random.Random(f"pydoc_choice {seed}")
    pages = {name: _paragraphs(text) for name, text in sorted(topics.items())}
    pages = {name: paragraphs for name, paragraphs in pages.items() if len(paragraphs) >= 2}
    own = _of_one_page(pages)
    rows = []
    for name in rng.sample(sorted(pages), min(samples, len(pages))):
        at = rng.randrange(len(pages[name]) - 1)
        others = [rng.choice(own[other]) for other in _others(rng, own, name, CHOICES - 1)]
        label = rng.randrange(CHOICES)
        others.insert(label, pages[name][at + 1])
        rows.append({"topic": name, "context": pages[name][at], "choices": others, "label": label})
    return _split(rows)


def topic(samples: int = 40, seed: int = 0, **_) -> dict[str, datasets.Dataset]:
    """Return the split of ``griffin_pydoc_topic``: which of 18 topics is a paragraph of?

    Each of the ``samples`` questions is about another topic.
    """
    check_integers("griffin_pydoc_topic", samples=samples)
    rng = random.Random(f"pydoc_topic {seed}")
    pages = {name: _paragraphs(text) for name, text in sorted(topics.items())}
    pages = _of_one_page(pages)
    rows = []
    for name in rng.sample(sorted(pages), min(samples, len(pages))):
        choices = _others(rng, pages, name, TOPICS - 1)
        label = rng.randrange(TOPICS)
        choices.insert(label, name)
        context = rng.choice(pages[name])
        rows.append({"topic": name, "context": context, "choices": choices, "label": label})
    return _split(rows)


def rolling(samples: int = 10, seed: int = 0, **_) -> dict[str, datasets.Dataset]:
    """Return the split of ``griffin_pydoc_rolling``: whole topics of 1500 to 6000 characters."""
    check_integers("griffin_pydoc_rolling", samples=samples)
    rng = random.Random(f"pydoc_rolling {seed}")
    fit = [name for name, text in sorted(topics.items()) if 1500 <= len(text) <= 6000]
    names = rng.sample(fit, min(samples, len(fit)))
    return _split([{"topic": name, "text": topics[name]} for name in names])


def _paragraphs(text: str) -> list[str]:
    parts = [" ".join(part.split()) for part in text.split("\n\n")]
    return [part for part in parts if PARAGRAPH[0] <= len(part) <= PARAGRAPH[1]]


def _of_one_page(pages: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the paragraphs that no other page holds, and the pages that have any."""
    counts = Counter(part for parts in pages.values() for part in set(parts))
    own = {name: [part for part in parts if counts[part] == 1] for name, parts in pages.items()}
    return {name: parts for name, parts in own.items() if parts}


def _others(rng: random.Random, pages: dict[str, list[str]], name: str, count: int) -> list[str]:
    return rng.sample([other for other in sorted(pages) if other != name], count)


def _split(rows: list[dict]) -> dict[str, datasets.Dataset]:
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()
    return {"test": datasets.Dataset.from_list([row | {"dataset_sha256": digest} for row in rows])}
