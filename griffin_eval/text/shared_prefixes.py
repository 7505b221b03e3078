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


def encode_all(
    tokenizer: Encoder, texts: Sequence[str], before: Sequence[int] = ()
) -> list[np.ndarray]:
    """The ids that ``tokenizer.encode_batch(texts)`` gives, as int32 arrays.

    Equal texts share one array, and a text that others go on from where it may be cut has the
    beginning of one of theirs.

    Args:
        before: ids that every array starts with.
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
    joined = _join(_encode(tokenizer, parts), np.array(before, np.int32))
    return [joined[last[text]] for text in texts]


def _encode(tokenizer: Encoder, parts: list[_Part]) -> dict[_Part, list[np.ndarray]]:
    """int32 ids of each part, in one array or more.

    A tokenizer's intermediate results take a hundred times the memory of the ids, so it gets no
    more than `_BATCH` characters at a time, as far as texts may be cut.
    """
    ids: dict[_Part, list[np.ndarray]] = {part: [] for part in parts}
    batch: list[tuple[_Part, str]] = []
    size = 0

    def flush() -> None:
        encoded = tokenizer.encode_batch([text for _, text in batch])
        for (part, _), piece_ids in zip(batch, encoded, strict=True):
            ids[part].append(np.array(piece_ids, np.int32))
        batch.clear()

    for part in parts:
        for start, end in pieces(tokenizer.boundaries, part.text, part.start, part.end):
            batch.append((part, part.text[start:end]))
            size += end - start
            if size >= _BATCH:
                flush()
                size = 0
    flush()
    return ids


def _join(ids: dict[_Part, list[np.ndarray]], before: np.ndarray) -> dict[_Part, np.ndarray]:
    """int32 ids from the start of the text to the end of each part, after those of ``before``."""
    heirs = {part.before: part for part in ids}  # one of those that follow a part
    joined: dict[_Part, np.ndarray] = {}
    for leaf in ids:
        if leaf in heirs:
            continue
        chain = _chain(leaf)
        whole = np.concatenate([before, *(piece for part in chain for piece in ids[part])])
        end, part = len(whole), leaf
        while True:
            joined[part] = whole[:end]
            end -= sum(map(len, ids[part]))
            if part.before is None or heirs[part.before] is not part:
                break
            part = part.before
    return joined


def pieces(boundaries: str, text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each piece of a part of a text that may be tokenised by itself.

    A piece has about half of `_BATCH` characters, and more where the text may not be cut.
    """
    while end - start > _BATCH and boundaries:
        at = start + _BATCH // 2
        while at > start and not _may_cut(boundaries, text, at):
            at = max(text.rfind(character, start, at) for character in boundaries)
        if at <= start:
            break
        yield start, at
        start = at
    yield start, end


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
