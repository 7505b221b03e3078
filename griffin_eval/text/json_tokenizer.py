"""Tokenizers in ``tokenizer.json``, read by the libraries tokenizers and transformers."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from griffin_eval.errors import CheckpointError, MissingExtraError
from griffin_eval.text.boundaries import boundaries_of_json
from griffin_eval.text.chat import WithChatTemplate
from griffin_eval.text.tokenizer import (
    CONFIG_FILE,
    GEMMA_NAMES,
    PROBE,
    naming_half_characters,
    unreadable,
)

logger = logging.getLogger(__name__)


class TransformersTokenizer(WithChatTemplate):
    """A `Tokenizer` from a ``tokenizer.json``, read by transformers."""

    def __init__(self, file: Path, name: str, settings: dict[str, Any]):
        try:
            tokenizer = _read_json_tokenizer(file)
            begins = tokenizer.encode("a")[:1]
        except ImportError:
            raise MissingExtraError("transformers", "torch") from None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # Rust panics are no `Exception`
            if "auto_map" in settings and "trust_remote_code" in str(error):
                raise CheckpointError(
                    f"{file.parent / CONFIG_FILE} names custom code that makes the tokenizer "
                    f"(auto_map), and no code of a checkpoint is run: remove auto_map to read "
                    f"{file.name} without it, or name another tokenizer (tokenizer=...)"
                ) from None
            raise CheckpointError(unreadable(file, error)) from error
        self._tokenizer = tokenizer
        self._boundaries: str | None = None  # computed on first use
        self.name = name
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.trained_vocab_size = int(tokenizer.vocab_size)  # without added tokens
        self.bos_token, self.bos_token_id = tokenizer.bos_token, tokenizer.bos_token_id
        self.eos_token, self.eos_token_id = tokenizer.eos_token, tokenizer.eos_token_id
        self.pad_token, self.pad_token_id = tokenizer.pad_token, tokenizer.pad_token_id
        self.special_tokens = tokenizer.special_tokens_map
        self.adds_bos = self.bos_token_id is not None and (begins == [self.bos_token_id])
        template = tokenizer.chat_template
        self.chat_template = template.get("default") if isinstance(template, dict) else template

    @property
    def boundaries(self) -> str:
        if self._boundaries is None:
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            self._boundaries = "" if backend is None else boundaries_of_json(backend)
        return self._boundaries

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        # verbose=False: texts longer than the tokenizer's model_max_length are fine here.
        with naming_half_characters(texts):
            encoded = self._tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return encoded["input_ids"]

    def spans(self, text: str) -> np.ndarray:
        encoded = self._tokenizer(
            text, add_special_tokens=False, verbose=False, return_offsets_mapping=True
        )
        return np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(
            [int(token) for token in ids], skip_special_tokens=skip_special_tokens
        )

    def piece(self, token: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(int(token)))


def _read_json_tokenizer(file: Path) -> Any:
    """Return transformers' tokenizer of a folder, with the ids of its ``tokenizer.json``.

    AutoTokenizer may build another class from the vocabulary alone (a GemmaTokenizer, because of
    the model's or the tokenizer's config). If the file is not in that class's dialect, its ids
    differ and it may add tokens. The file is right, since the model was trained with it.
    """
    import tokenizers
    from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast

    written = tokenizers.Tokenizer.from_file(str(file))
    written.no_truncation()
    written.no_padding()
    # An empty config, since the model's config is irrelevant here and transformers may refuse it.
    auto = AutoTokenizer.from_pretrained(
        file.parent, config=PretrainedConfig(), trust_remote_code=False
    )
    names: dict[str, Any] = {}
    for key, gemma in GEMMA_NAMES.items():
        name = getattr(auto, key) or gemma
        if written.token_to_id(name) is not None:
            names[key] = name
    same_ids = (
        auto.encode(PROBE, add_special_tokens=False)
        == written.encode(PROBE, add_special_tokens=False).ids
        and len(auto) == written.get_vocab_size()
    )
    if same_ids and all(getattr(auto, key) == name for key, name in names.items()):
        return auto
    if not same_ids:
        logger.warning("%s: AutoTokenizer gives other ids, the file's are used", file)
    return PreTrainedTokenizerFast.from_pretrained(file.parent, **names)
