"""Token ids of many texts, where each shared prefix is tokenised once.

Questions on one book, few-shot prompts, a context with each of its continuations: such texts have
long prefixes in common. Each text is cut at the last place of the shared prefix where a cut cannot
change an id. `griffin_eval.text.boundaries` finds the characters at which that is so; a tokenizer
for which it finds none gets whole texts.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

SPACE = "▁"  # how sentencepiece writes a space
_COMPARED = 4096  # characters at a time
_BATCH = 1 << 19  # characters that are tokenised at a time


class Encoder(Protocol):
    """The part of `griffin_eval.text.tokenizer.Tokenizer` that `encode_all` uses.

    Attributes:
        boundaries: the characters in front of which any text may be cut where what comes before is
            neither white space nor ``▁``: the ids of the parts are those of the whole.
    """

    @property
    def boundaries(self) -> str: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        ...


class _Part:
    """Characters of a text that are tokenised together, and what comes before them."""

    __slots__ = ("before", "end", "start", "text")

    def __init__(self, text: str, start: int, end: int, before: "_Part | None"):
        self.text, self.start, self.end, self.before = text, start, end, before


def encode_all(tokenizer: Encoder, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids that ``tokenizer.encode_batch(texts)`` gives, as int32 arrays.

    Equal texts share one array.
    """
    parts: list[_Part] = []
    last: dict[str, _Part] = {}  # part of each text
    open_parts: list[_Part] = []  # of the text before, in order
    previous = ""
    for text in sorted(set(texts)):  # each parts from the one before as late as from any
        cut = _last_cut(tokenizer.boundaries, previous, text)
        while open_parts and open_parts[-1].start >= cut:
            open_parts.pop()
        if open_parts and (lower := open_parts[-1]).end > cut:
            upper = _Part(lower.text, lower.start, cut, lower.before)
            lower.start, lower.before = cut, upper
            open_parts[-1] = upper
            parts.append(upper)
        last[text] = _Part(text, cut, len(text), open_parts[-1] if open_parts else None)
        open_parts.append(last[text])
        parts.append(last[text])
        previous = text
    encoded = _encode(tokenizer, [part.text[part.start : part.end] for part in parts])
    ids = dict(zip(parts, encoded, strict=True))
    joined = {text: np.concatenate([ids[p] for p in _chain(part)]) for text, part in last.items()}
    return [joined[text] for text in texts]


def _encode(tokenizer: Encoder, texts: list[str]) -> list[np.ndarray]:
    """int32 ids of each text.

    A tokenizer's intermediate results take a hundred times the memory of the ids, so it gets no
    more than `_BATCH` characters at a time, as far as texts may be cut.
    """
    pieces = [
        (index, text[start:end])
        for index, text in enumerate(texts)
        for start, end in _pieces(tokenizer.boundaries, text)
    ]
    ids: list[list[np.ndarray]] = [[] for _ in texts]
    batch: list[tuple[int, str]] = []
    size = 0
    for number, (index, piece) in enumerate(pieces, 1):
        batch.append((index, piece))
        size += len(piece)
        if number == len(pieces) or size >= _BATCH:
            encoded = tokenizer.encode_batch([text for _, text in batch])
            for (index, _), piece_ids in zip(batch, encoded, strict=True):
                ids[index].append(np.array(piece_ids, np.int32))
            batch, size = [], 0
    return [np.concatenate(parts) for parts in ids]


def _pieces(boundaries: str, text: str) -> Iterator[tuple[int, int]]:
    """Begin and end of each piece of a text, of about half of `_BATCH` characters."""
    start = 0
    while len(text) - start > _BATCH and boundaries:
        at = start + _BATCH // 2
        while at > start and not _may_cut(boundaries, text, at):
            at = max(text.rfind(character, start, at) for character in boundaries)
        if at <= start:
            break
        yield start, at
        start = at
    yield start, len(text)


def _may_cut(boundaries: str, text: str, at: int) -> bool:
    return text[at] in boundaries and not text[at - 1].isspace() and text[at - 1] != SPACE


def _chain(part: _Part | None) -> list[_Part]:
    parts = []
    while part is not None:
        parts.append(part)
        part = part.before
    return parts[::-1]


def _last_cut(boundaries: str, one: str, other: str) -> int:
    """The last index in the shared prefix of two texts where both may be cut; 0 if none."""
    if not boundaries:
        return 0
    common = _common(one, other)
    at = common
    while at > 0:
        if all(at == len(text) or _may_cut(boundaries, text, at) for text in (one, other)):
            return at
        at = max(one.rfind(character, 0, at) for character in boundaries)
    return 0


def _common(one: str, other: str) -> int:
    """Number of leading characters that two texts share."""
    low, high = 0, min(len(one), len(other))
    step = _COMPARED
    while low < high and one[low : low + step] == other[low : low + step]:
        low += step
    high = min(high, low + step)
    while low < high:  # what is before low is equal, what is before high + 1 is not
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return high
