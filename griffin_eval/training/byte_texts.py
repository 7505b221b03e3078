"""Training examples of bytes, from Python's standard library and phonebooks, and their tokenizer.

The tasks over long texts read Python's manual and a few long modules of its library, so training
leaves these out. The text differs a little between versions of Python, so a run records its hash.
"""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from griffin_eval.tasks.phonebook.books import NUMBERS
from griffin_eval.tasks.phonebook.names import PEOPLE, person
from griffin_eval.training.recipes import Batch

PAD, EOS, BOS, FIRST = range(4)  # ids; byte b has FIRST + b
VOCABULARY = FIRST + 256
DIGITS = 10  # digits of a phone number
SPREAD = 40_507  # coprime to `PEOPLE`, so that drawn people differ in first and last name
LOW_WEIGHT = 0.1  # weight in the loss of everything but digits that the book determines


@functools.cache
def corpus() -> bytes:
    """Return the modules to train on, one after the other."""
    from griffin_eval.tasks.long_text.documents import PYTHON_MODULES

    folder = Path(os.__file__).parent
    files = sorted(p for p in folder.glob("*.py") if p.stem not in PYTHON_MODULES)
    return b"\n".join(file.read_bytes() for file in files)


@functools.cache
def held_out() -> bytes:
    """Return the modules that the tasks read, one after the other."""
    from griffin_eval.tasks.long_text.documents import python_texts

    return "\n".join(text for _, text in python_texts()).encode()


def text(
    rng: np.random.Generator,
    length: int,
    *,
    source: Callable[[], bytes] = corpus,
    scored: bool = False,
) -> Batch:
    """Draw ``length`` bytes of a source, which count for the accuracy if ``scored``."""
    whole = source()
    start = int(rng.integers(len(whole) - length))
    ids, ones = _ids(whole[start : start + length]), np.ones(length, np.float32)
    return Batch(ids[:-1], ids[1:], ones, np.full(length, scored), np.zeros(length, np.int32))


def phonebook(
    rng: np.random.Generator,
    length: int,
    min_entries: int = 3,
    *,
    max_share: float = 0.8,
    people: int = PEOPLE,
    digits: int = DIGITS,
) -> Batch:
    """Draw a book, then its entries again in random order, in the form of `griffin_phonebook`.

    Two of the repeated entries stand between blank lines, followed by as many as fit into
    ``length`` bytes. The digits of the repeated entries count for the accuracy.

    Args:
        length: Number of bytes of the example; the book takes at least a tenth of them.
        min_entries: Smallest number of entries of the book, even if they exceed its share.
        max_share: Largest share of the bytes for the book without its last entry.
        people: Number of distinct names in all books.
        digits: Number of last digits of a phone number that an entry shows.
    """
    # One name per byte is more than enough.
    # An entry has more bytes than one, so that these are enough.
    known = rng.choice(people, min(people, max(min_entries, length)), replace=False)
    if people < PEOPLE:  # avoid consecutive people, who share a first name
        known = known * SPREAD % PEOPLE
    book, book_length = list[str](), rng.uniform(0.1, max_share) * length
    while len(book) < len(known) and (len(book) < min_entries or sum(map(len, book)) < book_length):
        number = str(NUMBERS[int(rng.integers(len(NUMBERS)))])[-digits:]
        book.append(f"{person(int(known[len(book)]))}: {number}\n")
    return _book_row(rng, book, length)


def _book_row(rng: np.random.Generator, book: list[str], length: int) -> Batch:
    """Return the row of `phonebook` for a book."""
    sizes = [len(entry) for entry in book]
    again: list[int] = []
    while sum(sizes[i] for i in again) < length:
        again += map(int, rng.permutation(len(book)))
    starts = np.cumsum([0, *sizes])  # first byte of each entry, then of the blank line
    parts, distances = [*book, "\n"], [np.zeros(starts[-1] + 1, np.int32)]
    for place, i in enumerate(again):
        blank = "\n" if place == 1 else ""
        begin = sum(map(len, distances))
        distance = np.full(len(book[i] + blank), begin - starts[i] - 1, np.int32)
        parts.append(book[i] + blank)
        distances.append(distance)
    ids = _ids("".join(parts).encode()[:length])
    digit = (ids[1:] >= FIRST + ord("0")) & (ids[1:] <= FIRST + ord("9"))
    scored = digit & (np.arange(length) > starts[-1])
    weights = np.where(scored, 1, LOW_WEIGHT).astype(np.float32)
    distance = np.where(scored, np.concatenate(distances)[:length], 0)
    return Batch(ids[:-1], ids[1:], weights, scored, distance)


def write_byte_tokenizer(folder: str | Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with one token per byte after BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    vocabulary = dict(zip(special.values(), (PAD, EOS, BOS), strict=True))
    vocabulary |= {character: FIRST + byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special.values()))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    folder = Path(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), "utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _ids(data: bytes) -> np.ndarray:
    """Return the int32 ids of BOS and of the bytes."""
    return np.concatenate([[BOS], np.frombuffer(data, np.uint8).astype(np.int32) + FIRST]).astype(
        np.int32
    )


def _byte_characters() -> list[str]:
    """Return the character that byte-level tokenizers write for each byte, as in GPT-2's table.

    Printable bytes other than spaces keep their character; others get the next one from 256 on.
    """
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(others)) for b in range(256)]
