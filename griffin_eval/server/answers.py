"""Answers to requests, filled by the scheduler and formatted for the API."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from griffin_eval.engine.live.requests import NewToken, PromptScores
from griffin_eval.server.logprobs import TokenNames, written
from griffin_eval.text.stop_strings import StopStrings
from griffin_eval.text.tokenizer import Tokenizer


class Answer:
    """The answer to one prompt: a `griffin_eval.engine.live.requests.Listener`. It calls
    ``changed`` in the scheduler's thread at its end and, ``in_parts``, after each token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: list[str],
        changed: Callable[[], object],
        *,
        in_parts: bool,
    ):
        self._tokenizer, self._stop = tokenizer, StopStrings(tokenizer, stop)
        self._changed, self._in_parts = changed, in_parts
        # Text of the first ``_upto`` tokens. Later text is decoded from token ``_from`` on, since
        # it may depend on the tokens before.
        self._settled, self._from, self._upto = "", 0, 0
        self.scores: PromptScores | None = None
        self.tokens: list[NewToken] = []
        self._ids: list[int] = []  # ids of ``tokens``
        self.reason: str | None = None
        self.error: Exception | None = None

    def prompt(self, scores: PromptScores) -> None:
        self.scores = scores

    def token(self, token: NewToken) -> bool:
        self.tokens.append(token)
        if self._in_parts:
            self._changed()
        self._ids.append(token.id)
        return not token.ends and self._stop.completed(self._ids)

    def done(self, reason: str, error: Exception | None) -> None:
        self.reason, self.error = reason, error
        self._changed()

    @property
    def text(self) -> str:
        """Text so far, up to its first stop string. Until the answer has ended, it excludes a
        possible beginning of a stop string or of a character."""
        ended, count = self.reason is not None, len(self.tokens)
        text = self._decode(0, count) if ended else self._longer(count)
        # The settled text has no stop string.
        before = 0 if ended or not text.startswith(self._settled) else len(self._settled)
        if (beginning := self._stop.beginning(text, before)) is not None:
            return text[:beginning]
        if ended:
            return text
        if len(text) > len(self._settled) and not text.endswith("\ufffd"):
            self._settled, self._from, self._upto = text, self._upto, count
        text = text.rstrip("\ufffd")
        return text[: len(text) - self._stop.begun(text)]

    def _longer(self, count: int) -> str:
        """Return the text of the first ``count`` tokens, decoding little of the settled text."""
        known, window = self._decode(self._from, self._upto), self._decode(self._from, count)
        if window.startswith(known):
            return self._settled + window[len(known) :]
        return self._decode(0, count)

    def _decode(self, begin: int, end: int) -> str:
        ids = [each.id for each in self.tokens[begin:end] if not each.ends]
        return self._tokenizer.decode(ids, skip_special_tokens=True)


class Completion:
    """The API's representation of an answer.

    Args:
        prompt: int32 [N], prompt ids that the client knows.
        echo: Whether the answer contains the prompt, as ``prompt_text``.
        top: Number of most likely tokens for each token; None for no log-probabilities.
        unseen: Number of ids at the beginning that are not in the prompt's text, such as BOS.
        follows: Whether the prompt continues a saved state, which predicts its first token.
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

    def logprobs(self, start: int = 0, until: int | None = None) -> orjson.Fragment | None:
        """Return ``logprobs`` of ``/v1/completions`` as JSON, for the tokens from ``start`` on and
        the first ``until`` new ones, EOS included.

        The first token of a prompt has null unless the prompt continues a saved state. Each call
        continues where the previous one ended, or starts at 0.
        """
        if self._top is None:
            return None
        scores, read = self.answer.scores, self._echoed
        new = self.answer.tokens[max(start - read, 0) : until]
        ids = np.array([token.id for token in new], np.int64)
        values = np.array([np.nan if one.logprob is None else one.logprob for one in new])
        count = 0 if scores is None else scores.top_tokens.shape[1]
        shape = len(new), len(new[0].top_tokens) if new else count
        tops = np.array([one.top_tokens for one in new], np.int64).reshape(shape)
        top_values = np.array([one.top_logprobs for one in new], np.float64).reshape(shape)
        if start < read and scores is not None:
            first = int(start == 0 and not self._follows)  # number of tokens without scores
            known = slice(start + first - (0 if self._follows else 1), None)
            none = np.zeros((first, count), np.int64)
            ids = np.concatenate([self.prompt[start:], ids])
            values = np.concatenate([np.full(first, np.nan), scores.logprobs[known], values])
            tops = np.concatenate([none, scores.top_tokens[known], tops])
            top_values = np.concatenate([none, scores.top_logprobs[known], top_values])
        if not start:
            self._offset = 0 if read else len(self._prompt_text)
        different, which = np.unique(ids, return_inverse=True)
        widths = np.array([self._names.width(token) for token in different.tolist()], int)[which]
        if start < read:
            widths[: max(self._unseen - start, 0)] = 0
        offsets = self._offset + np.cumsum([0, *widths])
        self._offset = int(offsets[-1])  # start of the next call
        return written(self._names, ids.tolist(), values, tops, top_values, offsets[:-1])

    @property
    def _echoed(self) -> int:
        """Number of prompt tokens that have log-probabilities in the answer."""
        return len(self.prompt) if self._echo and self.answer.scores is not None else 0

    def chat_logprobs(self, start: int = 0, until: int | None = None) -> dict[str, Any] | None:
        """Return ``logprobs`` of ``/v1/chat/completions`` for the new tokens in a range."""
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
                for each in self.answer.tokens[start:until]
            ]
        }

    def news(self, chat: bool) -> tuple[str, Any, int]:
        """Return text and log-probabilities since the previous call, and their number of tokens."""
        # The scheduler's thread may add tokens meanwhile; they belong to the next call.
        count, start = len(self.answer.tokens), self._sent_tokens
        text = self.text
        new, self._sent_text = text[self._sent_text :], max(len(text), self._sent_text)
        logprobs = self.chat_logprobs(start, count) if chat else self.logprobs(start, count)
        if logprobs is not None:
            self._sent_tokens = count + (0 if chat else self._echoed)
        return new, logprobs, self._sent_tokens - start


class Waker:
    """Wakes an asyncio task from another thread."""

    def __init__(self) -> None:
        self._loop, self.event = asyncio.get_running_loop(), asyncio.Event()

    def __call__(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.event.set)
