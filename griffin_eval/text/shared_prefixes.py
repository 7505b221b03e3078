"""Token ids of many texts, with each shared prefix tokenised once.

Questions on one book, few-shot prompts, a context with each of its continuations: such texts share
long prefixes. Each text is cut at the last place of the shared prefix where a cut cannot change an
id. `griffin_eval.text.boundaries` finds the characters before which this holds; without any, texts
are tokenised whole.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

SPACE = "▁"  # sentencepiece's representation of a space
_COMPARED = 4096  # characters compared at a time
_BATCH = 1 << 19  # characters tokenised at a time


class Encoder(Protocol):
    """The part of `griffin_eval.text.tokenizer.Tokenizer` that `encode_all` uses.

    Attributes:
        boundaries: Characters before which any text may be cut, unless white space or ``▁`` comes
            before: the ids of the parts are those of the whole text.
    """

    @property
    def boundaries(self) -> str: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text."""
        ...


class _Part:
    """A range of a text that is tokenised by itself, and the part before it."""

    __slots__ = ("before", "end", "start", "text")

    def __init__(self, text: str, start: int, end: int, before: "_Part | None"):
        self.text, self.start, self.end, self.before = text, start, end, before


def encode_all(
    tokenizer: Encoder, texts: Sequence[str], before: Sequence[int] = ()
) -> list[np.ndarray]:
    """Return the ids of ``tokenizer.encode_batch(texts)`` as int32 arrays, each after ``before``.

    Equal texts share one array, and a text that is a prefix of another one may be a view of it.
    """
    parts: list[_Part] = []
    last: dict[str, _Part] = {}  # last part of each text
    open_parts: list[_Part] = []  # parts of the previous text, in order
    previous = ""
    for text in sorted(set(texts)):  # adjacent texts share the longest prefixes
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
    """Return the int32 ids of each part, in one array or more.

    Intermediate results of a tokenizer take a hundred times the memory of the ids, so it gets at
    most `_BATCH` characters at a time where texts may be cut.
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
    """Return the int32 ids from the start of the text to the end of each part, after ``before``."""
    heirs = {part.before: part for part in ids}  # one of the parts that follow each part
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
    """Yield begin and end of each piece of a text that may be tokenised by itself. A piece has
    about half of `_BATCH` characters, or more if the text may not be cut."""
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
    """Return the last index in the shared prefix of two texts where both may be cut, or 0."""
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
    """Return the number of leading characters that two texts share."""
    low, high = 0, min(len(one), len(other))
    step = _COMPARED
    while low < high and one[low : low + step] == other[low : low + step]:
        low += step
    high = min(high, low + step)
    while low < high:  # invariant: texts agree before low, and differ before high + 1
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return high
