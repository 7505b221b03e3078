"""Requests to a scheduler, and its answers."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from griffin_eval.engine.live.tree import LiveEdge
from griffin_eval.engine.sampling import GREEDY, Chooser, Sampling

MAX_TOP = 20  # maximum number of most likely tokens that a request can ask for


class PromptScores(NamedTuple):
    """Scores of the tokens of a prompt from `Request.score_from` on. Logarithms are in nats."""

    logprobs: np.ndarray  # float64 [N]
    top_tokens: np.ndarray  # int64 [N, K], the most likely tokens in the place of each token
    top_logprobs: np.ndarray  # float64 [N, K]


class NewToken(NamedTuple):
    """A generated token, with scores in nats if they were requested."""

    id: int
    ends: bool  # whether it is EOS
    logprob: float | None
    top_tokens: np.ndarray  # [K], the most likely tokens in its place
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
        """Receive the end: reason ``stop``, ``length``, ``cancelled``, or ``error`` with its
        cause."""
        ...


@dataclass(eq=False)
class Request:
    """A request to a model."""

    tokens: np.ndarray  # int32 [N] prompt ids, N >= 1
    listener: Listener
    score_from: int | None = None  # index >= 1 of the first prompt token to score
    top: int | None = None  # number of most likely tokens to return; None for no logprobs
    max_new_tokens: int = 0
    sampling: Sampling = GREEDY
    seed: tuple[int, int] = (0, 0)
    start: str | None = None  # name of the saved state that the prompt continues
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
