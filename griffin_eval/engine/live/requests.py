"""Requests to a scheduler, and its answers."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from griffin_eval.engine.live.tree import LiveEdge
from griffin_eval.engine.sampling import GREEDY, Chooser, Sampling

MOST_TOP = 20  # maximum number of most likely tokens that a request can ask for


class PromptScores(NamedTuple):
    """Scores of the tokens of a prompt from `Request.score_from` on.

    Attributes:
        logprobs: float64 [N], log-probabilities in nats.
        top_tokens: int64 [N, K], the most likely tokens in the place of each token.
        top_logprobs: float64 [N, K], log-probabilities of ``top_tokens``.
    """

    logprobs: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray


class NewToken(NamedTuple):
    """A generated token.

    Attributes:
        ends: Whether the token ends a text (EOS).
        logprob: Log-probability in nats; None unless requested.
        top_tokens, top_logprobs: [K], the most likely tokens in its place.
    """

    id: int
    ends: bool
    logprob: float | None
    top_tokens: np.ndarray
    top_logprobs: np.ndarray


class Listener(Protocol):
    """Receiver of the answer to a request, called in the scheduler's thread; must return soon."""

    def prompt(self, scores: PromptScores) -> None:
        """Receive the scores of the prompt, if they were requested."""
        ...

    def token(self, token: NewToken) -> bool:
        """Receive a generated token; return True to end the continuation with it."""
        ...

    def done(self, reason: str, error: Exception | None) -> None:
        """Receive the end of the answer.

        Args:
            reason: ``stop``, ``length``, ``cancelled`` or ``error``.
            error: Cause if the reason is ``error``.
        """
        ...


@dataclass(eq=False)
class Request:
    """A request to a model.

    Attributes:
        tokens: int32 [N] prompt ids, N >= 1.
        score_from: Index of the first prompt token to score, at least 1; None to score none.
        top: Number of most likely tokens to return with each token, at most `MOST_TOP`; None for no
            log-probabilities of new tokens.
        start: Name of the saved state that the prompt continues.
    """

    tokens: np.ndarray
    listener: Listener
    score_from: int | None = None
    top: int | None = None
    max_new_tokens: int = 0
    sampling: Sampling = GREEDY
    seed: tuple[int, int] = (0, 0)
    start: str | None = None
    # Fields that the scheduler sets:
    new: list[int] = field(default_factory=list, repr=False)
    cancelled: bool = field(default=False, repr=False)
    edge: LiveEdge | None = field(default=None, repr=False)
    drawn: bool = field(default=False, repr=False)  # whether the token after ``edge`` is in ``new``
    chooser: Chooser | None = field(default=None, repr=False)

    @property
    def goes_on(self) -> bool:
        """Whether a decoding row will be needed, unless the next token ends the text."""
        return self.max_new_tokens - len(self.new) > (0 if self.drawn else 1)


@dataclass
class Counts:
    """Counters of a scheduler. ``finished`` is by reason; ``tokens_kept`` are prompt tokens that
    were not read because a state on disk covers them; ``tokens_read`` are prompt tokens read."""

    requests: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    tokens_kept: int = 0
    tokens_read: int = 0
    tokens_generated: int = 0
    states_evicted: int = 0
    steps: int = 0
