"""Strings that end a generated text, for the server and for lm-eval's requests."""

from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from griffin_eval.text.tokenizer import Tokenizer

_MARGIN = 16  # tokens before a stop string that the text of its first token may depend on
_SPECIAL: WeakKeyDictionary[Tokenizer, dict[int, bool]] = WeakKeyDictionary()  # is special, by id


class StopStrings:
    """The stop strings of one request. Empty strings are ignored.

    Generation ends after the token that completes a stop string in the text of the new tokens,
    with special tokens such as <end_of_turn> either written out or left out. The answer is the text
    without special tokens, up to the beginning of its first stop string.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Iterable[str]):
        self._tokenizer = tokenizer
        self.strings = [string for string in strings if string]
        # A token is at least a byte, so a stop string has at most as many tokens as bytes.
        lengths = (len(one.encode(errors="surrogatepass")) for one in self.strings)
        self._tail = max(lengths, default=0) + _MARGIN
        self._special = _SPECIAL.setdefault(tokenizer, {})

    def completed(self, ids: Sequence[int]) -> bool:
        """Return whether the last of the new ids completed a stop string."""
        if not self.strings:
            return False
        tail = ids[-self._tail :]
        # Both texts are equal if no token is special.
        texts = [self._decode(tail, skip) for skip in {False, any(map(self._is_special, tail))}]
        return any(one in text for text in texts for one in self.strings)

    def beginning(self, text: str, settled: int = 0) -> int | None:
        """Return the index of the first stop string in a text without special tokens, or None. The
        first ``settled`` characters hold no whole stop string."""
        starts = (text.find(one, max(settled - len(one), 0)) for one in self.strings)
        return min((start for start in starts if start >= 0), default=None)

    def cut(self, text: str) -> str:
        """Return a text without special tokens up to its first stop string."""
        return text[: self.beginning(text)]

    def begun(self, text: str) -> int:
        """Return the number of characters at the end of a text that may begin a stop string."""
        lengths = (n for one in self.strings for n in range(1, len(one)) if text.endswith(one[:n]))
        return max(lengths, default=0)

    def _decode(self, ids: Sequence[int], skip: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip)

    def _is_special(self, token: int) -> bool:
        if token not in self._special:
            self._special[token] = self._decode([token], True) != self._decode([token], False)
        return self._special[token]
