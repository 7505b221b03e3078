"""Tokenizers in ``tokenizer.model``, read by the library sentencepiece."""

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from griffin_eval.errors import CheckpointError, MissingExtraError
from griffin_eval.text.boundaries import boundaries_of_model
from griffin_eval.text.chat import GEMMA_TURNS, WithChatTemplate, read_chat_template
from griffin_eval.text.tokenizer import GEMMA_NAMES, naming_half_characters, unreadable


class SentencePieceTokenizer(WithChatTemplate):
    """A `Tokenizer` from a ``tokenizer.model``, read by sentencepiece.

    sentencepiece finds user-defined symbols in a text, but not control symbols: texts are cut at
    control symbols here, and the parts are encoded separately.
    """

    def __init__(self, file: Path, name: str, settings: dict[str, Any]):
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise MissingExtraError("sentencepiece", "torch") from None
        model = SentencePieceProcessor()
        try:
            model.LoadFromSerializedProto(file.read_bytes())
            for token in range(model.get_piece_size()):
                model.id_to_piece(token)  # raises if it is not UTF-8
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(unreadable(file, error)) from error
        self._model = model
        self._boundaries: str | None = None  # computed on first use
        self.name = name
        self.vocab_size = self.trained_vocab_size = model.get_piece_size()
        self.bos_token, self.bos_token_id = self._token(model.bos_id())
        self.eos_token, self.eos_token_id = self._token(model.eos_id())
        self.pad_token, self.pad_token_id = self._token(model.pad_id())
        special = {name: getattr(self, name) for name in GEMMA_NAMES}
        self.special_tokens = {name: text for name, text in special.items() if text is not None}
        self.adds_bos = self.bos_token_id is not None and settings.get("add_bos_token", True)
        self.chat_template = read_chat_template(file.parent, settings)
        self._control = {
            model.id_to_piece(token): token
            for token in range(self.vocab_size)
            if model.is_control(token) or model.is_unknown(token)
        }
        longest_first = sorted(self._control, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        turns = {model.piece_to_id(piece) for piece in GEMMA_TURNS} - {model.unk_id()}
        self._hidden = turns | set(self._control.values())

    @property
    def boundaries(self) -> str:
        if self._boundaries is None:
            pieces = map(self._model.id_to_piece, range(self.vocab_size))  # with control symbols
            self._boundaries = boundaries_of_model(self._model.serialized_model_proto(), pieces)
        return self._boundaries

    def _token(self, token: int) -> tuple[str | None, int | None]:
        return (None, None) if token < 0 else (self._model.id_to_piece(token), token)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        parts = [self._cut.split(text) for text in texts]
        with naming_half_characters(texts):
            encoded = iter(self._model.encode([text for part in parts for text in part[::2]]))
        return [self._join(part, lambda _: next(encoded)) for part in parts]

    def spans(self, text: str) -> np.ndarray:
        spans: list[np.ndarray] = []
        begin = 0
        for index, part in enumerate(self._cut.split(text)):
            if index % 2:
                offsets = [(0, len(part))]
            else:
                offsets = self._model.encode(part, return_type="offset_mapping")["offsets"]
            spans.append(np.array(offsets, np.int64).reshape(-1, 2) + begin)
            begin += len(part)
        return np.concatenate(spans)

    def _join(self, parts: list[str], encode) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(parts):  # texts and control symbols alternate
            ids += [self._control[part]] if index % 2 else encode(part)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        known = [int(token) for token in ids if 0 <= token < self.vocab_size]
        if skip_special_tokens:
            return self._model.decode([token for token in known if token not in self._hidden])
        text = ""
        for hidden, group in itertools.groupby(known, self._hidden.__contains__):
            tokens = list(group)
            text += (
                "".join(map(self._model.id_to_piece, tokens))
                if hidden
                else self._model.decode(tokens)
            )
        return text

    def piece(self, token: int) -> str:
        return self._model.id_to_piece(int(token)) if token < self.vocab_size else ""
