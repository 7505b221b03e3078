"""Long documents for tasks, and the characters at which their tokens begin.

Lengths are in tokens of the model's tokenizer. A document is tokenised once, and tasks cut its text
only where a token begins. With a BPE that adds no prefix, a part of the text then has the same
tokens alone as in the document; with other tokenizers its length may differ by a token or two at
each end.
"""

import hashlib
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.arguments import is_hub_id
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import first_line
from griffin_eval.text.shared_prefixes import pieces
from griffin_eval.text.tokenizer import Tokenizer

# Long modules of the standard library that every installation of Python has.
PYTHON_MODULES = (
    "_pydecimal argparse datetime _pydatetime doctest email/_header_value_parser inspect mailbox"
    " pickletools pydoc subprocess tarfile turtle typing unittest/mock zipfile/__init__"
).split()
MIN_CHARACTERS = 90_000  # in a module that is used as a document
MAX_CACHED = 256  # documents whose tokens are cached
SLACK = 32  # tokens after a wanted length that are searched for the end of a word

logger = logging.getLogger(__name__)


class Document(NamedTuple):
    """A text and its N tokens.

    Attributes:
        name: Name of the text, unique among the documents of a task.
        token_starts: int32 [N + 1], index of the character at which each token begins, and the
            length of the text.
        clean: bool [N + 1], whether the text can be split there: at the boundary of two characters
            that is also a boundary of two tokens.
    """

    name: str
    text: str
    token_starts: np.ndarray
    clean: np.ndarray

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.token_starts) - 1

    def word_end(self, token: int) -> int:
        """Return the first token at or after ``token`` that follows the end of a word.

        The text before it does not end with white space, which lm_eval would move to the other
        side. If no word ends within `SLACK` tokens, return the first other token with this
        property, or the end of the document.
        """
        fallback = None
        for index in range(token, self.tokens):
            start = self.token_starts[index]
            if not self.clean[index] or (start and self.text[start - 1].isspace()):
                continue
            if self.text[start].isspace():
                return index
            fallback = index if fallback is None else fallback
            if index - token >= SLACK:
                return fallback
        return self.tokens if fallback is None else fallback

    def clean_start(self, token: int) -> int:
        """Return the last token up to ``token`` at which the text can be split."""
        return token - int(self.clean[token::-1].argmax())

    def part(self, begin: int, end: int) -> str:
        """Return the text from token ``begin`` up to token ``end``."""
        return self.text[self.token_starts[begin] : self.token_starts[end]]


def documents(
    tokenizer: Tokenizer, document: Any, seed: int, max_tokens: int | None
) -> Iterator[Document]:
    """Yield the documents in an order drawn from the seed, so that the first few represent all.

    Args:
        document: See `texts_of`.
        max_tokens: Number of tokens after which longer documents are cut at the end of a word.

    Raises:
        ArgumentError: There is no such document, or it holds no text.
    """
    texts = [(name, text) for name, text in texts_of(document) if text.strip()]
    if not texts:
        raise ArgumentError(f"document={document!r} holds no text")
    rng = random.Random(f"griffin_texts {seed}")
    for name, text in sorted(texts, key=lambda _: rng.random()):
        whole = tokenised(tokenizer, text)
        if max_tokens is not None and whole.tokens > max_tokens:
            end = whole.word_end(max_tokens)
            whole = Document("", whole.part(0, end), whole.token_starts[: end + 1], whole.clean)
        yield whole._replace(name=name)


_tokenised: dict[tuple[Tokenizer, bytes], tuple[np.ndarray, np.ndarray]] = {}


def tokenised(tokenizer: Tokenizer, text: str) -> Document:
    """Return a text as a document without a name, and cache its token boundaries."""
    key = (tokenizer, hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
    if key not in _tokenised:
        if len(_tokenised) == MAX_CACHED:
            del _tokenised[next(iter(_tokenised))]
        _tokenised[key] = _tokens(tokenizer, text)
    return Document("", text, *_tokenised[key])


def _tokens(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Return ``token_starts`` and ``clean`` of a `Document`."""
    starts, clean = [np.empty(0, np.int32)], []
    last = np.array([[-1, 0]])  # span of the previous token
    for begin, end in pieces(tokenizer.boundaries, text, 0, len(text)):
        spans = np.concatenate([last, tokenizer.spans(text[begin:end]) + begin])
        # White space between two tokens belongs to the second one.
        starts.append(spans[:-1, 1].astype(np.int32))
        clean.append((spans[1:, 0] >= spans[:-1, 1]) & (spans[1:, 0] > spans[:-1, 0]))
        last = spans[-1:]
    end = len(text) if last[0, 0] >= 0 else 0
    joined = np.concatenate([*starts, np.array([end], np.int32)])
    np.maximum.accumulate(joined, out=joined)
    return joined, np.concatenate([*clean, [True]])


def texts_of(document: Any) -> list[tuple[str, str]]:
    """Return names and texts.

    Args:
        document: Folder of text files, a file, the hub id of a dataset, a dictionary with the
            arguments of ``datasets.load_dataset`` (and ``field``, the column of the texts), or
            None for texts that ship with Python.

    Raises:
        ArgumentError: The document is none of these, or cannot be read.
    """
    if document is None:
        logger.warning(
            "a smoke test on text that ships with Python, no benchmark; name texts with document="
        )
        return python_texts()
    if isinstance(document, dict):
        return _dataset(**document)
    path = Path(str(document)).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        shown = [(str(file.relative_to(path)), file) for file in files]
        return [(name, _read(file)) for name, file in shown if not name.startswith(".")]
    if path.is_file():
        return [(path.name, _read(path))]
    if isinstance(document, str) and "/" in document and is_hub_id(document):
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
    except Exception as error:  # datasets, its readers and the hub's client raise many kinds
        reason = first_line(error) or type(error).__name__
        raise ArgumentError(f"dataset {arguments} has no split {split}: {reason}") from error
    if field not in rows.column_names:
        raise ArgumentError(
            f"dataset {arguments} has no column {field!r}, but {', '.join(rows.column_names)}; "
            "name the column of the texts with field="
        )
    texts = [(f"{split} {index}", text) for index, text in enumerate(rows[field])]
    if wrong := [name for name, text in texts if not isinstance(text, str | None)]:
        raise ArgumentError(
            f"dataset {arguments}: {field} of {wrong[0]} is no text: name the column of the texts "
            "with field="
        )
    return [(name, text) for name, text in texts if text is not None]


def python_texts() -> list[tuple[str, str]]:
    """Return names and texts of Python's manual and long modules of its standard library."""
    from pydoc_data.topics import topics

    texts = [("pydoc_data.topics", "\n\n".join(topics[name] for name in sorted(topics)))]
    for module in PYTHON_MODULES:
        file = Path(os.__file__).parent / f"{module}.py"
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if len(text) >= MIN_CHARACTERS:
            texts.append((module, text))
    return texts
