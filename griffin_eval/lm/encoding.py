"""Token ids of lm_eval's requests, of which shared beginnings are tokenised once."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from griffin_eval.text.shared_prefixes import encode_all
from griffin_eval.text.tokenizer import Tokenizer, with_one_bos

# A context and its continuation, and the ids of each.
EncodedPair = tuple[tuple[str, str], Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]


class Encoding(NamedTuple):
    """How texts become ids.

    Attributes:
        tokenizer: the tokenizer.
        add_bos: whether a context starts with exactly one BOS.
        prefix_token_id: token that an empty context is scored from.
    """

    tokenizer: Tokenizer
    add_bos: bool
    prefix_token_id: int

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> list[EncodedPair]:
        """Each context and continuation with the ids of both, which are those of lm_eval's own
        ``TemplateLM._encode_pair``."""
        texts: list[str] = []
        for context, continuation in pairs:
            texts += [context.rstrip(), context + continuation] if context else [continuation]
        encoded, ids = [], iter(encode_all(self.tokenizer, texts))
        for context, continuation in pairs:
            if context:  # white space at its end belongs to the continuation
                start, whole = self.with_bos(next(ids)), self.with_bos(next(ids))
                end = whole[len(start) :]
            else:
                whole = next(ids)
                own = whole[:1].tolist() == [self.prefix_token_id]
                start, end = (whole[:1], whole[1:]) if own else ([self.prefix_token_id], whole)
            encoded.append(((context, continuation), start, end))
        return encoded

    def contexts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of each prompt, at least one."""
        encoded = [self.with_bos(ids) for ids in encode_all(self.tokenizer, texts)]
        return [ids if len(ids) else np.array([self.prefix_token_id]) for ids in encoded]

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of each text, after exactly one prefix token."""
        return [
            ids
            if ids[:1].tolist() == [self.prefix_token_id]
            else np.concatenate([[self.prefix_token_id], ids], dtype=np.int32)
            for ids in encode_all(self.tokenizer, texts)
        ]

    def with_bos(self, ids: np.ndarray) -> np.ndarray:
        """int32 ids of a text, with exactly one BOS in front if texts have one."""
        if not self.add_bos:
            return ids
        bos = self.tokenizer.bos_token_id
        rest = next((i for i, token in enumerate(ids) if token != bos), len(ids))
        return np.concatenate([with_one_bos(self.tokenizer, []), ids[rest:]], dtype=np.int32)
