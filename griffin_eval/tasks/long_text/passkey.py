"""Passkey retrieval: a number hidden in a long text, requested at its end.

The prompt of passkey retrieval as published (Mohtashami and Jaggi, "Landmark Attention", 2023):

    There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. …
    <text>
    The pass key is 71432. Remember it. 71432 is the pass key.
    <text>
    What is the pass key? The pass key is

With several needles each has a key word, in the words of RULER (Hsieh et al., 2024) as lm_eval has
them, and the question names one key word:

    A special magic number is hidden within the following text. Make sure to memorize it. …
    <text>
    One of the special magic numbers for harbor is: 71432.
    <text>
    What is the special magic number for harbor mentioned in the provided text? The special magic
    number for harbor mentioned in the provided text is

Differences: the text is a real one, not a few repeated sentences; the needle stands at the
requested depths, from 0 to 100% of the tokens of the text; numbers have five digits and do not
occur in the text; everything follows from a seed. An answer is right if the first digits on its
first line are exactly the number.

`griffin_eval.tasks.long_text.needles` draws the text around the needles.
"""

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from griffin_eval.arguments import check_integers
from griffin_eval.errors import ArgumentError
from griffin_eval.tasks.curves import as_split
from griffin_eval.tasks.long_text.needles import (
    DEPTHS,
    LENGTHS,
    SAMPLES,
    NeedleTask,
    Placement,
    placements,
)
from griffin_eval.tasks.metadata import tokenizer_of

TASK = "griffin_passkey"
NUMBERS = range(10_000, 100_000)

PASSKEY = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them."
    " I will quiz you about the important information there.",
    "The pass key is {number}. Remember it. {number} is the pass key.",
    "What is the pass key? The pass key is",
)
NEEDLES = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will"
    " quiz you about the number afterwards.",
    "One of the special magic numbers for {key} is: {number}.",
    "What is the special magic number for {key} mentioned in the provided text? The special magic"
    " number for {key} mentioned in the provided text is",
)
KEYS = """
anchor apple arrow basket beach bell bottle bridge bucket button cabin camera candle canyon carpet
castle chair cherry circle cloud coffee copper cotton crown desert diamond dolphin dragon eagle
engine feather fiddle forest fountain garden glacier guitar hammer harbor helmet honey island jacket
jungle kettle ladder lantern lemon magnet maple meadow mirror mountain needle ocean orange painter
palace parrot pencil pepper piano pillow planet pocket pumpkin rabbit ribbon river rocket saddle
salmon shadow silver spider spoon statue sugar sunset table temple thunder ticket tiger tunnel
turtle valley velvet violin walnut whistle window winter wolf
""".split()


class Passkey(NeedleTask):
    """The lm_eval task."""

    def is_correct(self, generated: str, answer: str) -> bool:
        return is_correct(generated, answer)


def is_correct(generated: str, answer: str) -> bool:
    """Return whether the first digits on the first line of the generated text are the answer."""
    digits = re.search("[0-9]+", generated.split("\n", 1)[0])
    return digits is not None and digits[0] == answer


def dataset(
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[int] = DEPTHS,
    samples: int = SAMPLES,
    needles: int = 1,
    document: Any = None,
    max_tokens: int | None = None,
    seed: int = 0,
    **model: Any,
) -> dict[str, Any]:
    """Return the split of the task.

    Args:
        lengths, depths, samples, document, max_tokens, seed: See `placements`.
        needles: Number of needles. The question asks for one; the seed places the others.
        model: Arguments of `griffin_eval.tasks.metadata.tokenizer_of`.
    """
    check_integers(TASK, needles=needles)
    if needles > len(KEYS):
        raise ArgumentError(f"{TASK}: there are {len(KEYS)} key words, found needles={needles}")
    description, needle, question = PASSKEY if needles == 1 else NEEDLES
    filled = needle.format(number=NUMBERS[0], key=KEYS[0])
    around = [description, *[filled] * needles, question.format(key=KEYS[0])]
    places = placements(
        TASK, around, lengths, depths, samples, document, max_tokens, seed, tokenizer_of(**model)
    )
    rows = []
    for place in places:
        prompt, answer = _prompt(place, needles)
        rows.append(place.row() | {"prompt": prompt, "answer": answer})
    return as_split(rows)


def _prompt(place: Placement, needles: int) -> tuple[str, str]:
    description, needle, question = PASSKEY if needles == 1 else NEEDLES
    numbers = _numbers(place.rng, place.text())
    keys = iter(sorted(KEYS, key=lambda _: place.rng.random()))
    hidden = []
    for index in range(needles):
        at = place.depth / 100 if index == 0 else place.rng.random()
        hidden.append((at, next(numbers), next(keys)))
    lines = [(at, needle.format(number=number, key=key)) for at, number, key in hidden]
    _, answer, key = hidden[0]
    return place.prompt(description, lines, question.format(key=key)), answer


def _numbers(rng: random.Random, text: str) -> Iterator[str]:
    """Yield distinct numbers, as text, that do not occur in a text."""
    drawn: set[str] = set()
    while True:
        number = str(NUMBERS[int(rng.random() * len(NUMBERS))])
        if number not in drawn and number not in text:
            drawn.add(number)
            yield number
