"""The interface of transformers' and sentencepiece's tokenizers.

A folder with ``tokenizer.json`` is read with transformers; a folder with only ``tokenizer.model``,
which DeepMind publishes, with sentencepiece itself. Transformers would convert such a file to a
tokenizer of its own, which agrees with sentencepiece only for files in Gemma's exact dialect.
"""

import contextlib
import hashlib
import itertools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.messages import first_line

JSON_FILE = "tokenizer.json"
MODEL_FILE = "tokenizer.model"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
FILES = (JSON_FILE, MODEL_FILE, CONFIG_FILE, TEMPLATE_FILE)
FILES += ("special_tokens_map.json", "added_tokens.json")

MAX_SYMBOLS = 1000  # larger vocabularies are of text, smaller ones of bytes or symbols
GEMMA_NAMES = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}

# Cases in which tokenizers differ: runs of spaces, digits, accents, bytes, special tokens.
PROBE = (
    "Hello  world\n\n\tx=12,345.67;   naïve Å e\u0301 ½ 東京 🙂 don't\r\n<bos>a <start_of_turn>b"
)

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """A tokenizer of either library."""

    name: str  # name and digest of the content, independent of the folder
    vocab_size: int  # highest id that it can produce, plus one
    trained_vocab_size: int  # number of ids without tokens that were added after training
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    special_tokens: dict[str, str]  # texts that chat templates can name, by name (``bos_token``)
    adds_bos: bool  # whether its files ask for a BOS before every text
    chat_template: str | None  # in Jinja

    @property
    def boundaries(self) -> str: ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text. Special tokens in it are parsed, but none are added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of many texts, computed in parallel."""
        ...

    def spans(self, text: str) -> np.ndarray:
        """Return int64 [N, 2], begin and end in the text of each of `encode`'s N tokens. Tokens
        that are parts of one character may overlap or be empty; white space may be in no token."""
        ...

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Return the text of ids; unknown ids are left out."""
        ...

    def piece(self, token: int) -> str:
        """Return the vocabulary's text of a token, such as ``<0x0A>`` for a byte. For an unknown id
        the result is not a piece of the vocabulary."""
        ...

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        """Return the prompt of a conversation, which usually starts with BOS already.

        If the template refuses the conversation, it is rendered again without system messages, and
        a warning is logged, as in lm-eval's hf model. Raises CheckpointError if that fails, too.
        Without a generation prompt, the last message is left open to be continued.
        """
        ...


@contextlib.contextmanager
def naming_half_characters(texts: Sequence[str]) -> Iterator[None]:
    """Replace a tokenizer's error about half of a surrogate pair, which JSON can contain, by an
    ArgumentError that says where it is."""
    try:
        yield
    except (TypeError, ValueError):
        for text in texts:
            if half := re.search("[\ud800-\udfff]", text):
                before = text[max(half.start() - 30, 0) : half.end()]
                raise ArgumentError(
                    f"a text holds half of a surrogate pair, which is no character, at index "
                    f"{half.start()} (after {before!r}): replace it with U+FFFD"
                ) from None
        raise


def default_add_bos(tokenizer: Tokenizer, config: GriffinConfig) -> bool:
    """Return whether texts start with BOS by default: as the model was trained.

    RecurrentGemma, recognised by scaled embeddings and capped logits, was trained with exactly one
    BOS before every text, so it gets one whatever the tokenizer's files say. Other models follow
    the tokenizer's files, as in lm-eval's hf model. Without a BOS token nothing can be added.
    """
    recurrentgemma = config.embedding_scale and config.logits_soft_cap > 0
    if tokenizer.bos_token_id is None:
        if recurrentgemma and config.vocab_size > MAX_SYMBOLS:
            logger.warning("%s has no BOS token, which RecurrentGemma expects", tokenizer.name)
        return False
    return recurrentgemma or tokenizer.adds_bos


def encode_with_bos(tokenizer: Tokenizer, text: str, add_bos: bool) -> list[int]:
    """Return the ids of a text, with exactly one BOS in front if ``add_bos``.

    Chat templates write BOS into the text: such a text gets no second one, and several at its start
    become one. (lm-eval's hf model does the same, but for generation it looks only at the first
    text of a batch.)
    """
    ids = tokenizer.encode(text)
    return with_one_bos(tokenizer, ids) if add_bos else ids


def with_one_bos(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Return ids with exactly one BOS in front, however many there were. Raises ArgumentError if
    the tokenizer has no BOS."""
    bos = tokenizer.bos_token_id
    if bos is None:
        raise ArgumentError(f"add_bos_token=True, but the tokenizer {tokenizer.name} has no BOS")
    return [bos, *itertools.dropwhile(lambda token: token == bos, ids)]


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Check that a tokenizer can belong to a model: that the embedding has rows for all but one in
    64 of its trained tokens. Added tokens often have no row, and sometimes a few others."""
    if 64 * (tokenizer.trained_vocab_size - vocab_size) > tokenizer.trained_vocab_size:
        raise CheckpointError(
            f"the tokenizer {tokenizer.name} produces ids up to {tokenizer.vocab_size - 1}, but "
            f"the model's vocabulary has only {vocab_size} entries; name the tokenizer that the "
            "model was trained with (tokenizer=...)"
        )


def digest(file: Path) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a tokenizer's file and the files beside it."""
    digest = hashlib.sha256()
    for path in [file, *(file.parent / name for name in FILES if name != file.name)]:
        if path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()[:16]


def unreadable(file: Path, error: BaseException) -> str:
    """Return the error message for a tokenizer's file that a library refuses."""
    reason = first_line(error) or type(error).__name__
    return (
        f"{file} cannot be read as a tokenizer: {reason}; download it again if it is damaged, or "
        "update transformers and tokenizers if a later version wrote it"
    )
