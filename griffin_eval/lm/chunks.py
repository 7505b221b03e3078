"""Long contexts read in chunks, of which the surest one is answered from.

A recurrent model forgets within a long context what it recalls from a short one. OPRM (Ben-Kish et
al., "Overflow prevention enhances long-context recurrent LLMs", arXiv 2505.07793) therefore reads
the question after each chunk of the context, and goes on from the chunk after which the next token
is least uncertain. The engine reads what the prompts of the chunks share once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from lm_eval.api.instance import Instance

from griffin_eval.engine.scoring import Scored
from griffin_eval.engine.stats import Stats
from griffin_eval.engine.tree import Scorable
from griffin_eval.errors import ArgumentError
from griffin_eval.lm.encoding import EncodedPair, joined
from griffin_eval.lm.requests import Requests
from griffin_eval.model_arguments import ModelArguments
from griffin_eval.opened import OpenModel
from griffin_eval.text.tokenizer import Tokenizer

# Gives for prompts and the texts that they were cut from the doubt after each, float [N], such as
# the entropy of the next token, and whether the likeliest token says "not here", bool [N].
Measure = Callable[[list[str], list[str]], tuple[np.ndarray, np.ndarray]]


class Chunking(NamedTuple):
    """How contexts are cut.

    Attributes:
        tokens: Most tokens of a chunk, without prefix and question.
        question_lines: Number of lines at the end of a prompt that are its question.
        prefix_lines: Number of lines at its beginning that every chunk gets.
        absent: Answer that says that a chunk does not have it, or None.
        by_likelihood: Whether the chunk is chosen by the likeliest answer instead of the least
            entropy.
    """

    tokens: int
    question_lines: int
    prefix_lines: int
    absent: str | None
    by_likelihood: bool


def chunking_of(arguments: ModelArguments) -> Chunking | None:
    """Return how contexts are cut, or None if they are read whole."""
    if arguments.chunk_tokens is None:
        return None
    return Chunking(
        arguments.chunk_tokens,
        arguments.chunk_question_lines,
        arguments.chunk_prefix_lines,
        arguments.chunk_absent,
        arguments.chunk_rule == "loglikelihood",
    )


def prompts_of(text: str, tokenizer: Tokenizer, chunking: Chunking) -> list[str]:
    """Return a prompt for each chunk of the context of a text; the text alone if that is short.

    Where chunks end depends on the context alone, so that questions about one text share them. A
    chunk ends behind its last line break if that is in its second half, so that few lines are cut,
    and else between two tokens.

    Raises:
        ArgumentError: There is no context, or the question is longer than a chunk.
    """
    lines = text.splitlines(keepends=True)
    first, last = chunking.prefix_lines, len(lines) - chunking.question_lines
    if last <= first:
        raise ArgumentError(
            f"chunk_tokens=: a prompt of {len(lines)} lines has no context between "
            f"chunk_prefix_lines={first} and chunk_question_lines={chunking.question_lines}: "
            f"{text[-60:]!r}"
        )
    prefix, context, question = (
        "".join(lines[part]) for part in (slice(first), slice(first, last), slice(last, None))
    )
    around = len(tokenizer.encode(prefix)) + len(tokenizer.encode(question))
    if around > chunking.tokens:
        raise ArgumentError(
            f"chunk_tokens={chunking.tokens}: the lines before and after the context have {around} "
            f"tokens, more than a chunk: {question[-60:]!r}"
        )
    return [prefix + chunk + question for chunk in _chunks(context, tokenizer, chunking.tokens)]


def _chunks(context: str, tokenizer: Tokenizer, max_tokens: int) -> list[str]:
    """Cut a text into parts of at most so many tokens."""
    ends = np.asarray(tokenizer.spans(context))[:, 1]
    parts, begin, token = [], 0, 0
    while len(ends) - token > max_tokens:
        end = int(ends[token + max_tokens - 1])
        line = context.rfind("\n", begin, end) + 1
        if line > (begin + end) / 2:
            end = line
        parts.append(context[begin:end])
        begin, token = end, int(np.searchsorted(ends, end, side="right"))
    return [*parts, context[begin:]]


def surest(doubts: np.ndarray, absent: np.ndarray) -> int:
    """Return the chunk with the least doubt among those that do not say that it is absent.

    Where all say so, all are compared.
    """
    if not absent.all():
        doubts = np.where(absent, np.inf, doubts)
    return int(doubts.argmin())


class ChunkedRequests:
    """Requests whose long contexts are cut to the chunk that they are answered from.

    Args:
        chunking: How contexts are cut.
        tokenizer: Tokenizer that chunks are counted with.
        requests: Turns what is read into token ids.
        score: Scores sequences, `GriffinLM._score`.
        partly: Returns whether other processes, or a cache, answer the rest of the requests.
    """

    def __init__(
        self,
        chunking: Chunking,
        tokenizer: Tokenizer,
        requests: Requests,
        score: Callable[..., None],
        partly: Callable[[], bool],
    ):
        self._chunking, self._tokenizer = chunking, tokenizer
        self._requests, self._score, self._partly = requests, score, partly

    @classmethod
    def of(cls, model: OpenModel, *rest: Any) -> "ChunkedRequests | None":
        """Return what the arguments of a model ask for; None if contexts are read whole."""
        chunking = chunking_of(model.arguments)
        return None if chunking is None else cls(chunking, model.tokenizer, *rest)

    def contexts(self, contexts: list[str]) -> list[str]:
        """Return the contexts of texts that are generated, long ones cut to the chosen chunk."""
        if self._chunking.by_likelihood:
            raise ArgumentError(
                "chunk_rule=loglikelihood chooses between given answers: texts that are generated "
                "need chunk_rule=entropy"
            )
        return self._choose(contexts, self._entropies)

    def pairs(self, requests: list[Instance], stats: Stats) -> list[EncodedPair]:
        """Return `Requests.pairs`, long contexts cut to the chosen chunk.

        All answers to a question are scored after the same chunk. The texts of a pair stay those of
        the request.
        """
        asked: list[Any] = [request.args for request in requests]
        answers: dict[str, list[str]] = {}
        for context, continuation in asked:
            answers.setdefault(context, []).append(continuation)

        def likeliest(prompts: list[str], texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
            places, instances = [], []
            for place, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
                for answer in answers[text]:
                    places.append(place)
                    instances.append(Instance("loglikelihood", {}, (prompt, answer), 0))
            doubts = np.full(len(prompts), np.inf)

            def on_result(index: int, result: Scored) -> None:
                place = places[index]
                doubts[place] = min(doubts[place], -result.logprobs.sum())

            pairs = self._requests.pairs(instances, stats)
            scorables = [self._requests.scorable(pair) for pair in pairs]
            self._score(scorables, on_result, [prompts[place] for place in places])
            return doubts, np.zeros(len(prompts), bool)

        measure = likeliest if self._chunking.by_likelihood else self._entropies
        contexts = [context for context, _ in asked]
        chosen = self._choose(contexts, measure)
        cut = [
            dataclasses.replace(request, arguments=(context, continuation))
            for request, context, (_, continuation) in zip(requests, chosen, asked, strict=True)
        ]
        encoded = self._requests.pairs(cut, stats)
        return [
            (texts, context, continuation)
            for texts, (_, context, continuation) in zip(asked, encoded, strict=True)
        ]

    def _choose(self, texts: list[str], measure: Measure) -> list[str]:
        """Return the prompt that each text is answered from.

        Raises:
            ArgumentError: As `prompts_of`, or no context is longer than a chunk.
        """
        cut = {t: prompts_of(t, self._tokenizer, self._chunking) for t in dict.fromkeys(texts)}
        several = {text: prompts for text, prompts in cut.items() if len(prompts) > 1}
        if cut and not several and not self._partly():
            raise ArgumentError(
                f"chunk_tokens={self._chunking.tokens}: no context has more tokens, so that "
                "nothing would be read in chunks: choose fewer tokens, or leave chunk_tokens= out"
            )
        asked = [(prompt, text) for text, prompts in several.items() for prompt in prompts]
        doubts, absent = measure([prompt for prompt, _ in asked], [text for _, text in asked])
        chosen, begin = {text: prompts[0] for text, prompts in cut.items()}, 0
        for text, prompts in several.items():
            part = slice(begin, begin + len(prompts))
            chosen[text] = prompts[surest(doubts[part], absent[part])]
            begin += len(prompts)
        return [chosen[text] for text in texts]

    def _entropies(self, prompts: list[str], texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the entropy of the next token, and whether the likeliest one says "not here"."""
        firsts = self._first_tokens()
        places = np.repeat(np.arange(len(prompts)), len(firsts))
        scorables = [
            Scorable(joined(ids, [first]), len(ids))
            for ids in self._requests.encoding.contexts(prompts)
            for first in firsts
        ]
        entropies, absent = np.empty(len(prompts)), np.zeros(len(prompts), bool)

        def on_result(index: int, result: Scored) -> None:
            assert result.entropies is not None
            place = places[index]
            entropies[place] = result.entropies[0]
            absent[place] |= self._chunking.absent is not None and result.greedy[0]

        self._score(scorables, on_result, [prompts[place] for place in places], details=True)
        return entropies, absent

    def _first_tokens(self) -> list[int]:
        """Return the tokens that the answer "not here" can begin with; any one if there is none.

        Many tokenizers write a word in one way at the start of a text and in another after a line.
        """
        if self._chunking.absent is None:
            return [0]
        encode = self._tokenizer.encode
        alone, line = encode(self._chunking.absent), encode("\n")
        behind = encode("\n" + self._chunking.absent)[len(line) :]
        return sorted({ids[0] for ids in (alone, behind) if len(ids)}) or [0]


def no_question(kind: str) -> ArgumentError:
    """Return the error for requests that have no question after a context."""
    return ArgumentError(
        f"chunk_tokens= reads a question after each chunk, and {kind} requests have none: leave "
        "chunk_tokens= out for this task"
    )
