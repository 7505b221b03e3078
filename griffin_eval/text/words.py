"""Assignment of tokens to the words of a text."""

import re

import numpy as np

_WORD = re.compile(r"\S+")


def word_spans(text: str) -> np.ndarray:
    """Return int64 [W, 2], begin and end of each word. Words are separated by white space; a text
    of nothing else is one word."""
    found = [match.span() for match in _WORD.finditer(text)]
    return np.array(found or [(0, len(text))], np.int64).reshape(-1, 2)


def words_of_tokens(words: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Return int64 [N], the index of each token's word, in non-decreasing order.

    A token belongs to the first word that ends after the token's first character: white space to
    the word after it, as in tokens that begin with a space, and a token with parts of two words to
    the first. White space at the end of a text belongs to the last word. ``words`` [W, 2] and
    ``spans`` [N, 2] are ranges of characters.
    """
    found = np.searchsorted(words[:, 1], spans[:, 0], side="right")
    return np.minimum(found, len(words) - 1)
