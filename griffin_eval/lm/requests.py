"""Conversion of lm-eval's requests to token ids to score or continue."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance

from griffin_eval.engine.generation import Prompt
from griffin_eval.engine.stats import Stats
from griffin_eval.engine.tree import Ablation, Scorable
from griffin_eval.errors import ArgumentError
from griffin_eval.lm.encoding import (
    EncodedPair,
    Encoding,
    EncodingAfterState,
    RememberedEncoding,
    chat_after_state,
    continuation_of,
    joined,
)
from griffin_eval.lm.generation_args import GenerationArguments
from griffin_eval.opened import OpenModel

NO_LIMIT = 2**31 - 1  # positions are 32-bit integers
ABLATIONS = {name.lower(): kind for name, kind in Ablation.__members__.items()}

logger = logging.getLogger(__name__)


class Requests:
    """Converts the requests for a model to inputs of the engine."""

    def __init__(self, model: OpenModel):
        encoding = Encoding if model.state is None else EncodingAfterState
        self.encoding: Encoding | RememberedEncoding = encoding(
            model.tokenizer, model.add_bos, model.prefix_token_id
        )
        self.max_length = model.arguments.max_length or NO_LIMIT
        self.warned: set[str] = set()
        self._tokenizer, self._state = model.tokenizer, model.state
        self._on_merge = model.arguments.on_merge

    def remember(self) -> None:
        """Cache the token ids of all requests, for a model that will answer them again."""
        if isinstance(self.encoding, Encoding):
            self.encoding = RememberedEncoding(self.encoding)

    def warn_once(self, message: str) -> None:
        if message not in self.warned:
            self.warned.add(message)
            logger.warning(message)

    def warn_of_template(self) -> None:
        """Warn if the tokenizer has a chat template that the requests do not use."""
        if self._tokenizer.chat_template is not None:
            self.warn_once(
                "the tokenizer has a chat template, so the model may have learned to answer in it, "
                "and these requests are without: --apply_chat_template puts them into it"
            )

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        """Return the prompt of a conversation; with a saved state, the part after its text."""
        if self._state is not None:
            return chat_after_state(self._state, messages, self._tokenizer, add_generation_prompt)
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt
        )

    def pairs(self, requests: Sequence[Instance], stats: Stats) -> list[EncodedPair]:
        """Return the context and the continuation of each request with the ids of both.

        A tokenizer can merge a continuation into the last token of its context, which leaves no
        token to score. Such a continuation is encoded separately, so that every choice of a
        document is scored on the same context; ``stats`` counts it.
        Raises ArgumentError for an empty continuation, or a merged one with ``on_merge=error``.
        """
        arguments: list[Any] = [request.args for request in requests]
        encoded = list(self.encoding.pairs([each[:2] for each in arguments]))
        merged: list[str] = []
        for index, (texts, context, ids) in enumerate(encoded):
            if len(ids):
                continue
            where = _described(requests[index])
            alone = self._tokenizer.encode(continuation_of(*texts))
            if not alone:
                raise ArgumentError(
                    f"{where} is empty, so there is no token to score: check doc_to_choice and "
                    "doc_to_target of the task"
                )
            if self._on_merge == "error":
                raise ArgumentError(
                    f"the tokenizer merges {where} into the last token of its context "
                    f"{quoted(texts[0])}, so there is no token to score: put the space between "
                    "the two into the continuation, or leave out on_merge=error to encode it alone"
                )
            merged.append(where)
            encoded[index] = texts, context, alone
        if merged:
            stats.continuations_encoded_alone += len(merged)
            self.warn_once(
                f"the tokenizer merges continuations into the last token of their contexts; they "
                f"are encoded alone (on_merge=error refuses them): {merged[0]}"
                + (f" and {len(merged) - 1} more" if merged[1:] else "")
            )
        return encoded

    def scorable(self, pair: EncodedPair, ablation: Ablation = Ablation.NOTHING) -> Scorable:
        """Return the ids of a context and its continuation as one sequence, cut to max_length."""
        texts, context, continuation = pair
        if not len(continuation):
            raise ArgumentError(f"the continuation {texts[1]!r} has no token to score")
        if len(continuation) > self.max_length:
            raise ArgumentError(
                f"the continuation {texts[1][:60]!r}… has {len(continuation)} tokens, "
                f"more than max_length={self.max_length}"
            )
        if not len(context):  # nothing but white space, without BOS
            context = [self.encoding.prefix_token_id]
        ids = self._fit(joined(context, continuation), self.max_length + 1)
        return Scorable(ids, len(ids) - len(continuation), ablation)

    def documents(self, texts: Sequence[str]) -> list[Scorable]:
        """Return the ids of whole documents, each after one prefix token."""
        if self.max_length != NO_LIMIT:
            self.warn_once(
                "max_length does not apply to rolling log-likelihoods: documents are read whole"
            )
        return [Scorable(ids, 1) for ids in self.encoding.documents(texts)]

    def prompts(
        self, contexts: Sequence[str], arguments: Sequence[GenerationArguments]
    ) -> list[Prompt]:
        """Return the ids of contexts, cut so that the new tokens fit into max_length."""
        prompts = []
        for ids, (sampling, _, max_new_tokens) in zip(
            self.encoding.contexts(contexts), arguments, strict=True
        ):
            if max_new_tokens >= self.max_length:
                raise ArgumentError(
                    f"max_gen_toks={max_new_tokens} leaves no room for a prompt in "
                    f"max_length={self.max_length}"
                )
            ids = self._fit(ids, self.max_length - max_new_tokens)
            prompts.append(Prompt(ids, max_new_tokens, sampling))
        return prompts

    def _fit(self, ids: np.ndarray, max_tokens: int) -> np.ndarray:
        if len(ids) > max_tokens:
            self.warn_once(
                f"max_length={self.max_length}: longer contexts are cut to their last tokens"
            )
        return ids[-max_tokens:]


def ablations_of(requests: Sequence[Instance]) -> list[Ablation]:
    """Return the memory that each request clears before the last token of its context is read.

    The third argument of a request is ``nothing``; ``recurrent``, the states of RG-LRU and
    convolutions, which start again from zero; or ``attention``, the keys and values of all tokens
    before. Other memory and positions are kept. Every scored token is predicted without the cleared
    memory.
    """
    arguments: list[Any] = [request.args for request in requests]
    names = [name for _, _, name in arguments]
    unknown = sorted({str(name) for name in names} - set(ABLATIONS))
    if unknown:
        raise ArgumentError(
            f"unknown ablation {', '.join(unknown)}: expected {', '.join(ABLATIONS)}"
        )
    return [ABLATIONS[name] for name in names]


def _described(request: Instance) -> str:
    """Name the continuation of a request with its document and task, if lm_eval set them."""
    arguments: Any = request.args
    continuation = arguments[1]
    name = f"continuation {continuation!r} (choice {request.idx})"
    if request.doc_id is None:
        return f"the {name}"
    return f"document {request.doc_id} of {request.task_name}: the {name}"


def quoted(text: str) -> str:
    """Return the end of a request's text for an error message; beginnings are often alike."""
    return repr(text if len(text) <= 60 else f"…{text[-60:]}")
