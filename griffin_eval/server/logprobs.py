"""Log-probabilities of tokens in the format of the completions API.

An evaluation requests them for thousands of tokens at a time, so JSON is assembled from cached
texts of tokens, without a Python object for each token.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import orjson

from griffin_eval.text.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """Return the bytes by the printable characters that stand for them in GPT-2's vocabulary."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    written = {chr(byte): byte for byte in kept}
    return written | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class TokenNames:
    """Texts of single tokens, also as JSON."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.text = lru_cache(1 << 16)(self._text)
        self.width = lru_cache(1 << 16)(self._width)
        self.json = lru_cache(1 << 16)(self._json)

    def _text(self, token: int) -> str:
        piece = self._tokenizer.piece(token)
        if "\u2581" in piece:
            return piece.replace("\u2581", " ")
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        part = "\ufffd" in text and "\ufffd" not in piece  # incomplete, not U+FFFD itself
        return self._bytes(token) if part or not text else text

    def _json(self, token: int) -> str:
        return orjson.dumps(self.text(token)).decode()

    def _bytes(self, token: int) -> str:
        if (found := self.bytes_of(token)) is None:
            return f"token_id:{token}"
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def bytes_of(self, token: int) -> bytes | None:
        """Return the UTF-8 bytes of a token, maybe a part of a character; None for a token without
        text."""
        piece = self._tokenizer.piece(token)
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        if "\u2581" in piece:
            return piece.replace("\u2581", " ").encode()
        text = self._tokenizer.decode([token], skip_special_tokens=True)
        if "\ufffd" not in text or "\ufffd" in piece:
            return text.encode() or None
        try:  # a vocabulary that writes each byte as a character
            return bytes(_BYTE_OF_CHARACTER[one] for one in piece)
        except KeyError:
            return None

    def _width(self, token: int) -> int:
        """Return the number of characters of a text that begin in a token."""
        text = self.text(token)
        if not text.startswith(("bytes:", "token_id:")):
            return len(text)
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes_of(token) or b"")

    def keys(self, tokens: Iterable[int]) -> list[str]:
        """Return distinct JSON strings for some tokens, their texts if those are distinct."""
        found = dict[str, None]()
        for token in tokens:
            key = self.text(token)
            if key in found:
                key = self._bytes(token)
            if key in found:
                key = f"token_id:{token}"
            found[key] = None
        return [orjson.dumps(key).decode() for key in found]


def written(
    names: TokenNames,
    tokens: list[int],
    values: np.ndarray,
    top_tokens: np.ndarray,
    top_logprobs: np.ndarray,
    offsets: np.ndarray,
) -> orjson.Fragment:
    """Return ``logprobs`` of N tokens as JSON. Numbers in ``token_logprobs`` and ``top_logprobs``
    have the same digits, and ``top_logprobs`` always contains the token itself.

    Args:
        values: float64 [N] log-probabilities; NaN becomes null.
        top_tokens: int64 [N, K], the most likely tokens in the place of each token.
        top_logprobs: float64 [N, K], their log-probabilities.
        offsets: int [N], number of characters before each token.
    """
    count, likeliest = top_tokens.shape[1], top_tokens.ravel().tolist()
    numbers, logprobs = _numbers(values), _numbers(top_logprobs.ravel())
    name = {token: names.json(token) for token in {*tokens, *likeliest}}
    several = len(set(name.values())) < len(name)  # tokens with equal texts
    if count == 1 and not several:  # fast path for the prompts of an evaluation
        rows = zip(tokens, numbers, likeliest, logprobs, strict=True)
        tops = [
            f"{{{name[one]}:{number}}}"
            if one == token
            else f"{{{name[one]}:{logprob},{name[token]}:{number}}}"
            for token, number, one, logprob in rows
        ]
    else:
        tops = []
        for place, (token, number) in enumerate(zip(tokens, numbers, strict=True)):
            row = slice(place * count, (place + 1) * count)
            each = dict(zip(likeliest[row], logprobs[row], strict=True)) | {token: number}
            keys = names.keys(each) if several else [name[one] for one in each]
            tops.append("{" + ",".join(map("{}:{}".format, keys, each.values())) + "}")
    for place in np.flatnonzero(np.isnan(values)):
        tops[place] = "null"
    columns = {
        "tokens": [name[token] for token in tokens],
        "token_logprobs": numbers,
        "top_logprobs": tops,
        "text_offset": _numbers(offsets),
    }
    lists = (f'"{key}":[{",".join(column)}]' for key, column in columns.items())
    return orjson.Fragment("{" + ",".join(lists) + "}")


def _numbers(values: np.ndarray) -> list[str]:
    """Return numbers as JSON in their shortest exact form; NaN becomes null."""
    if not len(values):
        return []
    found = orjson.dumps(np.ascontiguousarray(values), option=orjson.OPT_SERIALIZE_NUMPY)
    return found[1:-1].decode().split(",")
