"""What is asked of a scheduler, and what it answers."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from griffin_eval.engine.live.tree import LiveEdge
from griffin_eval.engine.sampling import GREEDY, Chooser, Sampling

MOST_TOP = 20  # likeliest tokens that can be asked for


class PromptScores(NamedTuple):
    """What was asked for of the tokens of a prompt.

    Attributes:
        logprobs: float64 [N], log-probabilities in nats of the tokens from `Request.score_from` on.
        top_tokens: int64 [N, K], the likeliest tokens in the place of each.
        top_logprobs: float64 [N, K], their log-probabilities.
    """

    logprobs: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray


class NewToken(NamedTuple):
    """A token that was generated.

    Attributes:
        id: of the token.
        ends: whether it is one that ends a text.
        logprob: its log-probability in nats; None unless it was asked for.
        top_tokens, top_logprobs: [K], the likeliest tokens in its place.
    """

    id: int
    ends: bool
    logprob: float | None
    top_tokens: np.ndarray
    top_logprobs: np.ndarray


class Listener(Protocol):
    """Who gets the answer to a request, in the scheduler's thread; it should return soon."""

    def prompt(self, scores: PromptScores) -> None:
        """The prompt has been scored, if that was asked for."""
        ...

    def token(self, token: NewToken) -> bool:
        """A token has been generated; True ends the continuation with it."""
        ...

    def done(self, reason: str, error: Exception | None) -> None:
        """Nothing more comes.

        Args:
            reason: ``stop``, ``length``, ``cancelled`` or ``error``.
            error: why, where the reason is ``error``.
        """
        ...


@dataclass(eq=False)
class Request:
    """What is asked of a model.

    Attributes:
        tokens: int32 [N], ids of the prompt, N >= 1.
        listener: gets the answer.
        score_from: index of the first token of the prompt to score, at least 1; None to score none.
        top: number of likeliest tokens to give beside each token, at most `MOST_TOP`; None for no
            log-probabilities of new tokens either.
        max_new_tokens: most tokens to generate.
        sampling: how they are chosen.
        seed: of the random numbers.
        start: name of the saved state that the prompt goes on from; None for none.
    """

    tokens: np.ndarray
    listener: Listener
    score_from: int | None = None
    top: int | None = None
    max_new_tokens: int = 0
    sampling: Sampling = GREEDY
    seed: tuple[int, int] = (0, 0)
    start: str | None = None
    # Of the scheduler:
    new: list[int] = field(default_factory=list, repr=False)
    cancelled: bool = field(default=False, repr=False)
    edge: LiveEdge | None = field(default=None, repr=False)
    drawn: bool = field(default=False, repr=False)  # what follows ``edge``
    chooser: Chooser | None = field(default=None, repr=False)

    @property
    def goes_on(self) -> bool:
        """Whether a row will be needed, unless the next token ends the text."""
        return self.max_new_tokens - len(self.new) > (0 if self.drawn else 1)


@dataclass
class Counts:
    """What a scheduler has done.

    Attributes:
        requests: that were added.
        finished: by reason.
        prompt_tokens: of all requests that began.
        tokens_kept: of prompts, that were not read because a state on disk had read them.
        tokens_read: that steps read of prompts.
        tokens_generated: that were generated.
        states_evicted: states that were dropped for others.
        steps: calls of the model.
    """

    requests: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    tokens_kept: int = 0
    tokens_read: int = 0
    tokens_generated: int = 0
    states_evicted: int = 0
    steps: int = 0
