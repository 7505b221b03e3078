"""A small model in both frameworks, for tests that need many runs but no real checkpoint."""

import weakref
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


class OneAtATime(Around):
    """A runner whose second call of a method runs out of memory, and which has memory for one pool
    and for some number of batches of rows."""

    def __init__(self, runner, failing, batches=1):
        super().__init__(runner)
        self._failing, self._count, self._taken = failing, 0, []
        self._limits = {"pool": 1, "batch": batches}

    def __getattr__(self, name):
        def call(*arguments):
            self._count += name == self._failing
            if name == self._failing and self._count == 2:
                raise MemoryError
            return getattr(self._runner, name)(*arguments)

        return call if name in ("read", "decode_step") else getattr(self._runner, name)

    def _take(self, kind, states):
        self._taken.append((kind, weakref.ref(states.rows)))
        alive = sum(one == kind and states() is not None for one, states in self._taken)
        assert alive <= self._limits[kind], f"an earlier {kind} is still in memory"
        return states

    def open_pool(self, *arguments):
        return self._take("pool", self._runner.open_pool(*arguments))

    def start_decoding(self, *arguments):
        return self._take("batch", self._runner.start_decoding(*arguments))


class Damaged(Around):
    """A fake runner in which one token, and all tokens after it in the same step, give NaN."""

    def __init__(self, runner, token):
        super().__init__(runner)
        self._token = token

    def read(self, pool, tokens, *arguments):
        hidden, pool = self._runner.read(pool, tokens, *arguments)
        hidden[np.cumsum(tokens == self._token) > 0] = np.nan
        return hidden, pool
