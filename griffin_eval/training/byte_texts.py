"""Texts of bytes: Python's standard library and phonebooks, and their tokenizer.

The library's modules are those that no task of this package reads: `griffin_longctx` and its kin
take Python's manual and a few long modules, which are left out here. The text differs a little
between versions of Python, so a run records its hash.
"""

import functools
import json
import os
from pathlib import Path

import numpy as np

from griffin_eval.tasks.phonebook_books import NUMBERS
from griffin_eval.tasks.phonebook_names import PEOPLE, person

PAD, EOS, BOS, FIRST = range(4)  # ids; byte b is FIRST + b
VOCABULARY = FIRST + 256
OTHERS = 0.1  # weight of what cannot be known in a phonebook, the digits drawn at random

Row = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@functools.cache
def corpus() -> bytes:
    """The modules that are trained on, one after the other."""
    from griffin_eval.tasks.texts import MODULES

    folder = Path(os.__file__).parent
    files = sorted(p for p in folder.glob("*.py") if p.stem not in MODULES)
    return b"\n".join(file.read_bytes() for file in files)


def text(rng: np.random.Generator, length: int) -> Row:
    """A part of `corpus`, from anywhere on."""
    start = int(rng.integers(len(corpus()) - length))
    ids = _ids(corpus()[start : start + length])
    return ids[:-1], ids[1:], np.ones(length, np.float32), np.zeros(length, bool)


def phonebook(rng: np.random.Generator, length: int) -> Row:
    """A book, and its entries again in any order, in the form of `griffin_phonebook`: two of them
    between blank lines, and as many as there is room for. The digits of these are asked for."""
    book, people = [], rng.permutation(PEOPLE)
    room = rng.uniform(0.1, 0.8) * length
    while len(book) < 3 or sum(map(len, book)) < room:
        number = NUMBERS[int(rng.integers(len(NUMBERS)))]
        book.append(f"{person(int(people[len(book)]))}: {number}\n")
    again: list[str] = []
    while sum(map(len, again)) < length:
        again += [book[i] for i in rng.permutation(len(book))]
    parts = [*book, "\n", *again[:2], "\n", *again[2:]]
    ids = _ids("".join(parts).encode()[:length])
    digit = (ids[1:] >= FIRST + ord("0")) & (ids[1:] <= FIRST + ord("9"))
    asked = digit & (np.arange(length) > sum(map(len, book)))
    return ids[:-1], ids[1:], np.where(asked, 1, OTHERS).astype(np.float32), asked


def write_byte_tokenizer(folder: str | Path) -> None:
    """Writes ``tokenizer.json`` and its config, which transformers and this package read: one token
    a byte, BOS in front, as Gemma's does."""
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
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _ids(data: bytes) -> np.ndarray:
    """BOS, then the bytes."""
    return np.concatenate([[BOS], np.frombuffer(data, np.uint8).astype(np.int32) + FIRST]).astype(
        np.int32
    )


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte (GPT-2's table): the
    byte's own where that is printable and no space, else the next free one from 256 on."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(others)) for b in range(256)]
