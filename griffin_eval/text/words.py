"""Which word of a text each token belongs to."""

import re

import numpy as np

_WORD = re.compile(r"\S+")


def word_spans(text: str) -> np.ndarray:
    """int64 [W, 2], the first character of each word and the one behind its last. Words are what
    white space separates; a text of nothing else is one word."""
    found = [match.span() for match in _WORD.finditer(text)]
    return np.array(found or [(0, len(text))], np.int64).reshape(-1, 2)


def words_of_tokens(words: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """The word of every token, so that the tokens of all words are all tokens.

    A token belongs to the first word that ends behind the token's first character: white space to
    the word that it stands before, as in tokens that begin with a space, and a token with parts of
    two words to the first of them. White space at the end of a text belongs to the last word.

    Args:
        words: int [W, 2], from `word_spans`.
        spans: int [N, 2], the characters of each token.

    Returns:
        int64 [N], from 0; it never falls.
    """
    found = np.searchsorted(words[:, 1], spans[:, 0], side="right")
    return np.minimum(found, len(words) - 1)
