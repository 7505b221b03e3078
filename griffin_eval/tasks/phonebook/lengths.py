"""Phonebooks in tokens: the number of entries that fit, and those inside the attention window."""

import functools
import logging
from typing import Any, NamedTuple

from griffin_eval.errors import ArgumentError, BadInput, MissingExtraError
from griffin_eval.tasks.metadata import tokenizer_of
from griffin_eval.tasks.phonebook.books import EXAMPLES, PEOPLE, Book, Shelf, draw_book
from griffin_eval.text.shared_prefixes import encode_all
from griffin_eval.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class EntrySpan(NamedTuple):
    """The tokens of an entry, counted from the end of the prompt. The fields are columns of rows.

    Attributes:
        prompt_tokens: Number of tokens of the prompt, without BOS.
        reach: Number of keys that the last token of the prompt must see, including its own, to see
            the whole entry.
        gap: Number of keys that the first token of the question must see, including its own, to
            see any token of the entry.
    """

    prompt_tokens: int
    reach: int
    gap: int

    def inside(self, visible_keys: int) -> bool | None:
        """Return whether attention with this many visible keys sees the entry.

        Returns:
            True if the last token of the prompt sees all of it; False if no token of the question
            sees any of it; None in all other cases.
        """
        if self.reach <= visible_keys:
            return True
        return False if self.gap > visible_keys else None


def find_tokenizer(metadata: dict[str, Any]) -> Tokenizer | None:
    """Return the tokenizer of the model that lm_eval runs.

    Return None if the metadata names neither ``tokenizer`` nor ``pretrained``, or with a warning if
    the tokenizer cannot be read.
    """
    if metadata.get("tokenizer") is metadata.get("pretrained") is None:
        return None
    try:
        return tokenizer_of(**metadata)
    except (BadInput, MissingExtraError) as error:
        logger.warning("the phonebook is not measured in tokens: %s", error)
        return None


def fill(shelf: Shelf, tokenizer: Tokenizer | None) -> dict[tuple[int, int], Book]:
    """Return the books of a shelf by length and index, filled with entries up to their length."""
    keys = [(n, i) for n in shelf.tokens or shelf.entries for i in range(shelf.samples)]
    if shelf.tokens is None:
        return {(n, i): draw_book(shelf.kind(n), i, n, shelf.queries) for n, i in keys}
    if tokenizer is None:
        raise ArgumentError(
            f"{shelf.task}: lengths in tokens need a tokenizer: name it with tokenizer= or "
            'pretrained= in --model_args, or as "tokenizer" in --metadata'
        )
    return {(n, i): _largest(shelf, tokenizer, n, i) for n, i in keys}


def entry_spans(tokenizer: Tokenizer, book: Book) -> list[EntrySpan]:
    """Return the spans of the requested entries of a book, in the order of its questions."""
    lines = [len(str(entry)) + 1 for entry in book.entries]
    texts = [book.text()]
    for position in book.requested:
        prompt, start = book.ask(book.entries[position].name), sum(lines[:position])
        texts += [prompt, prompt[:start], prompt[: start + lines[position] - 1]]
    question, *counts = (len(ids) for ids in encode_all(tokenizer, texts))
    spans = []
    for whole, start, end in zip(counts[::3], counts[1::3], counts[2::3], strict=True):
        # reach counts keys from the prompt's last token (whole - 1) back to the entry's first; gap
        # from the question's first token back to the entry's last (end - 1).
        spans.append(EntrySpan(whole, whole - start, question - end + 2))
    return spans


def _largest(shelf: Shelf, tokenizer: Tokenizer, tokens: int, index: int) -> Book:
    """Return the book with the most entries whose longest prompt fits into ``tokens``."""

    def size(entries: int) -> int:
        book = draw(entries)
        questions = [f"{book.entries[position].name}:" for position in book.requested]
        longest = max(zip(map(len, tokenizer.encode_batch(questions)), questions, strict=True))[1]
        return len(tokenizer.encode(book.text() + longest))

    draw = functools.partial(draw_book, shelf.kind(tokens), index, queries=shelf.queries)
    least, most = EXAMPLES + 1, PEOPLE - shelf.queries
    entries = least
    for _ in range(3):  # lines have about equally many tokens, so this guess converges
        guess = (entries + EXAMPLES) * tokens // size(entries) - EXAMPLES
        entries = min(max(guess, least), most)
    while entries < most and size(entries + 1) <= tokens:
        entries += 1
    while entries >= least and size(entries) > tokens:
        entries -= 1
    if entries < least:
        raise ArgumentError(
            f"{shelf.task}: tokens must be at least {size(least)} for a book of {least} entries, "
            f"found {tokens}"
        )
    return draw(entries)
