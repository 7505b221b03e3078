"""Text to token ids and back: one interface over transformers' and sentencepiece's tokenizers.

A folder with ``tokenizer.json`` is read with transformers; one with only ``tokenizer.model``, as
DeepMind publishes them, with sentencepiece itself: transformers turns such a file into a tokenizer
of its own, which agrees with sentencepiece only where the file is exactly in Gemma's dialect.
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

GEMMA_NAMES = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}

# A text with the cases in which tokenizers differ: runs of spaces, digits, accents, bytes, special
# tokens.
PROBE = (
    "Hello  world\n\n\tx=12,345.67;   naïve Å e\u0301 ½ 東京 🙂 don't\r\n<bos>a <start_of_turn>b"
)

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """A tokenizer, whichever library reads it.

    Attributes:
        name: identifies it by name and content, whatever folder it lies in.
        vocab_size: highest id that it can produce, plus one.
        trained_vocab_size: number of ids without the tokens that were added after its training.
        bos_token, eos_token, pad_token: the special tokens as text, None where there is none.
        bos_token_id, eos_token_id, pad_token_id: their ids.
        special_tokens: texts that chat templates may name, by name (``bos_token``).
        adds_bos: whether its own files ask for a BOS in front of every text.
        chat_template: the Jinja template, None where there is none.
        boundaries: the characters in front of which a text may be cut without changing its ids
            (`griffin_eval.text.shared_prefixes.Encoder`); empty where that is not known.
    """

    name: str
    vocab_size: int
    trained_vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    special_tokens: dict[str, str]
    adds_bos: bool
    chat_template: str | None

    @property
    def boundaries(self) -> str: ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text; no special token is added, but those that the text spells out are read."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, in parallel."""
        ...

    def spans(self, text: str) -> np.ndarray:
        """int64 [N, 2], the characters of a text at which each of `encode`'s N tokens begins and
        ends. Tokens that are parts of one character may overlap or be empty; white space may lie in
        no token."""
        ...

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Text of ids; unknown ids are left out."""
        ...

    def piece(self, token: int) -> str:
        """How the vocabulary writes a token: of a single byte it may be ``<0x0A>``. Of what is no
        token of it, as a larger embedding may have some, this is no piece of it."""
        ...

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        """The prompt of a conversation, which usually starts with BOS already.

        If the template refuses the conversation, it is rendered once more without its system
        messages, and a warning is logged, as lm-eval's hf model does it.

        Args:
            messages: each with ``role`` and ``content``.
            add_generation_prompt: True ends with the opening of the model's turn; False leaves the
                last message open, to be continued.

        Raises:
            CheckpointError: there is no chat template, or it refuses these messages.
        """
        ...


@contextlib.contextmanager
def naming_half_characters(texts: Sequence[str]) -> Iterator[None]:
    """Name the text that holds half of a surrogate pair, which tokenizers refuse with errors of
    their own. JSON can spell such halves.

    Raises:
        ArgumentError: instead of an error within the block, where one of the texts holds one.
    """
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
    """Whether texts start with BOS unless the user says otherwise: as the model was trained.

    RecurrentGemma, which scales its embeddings and caps its logits, was trained with exactly one
    BOS in front of every text, so it gets one whatever the tokenizer's files ask for. Other models
    follow the tokenizer's files, as every model does in lm-eval's hf model.

    Args:
        tokenizer: the model's tokenizer; without a BOS token nothing can be added.
    """
    recurrentgemma = config.embedding_scale and config.logits_soft_cap > 0
    if tokenizer.bos_token_id is None:
        if recurrentgemma:
            logger.warning("%s has no BOS token, which RecurrentGemma expects", tokenizer.name)
        return False
    return recurrentgemma or tokenizer.adds_bos


def encode_with_bos(tokenizer: Tokenizer, text: str, add_bos: bool) -> list[int]:
    """Ids of a text, with exactly one BOS in front if ``add_bos``, else as the text spells them.

    A chat template writes BOS into the text: such a text gets no second one, and if it spells
    several at its start, one remains. lm-eval's hf model adds none to a text that starts with BOS
    either, but for generation looks only at the first text of a batch.

    Raises:
        ArgumentError: ``add_bos`` with a tokenizer that has no BOS token.
    """
    ids = tokenizer.encode(text)
    return with_one_bos(tokenizer, ids) if add_bos else ids


def with_one_bos(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Ids with exactly one BOS in front, however many there were. For `Tokenizer.encode_batch`.

    Raises:
        ArgumentError: the tokenizer has no BOS token.
    """
    bos = tokenizer.bos_token_id
    if bos is None:
        raise ArgumentError(f"add_bos_token=True, but the tokenizer {tokenizer.name} has no BOS")
    return [bos, *itertools.dropwhile(lambda token: token == bos, ids)]


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Checks that a tokenizer may be the model's: that the embedding has a row for most of its ids.

    Tokens that were added to a tokenizer often have none, and sometimes a few others have none.

    Args:
        vocab_size: rows of the model's embedding; there may be more than the tokenizer needs.

    Raises:
        CheckpointError: the embedding lacks more than one in 64 of the tokens that were trained.
    """
    if 64 * (tokenizer.trained_vocab_size - vocab_size) > tokenizer.trained_vocab_size:
        raise CheckpointError(
            f"the tokenizer {tokenizer.name} produces ids up to {tokenizer.vocab_size - 1}, but "
            f"the model's vocabulary has only {vocab_size} entries; name the tokenizer that the "
            "model was trained with (tokenizer=...)"
        )


def digest(file: Path) -> str:
    """16 hexadecimal digits of a SHA-256 over a tokenizer's file and the files beside it."""
    digest = hashlib.sha256()
    for path in [file, *(file.parent / name for name in FILES if name != file.name)]:
        if path.is_file():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()[:16]


def unreadable(file: Path, error: BaseException) -> str:
    """The sentence for a tokenizer's file that a library refuses."""
    reason = first_line(error) or type(error).__name__
    return (
        f"{file} cannot be read as a tokenizer: {reason}; download it again if it is damaged, or "
        "update transformers and tokenizers if a later version wrote it"
    )
