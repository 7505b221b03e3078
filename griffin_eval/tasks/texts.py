"""Long documents for tasks, and where their tokens begin.

Lengths are in tokens of the model's own tokenizer, which lm_eval names to the tasks with the
arguments of the model. A document is tokenised once; what a task asks of it is cut from its text at
places where tokens begin, so that a part has the tokens that it has in the whole, if the tokenizer
is a BPE without a prefix of its own. Elsewhere a length is met but for a token or two at each end.
"""

import functools
import logging
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.errors import ArgumentError
from griffin_eval.tokenizer import Tokenizer

# Of the standard library, all that has 90,000 characters or more and is there without an extra.
MODULES = (
    "_pydecimal argparse datetime _pydatetime doctest email/_header_value_parser inspect mailbox"
    " pickletools pydoc subprocess tarfile turtle typing unittest/mock zipfile/__init__"
).split()
LEAST_CHARACTERS = 90_000
SLACK = 32  # tokens within which the end of a word is looked for

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)

logger = logging.getLogger(__name__)


class Document(NamedTuple):
    """A text and its tokens.

    Attributes:
        name: unique among the documents of a task.
        text: the text.
        places: int64 [N + 1], at which character each of the N tokens begins; the last is the end.
        clean: bool [N + 1], whether that is between characters and between tokens.
    """

    name: str
    text: str
    places: np.ndarray
    clean: np.ndarray

    @property
    def tokens(self) -> int:
        return len(self.places) - 1

    def cut(self, token: int) -> int:
        """The first token from this one on in front of which a word ends.

        What comes before does not end with white space, which lm_eval would move to the other
        side. If no word ends within `SLACK` tokens, any other such place will do.
        """
        found = None
        for place in range(token, self.tokens):
            at = self.places[place]
            if not self.clean[place] or (at and self.text[at - 1].isspace()):
                continue
            if self.text[at].isspace():
                return place
            found = place if found is None else found
            if place - token >= SLACK:
                return found
        return self.tokens if found is None else found

    def back(self, token: int) -> int:
        """The last token up to this one whose text begins between characters."""
        return int(np.flatnonzero(self.clean[: token + 1])[-1])

    def part(self, begin: int, end: int) -> str:
        """The text from one token up to another."""
        return self.text[self.places[begin] : self.places[end]]


def documents(
    tokenizer: Tokenizer, document: Any, seed: int, max_tokens: int | None
) -> Iterator[Document]:
    """Documents in an order that the seed draws, so that the first few stand for all.

    Args:
        tokenizer: of the model.
        document: a folder of text files, a file, a hub id of a dataset, a dictionary of what
            ``datasets.load_dataset`` takes (and ``field``, the column of the texts), or None for
            what ships with Python.
        seed: of the order.
        max_tokens: where to cut longer documents; None for nowhere.

    Raises:
        ArgumentError: there is no such document, or no text in it.
    """
    texts = [(name, text) for name, text in _texts(document) if text.strip()]
    if not texts:
        raise ArgumentError(f"document={document!r} holds no text")
    rng = random.Random(f"griffin_texts {seed}")
    for name, text in sorted(texts, key=lambda _: rng.random()):
        whole = _tokenised(tokenizer, text)
        if max_tokens is not None and whole.tokens > max_tokens:
            end = whole.cut(max_tokens)
            whole = Document("", whole.part(0, end), whole.places[: end + 1], whole.clean)
        yield whole._replace(name=name)


@functools.lru_cache(maxsize=256)
def _tokenised(tokenizer: Tokenizer, text: str) -> Document:
    spans = tokenizer.spans(text)
    # A token begins where the one before ends: white space between them is its own.
    places = np.concatenate([[0], spans[:-1, 1], [len(text)]]) if len(spans) else np.zeros(1, int)
    places = np.maximum.accumulate(places)
    clean = np.ones(len(places), bool)
    clean[1:-1] = (spans[1:, 0] >= spans[:-1, 1]) & (spans[1:, 0] > spans[:-1, 0])
    return Document("", text, places, clean)


def _texts(document: Any) -> list[tuple[str, str]]:
    if document is None:
        logger.warning(
            "a smoke test on text that ships with Python, no benchmark; name texts with document="
        )
        return _of_python()
    if isinstance(document, dict):
        return _dataset(**document)
    path = Path(str(document)).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        shown = [(str(file.relative_to(path)), file) for file in files]
        return [(name, _read(file)) for name, file in shown if not name.startswith(".")]
    if path.is_file():
        return [(path.name, _read(path))]
    if isinstance(document, str) and _HUB_ID.fullmatch(document):
        return _dataset(path=document)
    raise ArgumentError(
        f"document={document!r}: expected a folder of text files, a file, the hub id of a dataset, "
        'or what datasets.load_dataset takes, such as {"path": "json", "data_files": "…"}'
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{file} cannot be read as a text in UTF-8: {error}") from error


def _dataset(field: str = "text", split: str = "test", **arguments: Any) -> list[tuple[str, str]]:
    import datasets

    try:
        rows = datasets.load_dataset(**arguments, split=split)
    except Exception as error:  # the library, its readers and the hub's client raise many kinds
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ArgumentError(f"dataset {arguments} has no split {split}: {reason}") from error
    if field not in rows.column_names:
        raise ArgumentError(
            f"dataset {arguments} has no column {field!r}, but {', '.join(rows.column_names)}; "
            "name the one of the texts with field="
        )
    return [(f"{split} {index}", text) for index, text in enumerate(rows[field])]


def _of_python() -> list[tuple[str, str]]:
    from pydoc_data.topics import topics

    found = [("pydoc_data.topics", "\n\n".join(topics[name] for name in sorted(topics)))]
    for module in MODULES:
        file = Path(os.__file__).parent / f"{module}.py"
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if len(text) >= LEAST_CHARACTERS:
            found.append((module, text))
    return found
