"""Answers of one request as they come from the scheduler, and as the API writes them."""

import asyncio
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from griffin_eval.engine.live.requests import NewToken, PromptScores
from griffin_eval.text.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """The bytes that a byte-level vocabulary writes as printable characters, as GPT-2's does."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    written = {chr(byte): byte for byte in kept}
    return written | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
_MARGIN = 16  # tokens before a stop string that its first token may depend on


class TokenNames:
    """Text of single tokens.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.text = lru_cache(1 << 16)(self._text)
        self.width = lru_cache(1 << 16)(self._width)

    def _text(self, token: int) -> str:
        piece = self._tokenizer.piece(token)
        if "\u2581" in piece:
            return piece.replace("\u2581", " ")
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return self._bytes(token) if "\ufffd" in text or not text else text

    def _bytes(self, token: int) -> str:
        if (found := self.bytes_of(token)) is None:
            return f"token_id:{token}"
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def bytes_of(self, token: int) -> bytes | None:
        """What a token stands for in UTF-8, which may be a part of a character; None of a token
        that stands for no text."""
        piece = self._tokenizer.piece(token)
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        if "\u2581" in piece:
            return piece.replace("\u2581", " ").encode()
        text = self._tokenizer.decode([token], skip_special_tokens=True)
        if "\ufffd" not in text:
            return text.encode() or None
        try:  # of a vocabulary that writes each byte as a character
            return bytes(_BYTE_OF_CHARACTER[one] for one in piece)
        except KeyError:
            return None

    def _width(self, token: int) -> int:
        """Number of characters of a text that begin in a token."""
        text = self.text(token)
        if not text.startswith(("bytes:", "token_id:")):
            return len(text)
        return sum(byte & 0xC0 != 0x80 for byte in self.bytes_of(token) or b"")

    def keyed(self, values: dict[int, float]) -> dict[str, float]:
        """Values of tokens by the tokens' text, or by what tells those of equal texts apart."""
        found = dict[str, float]()
        for token, value in values.items():
            key = self.text(token)
            if key in found:
                key = self._bytes(token)
            if key in found:
                key = f"token_id:{token}"
            found[key] = value
        return found


class Answer:
    """The answer to one prompt: a `griffin_eval.engine.live.requests.Listener`.

    Args:
        tokenizer: of the model.
        stop: strings that end the text.
        changed: called in the scheduler's thread when the answer has ended.
        in_parts: whether it is also called after each token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: list[str],
        changed: Callable[[], object],
        *,
        in_parts: bool,
    ):
        self._tokenizer, self._stop, self._changed = tokenizer, stop, changed
        self._in_parts = in_parts
        # Each token is at least a byte, so a string that has just appeared lies within as many.
        self._tail = max((len(one.encode()) for one in stop), default=0) + _MARGIN
        # Text of the first ``_upto`` tokens. What follows is decoded from token ``_from`` on, since
        # it may depend on the tokens before it.
        self._settled, self._from, self._upto = "", 0, 0
        self.scores: PromptScores | None = None
        self.tokens: list[NewToken] = []
        self.reason: str | None = None
        self.error: Exception | None = None

    def prompt(self, scores: PromptScores) -> None:
        self.scores = scores

    def token(self, token: NewToken) -> bool:
        self.tokens.append(token)
        if self._in_parts:
            self._changed()
        if not self._stop or token.ends:
            return False
        tail = [each.id for each in self.tokens[-self._tail :]]
        # A special token may be a stop string, and may stand between two halves of one.
        texts = [self._tokenizer.decode(tail, skip_special_tokens=skip) for skip in (True, False)]
        return any(one in text for text in texts for one in self._stop)

    def done(self, reason: str, error: Exception | None) -> None:
        self.reason, self.error = reason, error
        self._changed()

    @property
    def text(self) -> str:
        """The text so far, up to its first stop string; while more may come without what may be the
        beginning of one, or of a character."""
        ended, count = self.reason is not None, len(self.tokens)
        text = self._decode(0, count) if ended else self._longer(count)
        # What was settled has no stop string.
        before = 0 if ended or not text.startswith(self._settled) else len(self._settled)
        starts = [text.find(one, max(before - len(one), 0)) for one in self._stop]
        if found := [start for start in starts if start >= 0]:
            return text[: min(found)]
        if ended:
            return text
        if len(text) > len(self._settled) and not text.endswith("\ufffd"):
            self._settled, self._from, self._upto = text, self._upto, count
        text = text.rstrip("\ufffd")
        keep = max(
            (n for one in self._stop for n in range(1, len(one)) if text.endswith(one[:n])),
            default=0,
        )
        return text[: len(text) - keep]

    def _longer(self, count: int) -> str:
        """The text of so many tokens, of which little more than what is not settled is decoded."""
        known, window = self._decode(self._from, self._upto), self._decode(self._from, count)
        if window.startswith(known):
            return self._settled + window[len(known) :]
        return self._decode(0, count)

    def _decode(self, begin: int, end: int) -> str:
        ids = [each.id for each in self.tokens[begin:end] if not each.ends]
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class Completion:
    """What the API says of an answer.

    Args:
        names: of tokens.
        prompt: int32 [N], ids that the client knows of.
        prompt_text: as it is echoed.
        answer: so far.
        echo: whether the prompt is part of the answer.
        top: likeliest tokens beside each token; None for no log-probabilities.
        unseen: number of ids at the beginning that are not in the prompt's text, such as BOS.
        follows: whether the prompt goes on from a saved state, so that its first token has a
            log-probability, too.
    """

    def __init__(
        self,
        names: TokenNames,
        prompt: np.ndarray,
        prompt_text: str,
        answer: Answer,
        echo: bool,
        top: int | None,
        *,
        unseen: int = 0,
        follows: bool = False,
    ):
        self._names, self.prompt, self.answer = names, prompt, answer
        self._prompt_text, self._echo, self._top = prompt_text, echo, top
        self._unseen, self._follows = unseen, follows
        self._sent_text = self._sent_tokens = self._offset = 0

    @property
    def text(self) -> str:
        return (self._prompt_text if self._echo else "") + self.answer.text

    @property
    def finish_reason(self) -> str | None:
        return {"stop": "stop", "length": "length"}.get(self.answer.reason or "")

    def logprobs(self, start: int = 0) -> dict[str, Any] | None:
        """``logprobs`` of ``/v1/completions``, of the tokens from ``start`` on.

        The first token of a prompt has null, but for a prompt behind a saved state. The token that
        ended a text is among them. Each call goes on where the one before has ended, or begins at
        0.
        """
        if self._top is None:
            return None
        scores, given = self.answer.scores, self.answer.tokens
        read = len(self.prompt) if self._echo and scores is not None else 0
        new = given[max(start - read, 0) :]
        ids = [token.id for token in new]
        values: list[float | None] = [token.logprob for token in new]
        tops: list[dict[str, float] | None] = []
        for token in new:
            if token.logprob is None:
                tops.append(None)
                continue
            likeliest = token.top_tokens[None], token.top_logprobs[None]
            tops += self._tops([token.id], [token.logprob], *likeliest)
        if start < read and scores is not None:
            first = [None] * (start == 0 and not self._follows)
            begin = start + len(first) - (0 if self._follows else 1)
            mine, scored = self.prompt[start:].tolist(), scores.logprobs[begin:].tolist()
            likeliest = scores.top_tokens[begin:], scores.top_logprobs[begin:]
            tops = [*first, *self._tops(mine[len(first) :], scored, *likeliest), *tops]
            ids, values = mine + ids, [*first, *scored, *values]
        if not start:
            self._offset = 0 if read else len(self._prompt_text)
        texts = [self._names.text(token) for token in ids]
        widths = [self._names.width(token) for token in ids]
        if start < read:
            unseen = max(self._unseen - start, 0)
            widths[:unseen] = [0] * unseen
        offsets = (self._offset + np.cumsum([0, *widths])).tolist()
        self._offset = offsets.pop()  # of what is asked for next
        return {
            "tokens": texts,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _tops(
        self,
        tokens: list[int],
        values: list[float],
        top_tokens: np.ndarray,
        top_logprobs: np.ndarray,
    ) -> list[dict[str, float]]:
        """``top_logprobs`` of N tokens: of the K likeliest ones, and of the token itself, which has
        the same number there as in ``token_logprobs``.

        Args:
            tokens, values: N ids and log-probabilities.
            top_tokens, top_logprobs: [N, K].
        """
        likeliest, logprobs = top_tokens.tolist(), top_logprobs.tolist()
        text = {token: self._names.text(token) for token in {*tokens, *top_tokens.ravel().tolist()}}
        rows = zip(tokens, values, likeliest, logprobs, strict=True)
        if len(set(text.values())) < len(text):  # two tokens have one text
            return [
                self._names.keyed(dict(zip(ids, each, strict=True)) | {token: value})
                for token, value, ids, each in rows
            ]
        if top_tokens.shape[1] == 1:  # many tokens of evaluation's prompts: no dict of ids
            return [
                {text[one]: logprob, text[token]: value} for token, value, [one], [logprob] in rows
            ]
        return [
            {text[one]: logprob for one, logprob in zip(ids, each, strict=True)}
            | {text[token]: value}
            for token, value, ids, each in rows
        ]

    def chat_logprobs(self, start: int = 0) -> dict[str, Any] | None:
        """``logprobs`` of ``/v1/chat/completions``."""
        if self._top is None:
            return None

        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            found = self._names.bytes_of(token)
            told = None if found is None else list(found)
            return {"token": self._names.text(token), "logprob": logprob, "bytes": told}

        return {
            "content": [
                entry(each.id, each.logprob)
                | {
                    "top_logprobs": [
                        entry(*one)
                        for one in zip(
                            each.top_tokens.tolist(), each.top_logprobs.tolist(), strict=True
                        )
                    ]
                }
                for each in self.answer.tokens[start:]
            ]
        }

    def news(self, chat: bool) -> tuple[str, Any]:
        """Text and log-probabilities that were not given yet."""
        text, start = self.text, self._sent_tokens
        new, self._sent_text = text[self._sent_text :], max(len(text), self._sent_text)
        logprobs = self.chat_logprobs(start) if chat else self.logprobs(start)
        if logprobs is not None:
            self._sent_tokens += len(logprobs["content" if chat else "tokens"])
        return new, logprobs


class Waker:
    """Wakes a task of asyncio from another thread."""

    def __init__(self) -> None:
        self._loop, self.event = asyncio.get_running_loop(), asyncio.Event()

    def __call__(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.event.set)
