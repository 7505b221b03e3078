"""Facts that are not written and keys that are not seen.

Documents are read with something withheld from single layers, to complement the patched states of
`experiments.causal_map.patching`:

- **A write withheld**: for the fact's tokens a layer's RG-LRU keeps its state (a = 1, no input),
  its convolution shows later tokens no input, and its attention shows them no key.
- **Keys hidden by age**: no query of a layer sees the keys of tokens at some distances before it.

With L and D as there, the lost share is (D - D of the two documents read so) / D. 0: unchanged. 1:
the documents cannot be told apart, which is exact if every layer withholds everything. Tokens of
the fact itself are read as usual, except that an RG-LRU keeps its state.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.causal_map.pairs import Pair
from experiments.causal_map.patching import ATTENTION, KINDS, Component, check_finite, softmax_dtype
from experiments.causal_map.withheld_torch import Reading, Withheld, reader
from griffin_eval.runners.protocol import Runner

AGES = tuple(4**power for power in range(10))  # first ages of bins, in tokens
STEPS = 8  # runner steps whose tokens are read at once


class _Loss(NamedTuple):
    """A component whose write is withheld or, with ages, whose keys of these ages are hidden."""

    part: Component
    ages: tuple[int, int] | None


def bins(pairs: Sequence[Pair], visible_keys: int | None) -> list[tuple[int, int]]:
    """Return half-open ranges of ages, up to the window of visible keys or the longest document."""
    longest = max(len(pair.original) + len(pair.original_answer) - 1 for pair in pairs)
    most = longest if visible_keys is None else min(longest, visible_keys)
    firsts = [age for age in AGES if age < most]
    return list(zip(firsts, [*firsts[1:], most], strict=True))


def lost_writes(
    runner: Runner, pairs: Sequence[Pair], parts: Sequence[Component], between: np.ndarray
) -> np.ndarray:
    """Return the nats of D, float64 [P, C], lost where a component does not write the fact.

    The runner is in PyTorch, on one device; ``between`` is D, float64 [P].
    """
    return _lost(runner, pairs, [_Loss(part, None) for part in parts], between)


def lost_keys(
    runner: Runner,
    pairs: Sequence[Pair],
    parts: Sequence[Component],
    ages: Sequence[tuple[int, int]],
    between: np.ndarray,
) -> np.ndarray:
    """Return the nats of D, float64 [P, C, K], lost where attention's keys of `bins` are hidden."""
    losses = [_Loss(part, range_) for part in parts for range_ in ages]
    return _lost(runner, pairs, losses, between).reshape(len(pairs), len(parts), len(ages))


def _lost(
    runner: Runner, pairs: Sequence[Pair], losses: Sequence[_Loss], between: np.ndarray
) -> np.ndarray:
    lost = np.empty((len(pairs), len(losses)))
    read = reader(runner)
    for index, pair in enumerate(pairs if losses else ()):
        preferences = _preferences(runner, read, pair, losses)
        check_finite(runner, preferences)
        lost[index] = between[index] - (preferences[:, 1] - preferences[:, 0])
    return lost


def _preferences(runner: Runner, read: Reading, pair: Pair, losses: Sequence[_Loss]) -> np.ndarray:
    """Return L, float64 [losses, 2], of the original and of the changed document."""
    answers = np.stack([pair.original_answer, pair.changed_answer])
    documents = np.stack([pair.original, pair.changed])
    asked = answers.shape[1]
    # A row for each loss, document and answer.
    rows = np.concatenate(
        [documents.repeat(2, 0), np.tile(answers[:, :-1], (2, 1))], 1
    )  # [4, N + M - 1]
    length = rows.shape[1]
    tokens = np.zeros((4, runner.padded_tokens(length)), np.int32)
    tokens[:, :length] = rows
    at_once = max(1, STEPS * runner.step_tokens // tokens.size)
    last, targets = np.arange(length - asked, length), np.tile(answers, (2, 1))
    found = []
    for begin in range(0, len(losses), at_once):
        some = list(losses[begin : begin + at_once])
        some += [_Loss(Component("none", (), ()), None)] * (at_once - len(some))  # keep one shape
        hidden = read(
            np.tile(tokens, (at_once, 1)),
            np.full(4 * at_once, length, np.int32),
            _withheld(some, pair, runner.config.num_layers),
        )
        positions = (np.arange(4 * at_once)[:, None] * tokens.shape[1] + last).ravel()
        logprobs, _ = runner.score(
            hidden,
            positions,
            np.tile(targets, (at_once, 1)).ravel(),
            np.arange(len(positions)),
            softmax_dtype(runner),
        )
        of_answers = logprobs.reshape(at_once, 2, 2, asked).sum(-1)
        found.append(of_answers[..., 1] - of_answers[..., 0])
    return np.concatenate(found)[: len(losses)]


def _withheld(losses: Sequence[_Loss], pair: Pair, layers: int) -> Withheld:
    differing = np.flatnonzero(pair.original != pair.changed)
    first = int(differing[0]) if len(differing) else pair.fact_end - 1
    everything = len(pair.original) + len(pair.original_answer)
    masks = {kind: np.zeros((len(losses), layers), bool) for kind in KINDS}
    for row, (part, ages) in enumerate(losses):
        for kind in part.kinds if ages is None else ATTENTION:
            masks[kind][row, list(part.layers)] = True
    numbers = [
        (first, pair.fact_end, pair.fact_end, 1, everything)
        if ages is None
        else (0, everything, 0, *ages)
        for _, ages in losses
    ]
    columns = np.array(numbers, np.int32).repeat(4, 0)
    repeated = [mask.repeat(4, 0) for mask in masks.values()]
    fields: list[np.ndarray] = [*repeated, *columns[:, :3].T, columns[:, 3:]]
    return Withheld(*fields)
