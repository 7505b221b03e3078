"""A small model in both frameworks, for tests that need many runs but no real checkpoint."""

from functools import cache

import numpy as np
from parity import BASE, weights
from parity_reference import reference_logits
from xla_options import QUICK_COMPILE

from griffin_eval.engine.generation import generate
from griffin_eval.engine.limits import Limits
from griffin_eval.engine.scoring import Scored, score


@cache
def small_runner(framework: str, config=BASE):
    if framework == "torch":
        from parity_twins import TorchTwin

        from griffin_eval.runners.torch_runner import TorchRunner

        return TorchRunner(TorchTwin(config, weights(config)).model)
    from parity_twins import JaxTwin

    from griffin_eval.runners.jax_runner import JaxRunner

    return JaxRunner(JaxTwin(config, weights(config)).model, QUICK_COMPILE)


@cache
def reference_scores(tokens: tuple[int, ...], config=BASE) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probabilities [T - 1] and greedy flags [T - 1] of all tokens but the first,
    from the equations in float64."""
    logits = reference_logits(config, weights(config), np.array(tokens))[:-1]
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    target = np.array(tokens[1:], int)
    return logprobs[np.arange(len(target)), target], logits.argmax(1) == target


def scores_and_stats(runner, sequences, limits=None, **arguments):
    """Return the scores of the sequences in their order, and the engine's statistics."""
    results = [None] * len(sequences)
    arguments = {"softmax_dtype": "float32"} | arguments
    stats = score(
        runner,
        sequences,
        limits=limits or Limits(512, 8),
        on_result=lambda i, result: results.__setitem__(i, result),
        **arguments,
    )
    return results, stats


def scores(runner, sequences, limits=None, **arguments) -> list[Scored]:
    return scores_and_stats(runner, sequences, limits, **arguments)[0]


def continuations_and_stats(runner, prompts, limits=None, **arguments):
    """Return the tokens that continue each prompt in their order, and the engine's statistics."""
    results = [None] * len(prompts)
    arguments = {"eos_ids": frozenset()} | arguments
    stats = generate(
        runner,
        prompts,
        limits=limits or Limits(512, 8),
        on_result=lambda i, ids: results.__setitem__(i, ids),
        **arguments,
    )
    return results, stats


def continuations(runner, prompts, limits=None, **arguments) -> list[list[int]]:
    return continuations_and_stats(runner, prompts, limits, **arguments)[0]


def states(runner, count, capacity=64) -> int:
    """Return the size in bytes of ``count`` states."""
    return count * runner.state_bytes(runner.padded_tokens(capacity))


def random_ids(length: int, seed: int, vocab: int = BASE.vocab_size) -> list[int]:
    return np.random.default_rng([length, seed]).integers(vocab, size=length).tolist()


class Around:
    """A wrapper of a runner, whose subclasses replace some methods."""

    def __init__(self, runner):
        self._runner = runner

    def __getattr__(self, name):
        return getattr(self._runner, name)


class Damaged(Around):
    """A fake runner in which one token, and all tokens after it in the same step, give NaN."""

    def __init__(self, runner, token):
        super().__init__(runner)
        self._token = token

    def read(self, pool, tokens, *arguments):
        hidden, pool = self._runner.read(pool, tokens, *arguments)
        hidden[np.cumsum(tokens == self._token) > 0] = np.nan
        return hidden, pool
