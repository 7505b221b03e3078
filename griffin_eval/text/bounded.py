"""Tokenizers with more tokens than the model's embedding: texts with such tokens are refused."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, cast

from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.messages import brief, listed
from griffin_eval.text.tokenizer import Tokenizer, check_vocabulary

logger = logging.getLogger(__name__)


def bounded(tokenizer: Tokenizer, rows: int) -> Tokenizer:
    """Return a tokenizer whose ids all have one of the ``rows`` of the model's embedding. Raises
    CheckpointError if it belongs to another model, or its BOS has no row."""
    if tokenizer.vocab_size <= rows:
        return tokenizer
    check_vocabulary(tokenizer, rows)
    if tokenizer.bos_token_id is not None and tokenizer.bos_token_id >= rows:
        raise CheckpointError(
            f"the tokenizer {tokenizer.name} begins texts with {tokenizer.bos_token!r} of id "
            f"{tokenizer.bos_token_id}, but the model's embedding has {rows} rows: name the "
            "tokenizer that the model was trained with (tokenizer=...)"
        )
    beyond = range(rows, tokenizer.vocab_size)
    logger.warning(
        "the tokenizer %s has tokens that the model's embedding of %d rows lacks (%s): texts that "
        "use them are refused",
        tokenizer.name,
        rows,
        listed(beyond, lambda token: f"{tokenizer.piece(token)!r}, {token}"),
    )
    return cast(Tokenizer, BoundedTokenizer(tokenizer, rows))


def refusal_of(ids: Iterable[int], tokenizer: Tokenizer | None) -> str | None:
    """Return an error message about the first id that the embedding lacks, or None."""
    if not isinstance(tokenizer, BoundedTokenizer):
        return None
    lacking = (int(token) for token in ids if token in tokenizer.beyond)
    token = next(lacking, None)
    return None if token is None else tokenizer.refusal(token, "a list of token ids")


class BoundedTokenizer:
    """A `Tokenizer` that refuses texts with the ids ``beyond``, which the embedding lacks. Special
    tokens without a row are None, since no text can use them."""

    def __init__(self, tokenizer: Tokenizer, rows: int):
        self._tokenizer, self.beyond = tokenizer, range(rows, tokenizer.vocab_size)
        self.vocab_size = self.trained_vocab_size = rows
        for name in ("eos_token", "pad_token"):
            if getattr(tokenizer, f"{name}_id") in self.beyond:
                setattr(self, name, None)
                setattr(self, f"{name}_id", None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy has no tokenizer yet when it is asked for these
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch(texts)
        for text, ids in zip(texts, encoded, strict=True):
            largest = max(ids, default=0)
            if largest in self.beyond:
                raise ArgumentError(self.refusal(largest, f"the text {brief(text)}"))
        return encoded

    def refusal(self, token: int, what: str) -> str:
        """Return the error message for a token that the embedding lacks; ``what`` is a noun phrase
        for the text."""
        return (
            f"{what} uses the token {self.piece(token)!r} of id {token}, but the model's embedding "
            f"has {self.beyond.start} rows: leave the token out, or name the tokenizer that the "
            "model was trained with (tokenizer=...)"
        )
