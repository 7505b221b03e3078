"""Token ids of lm_eval's requests; shared beginnings of texts are tokenised once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.errors import ArgumentError
from griffin_eval.states.saved_state import SavedState
from griffin_eval.text.chat import PLAIN, TemplateRefused, after_opening, template_name
from griffin_eval.text.shared_prefixes import encode_all
from griffin_eval.text.tokenizer import Tokenizer, with_one_bos

# A (context, continuation) pair, and the ids of both.
EncodedPair = tuple[tuple[str, str], Sequence[int] | np.ndarray, Sequence[int] | np.ndarray]


class Encoding(NamedTuple):
    """Tokenisation of requests."""

    tokenizer: Tokenizer
    add_bos: bool  # whether a context starts with exactly one BOS
    prefix_token_id: int  # the token before the continuation of an empty context

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> list[EncodedPair]:
        """Return each pair with the ids of both texts, equal to those of lm_eval's
        ``TemplateLM._encode_pair``."""
        known = {text: text for context, _ in pairs if (text := context.rstrip())}
        texts: list[str] = []
        for context, continuation in pairs:  # the whole is often the next context
            whole = context + continuation
            whole = known.setdefault(whole, whole)
            texts += [known.get(text := context.rstrip(), text), whole] if context else [whole]
        encoded, ids = [], iter(self._encode(texts))
        for context, continuation in pairs:
            if context:  # its trailing white space belongs to the continuation
                start, whole = self._with_bos(next(ids)), self._with_bos(next(ids))
                start, end = self._beginning(whole, start), whole[len(start) :]
            else:
                whole = next(ids)[self.add_bos :]
                own = whole[:1].tolist() == [self.prefix_token_id]
                start, end = (whole[:1], whole[1:]) if own else ([self.prefix_token_id], whole)
            encoded.append(((context, continuation), start, end))
        return encoded

    def contexts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the int32 ids of each prompt, at least one."""
        encoded = [self._with_bos(ids) for ids in self._encode(texts)]
        return [ids if len(ids) else np.array([self.prefix_token_id]) for ids in encoded]

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the int32 ids of each text after exactly one prefix token."""
        return [
            ids[1:] if ids[1:2].tolist() == [self.prefix_token_id] else ids
            for ids in encode_all(self.tokenizer, texts, [self.prefix_token_id])
        ]

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the int32 ids of each text, after a BOS if ``add_bos``."""
        bos = with_one_bos(self.tokenizer, []) if self.add_bos else []
        return encode_all(self.tokenizer, texts, bos)

    def _with_bos(self, ids: np.ndarray) -> np.ndarray:
        """Remove from the result of `_encode` any BOS tokens that the text itself starts with."""
        if not self.add_bos:
            return ids
        rest = next((i for i, token in enumerate(ids) if token != ids[0]), len(ids))
        return ids[rest - 1 :]

    @staticmethod
    def _beginning(whole: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Return the ids as a slice of the whole sequence if it begins with them."""
        beginning = whole[: len(ids)]
        return beginning if np.array_equal(beginning, ids) else ids


class EncodingAfterState(Encoding):
    """Tokenisation of texts that continue a saved state: each text is tokenised alone, without BOS,
    after the state's last token, which is the prefix token."""

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> list[EncodedPair]:
        plain = Encoding(self.tokenizer, False, -1).pairs(pairs)
        return [
            (pair, self._behind(start) if pair[0] else [self.prefix_token_id], end)
            for pair, start, end in plain
        ]

    def contexts(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self._behind(ids) for ids in encode_all(self.tokenizer, texts, [])]

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        return encode_all(self.tokenizer, texts, [self.prefix_token_id])

    def _behind(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.concatenate([np.array([self.prefix_token_id], np.int32), ids], dtype=np.int32)


class RememberedEncoding:
    """An `Encoding` that caches the ids of each list of texts."""

    def __init__(self, encoding: Encoding):
        self.add_bos, self.prefix_token_id = encoding.add_bos, encoding.prefix_token_id
        self._encoding, self._ids = encoding, dict[tuple[str, tuple[Any, ...]], Any]()

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> list[EncodedPair]:
        return self._remembered(self._encoding.pairs, pairs)

    def contexts(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self._remembered(self._encoding.contexts, texts)

    def documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self._remembered(self._encoding.documents, texts)

    def _remembered(self, encode: Callable[[Any], Any], texts: Sequence[Any]) -> Any:
        key = encode.__name__, tuple(texts)
        if key not in self._ids:
            self._ids[key] = encode(texts)
        return self._ids[key]


def continuation_of(context: str, continuation: str) -> str:
    """Return the continuation with the trailing white space of its context in front, as lm_eval
    scores it."""
    return context[len(context.rstrip()) :] + continuation


def joined(
    context: Sequence[int] | np.ndarray, continuation: Sequence[int] | np.ndarray
) -> np.ndarray:
    """Return int32 [N], the ids of both; a view if they are adjacent slices of one array."""
    before, after = np.asarray(context, np.int32), np.asarray(continuation, np.int32)
    whole = before.base
    if (
        isinstance(whole, np.ndarray)
        and whole is after.base
        and whole.dtype == np.int32
        and whole.strides == before.strides == after.strides == (4,)
    ):
        start, middle = ((part.ctypes.data - whole.ctypes.data) // 4 for part in (before, after))
        if start + len(before) == middle:
            return whole[start : middle + len(after)]
    return np.concatenate([before, after])


def chat_after_state(
    state: SavedState,
    messages: list[dict[str, str]],
    tokenizer: Tokenizer,
    add_generation_prompt: bool,
) -> str:
    """Return the prompt of a conversation that begins with a state's text, without that text."""
    template = tokenizer.chat_template
    if template is None or state.origin.template != template_name(template):
        raise ArgumentError(
            f"state= was saved {_with(state.origin.template)}, and the tokenizer comes "
            f"{_with(template and template_name(template))}: read the text again with griffin-eval "
            "read --chat, or leave --apply_chat_template out"
        )
    try:
        return after_opening(
            template, messages, tokenizer, add_generation_prompt=add_generation_prompt
        )
    except TemplateRefused as error:
        raise ArgumentError(
            f"the chat template refuses messages behind the text of state=: {error}"
        ) from None


def _with(template: str | None) -> str:
    """Return a `template_name` in words."""
    if template is None:
        return "without a chat template"
    return f"with the chat template {template if template == PLAIN else template[:12]}"
