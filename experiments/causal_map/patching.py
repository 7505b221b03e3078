"""State patching, which shows where a model keeps a fact.

Between two tokens the future depends on the past only through the state. Two documents differ in
one fact; both are read up to a cut, and some components of one state replace those of the other,
which then continues to a question. With L = log p(changed answer) - log p(original answer) in nats,

    sufficient = (L of the original with the changed document's components - L of the original) / D
    necessary  = (L of the changed - L of the changed with the original's components) / D

where D = L of the changed document - L of the original. 1: these components hold all of the fact
that the answer needs; 0: none of it. Both are exact, since a state is a value: with every component
patched the original document answers like the changed one, and with none like itself.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.causal_map.pairs import Pair
from griffin_eval.config import GriffinConfig
from griffin_eval.errors import BadInput
from griffin_eval.intervals import Estimate, ratio
from griffin_eval.runners.protocol import Runner

DISTANCES = (0, 1, *(4**power for power in range(1, 10)))  # tokens between fact and cut
KINDS = {"RG-LRU": ("h",), "conv": ("conv",), "attention": ("k", "v")}  # leaves of the state
RECURRENT, ATTENTION = ("RG-LRU", "conv"), ("attention",)
State = dict[str, np.ndarray]  # tensors of a `griffin_eval.states.saved_state.SavedState`


class Component(NamedTuple):
    """A part of the state that is patched: keys of `KINDS` in layers, counted from 0.

    A layer that lacks a kind is left as it is.
    """

    label: str
    layers: tuple[int, ...]
    kinds: tuple[str, ...]

    def patch(self, to: State, of: State) -> State:
        """Return a state with this component from another one."""
        leaves = [leaf for kind in self.kinds for leaf in KINDS[kind]]
        moved = {f"layers.{layer}.{leaf}" for layer in self.layers for leaf in leaves}
        return {name: (of if name in moved else to)[name] for name in to}


class Effects(NamedTuple):
    """Effects of patching C components of P pairs at K distances.

    Attributes:
        original, changed: float64 [P], L of the unpatched documents, in nats.
        sufficient, necessary: float64 [P, C, K], nats by which patching moved L towards the other
            document; NaN if a pair has no such cut.
    """

    original: np.ndarray
    changed: np.ndarray
    sufficient: np.ndarray
    necessary: np.ndarray

    @property
    def between(self) -> np.ndarray:
        """D in nats, float64 [P]."""
        return self.changed - self.original

    @property
    def answered(self) -> np.ndarray:
        """Whether the right answer is the likelier of the two in both documents, bool [P]."""
        return (self.original < 0) & (self.changed > 0)

    def apart(self, columns: Sequence[int], count: int) -> "Effects":
        """Spread the effects at a single distance over ``count`` columns, by each pair's column."""

        def spread(values: np.ndarray) -> np.ndarray:
            pairs, parts, _ = values.shape
            spread = np.full((pairs, parts, count), np.nan)
            spread[np.arange(pairs), :, columns] = values[:, :, 0]
            return spread

        return self._replace(sufficient=spread(self.sufficient), necessary=spread(self.necessary))

    def share(self, nats: np.ndarray) -> Estimate | None:
        """Return the share of D that float64 [P] nats are, NaN where a pair has none.

        The interval is over the answered pairs; the result is None without any.
        """
        used = np.flatnonzero(self.answered & ~np.isnan(nats))
        if not len(used):
            return None
        return ratio(nats[used].tolist(), self.between[used].tolist(), used.tolist())


def components(config: GriffinConfig, *, groups: bool = False) -> list[Component]:
    """Return the parts of a model's state, from the bottom: a component for each layer and kind, or
    for the lower and the upper half of the depth, then all recurrent states and all attention."""
    depth, blocks = config.num_layers, config.block_types
    together = []
    for name, kinds in (("recurrent", RECURRENT), ("attention", ATTENTION)):
        layers = [
            i for i, block in enumerate(blocks) if (block == "recurrent") == ("conv" in kinds)
        ]
        if layers:
            together.append(Component(f"all {name}", tuple(layers), kinds))
    if groups:
        halves = {"lower": range(depth // 2), "upper": range(depth // 2, depth)}
        return [
            Component(f"{half} {each.label.removeprefix('all ')}", layers, each.kinds)
            for half, those in halves.items()
            for each in together
            if (layers := tuple(layer for layer in each.layers if layer in those))
        ] + together
    single = [
        Component(f"{layer} {kind}", (layer,), (kind,))
        for layer, block in enumerate(blocks)
        for kind in (RECURRENT if block == "recurrent" else ATTENTION)
    ]
    return single + together


def permuted(pairs: Sequence[Pair]) -> list[Pair]:
    """Give each pair the answers of the next one, which patching cannot affect."""
    return [
        pair._replace(original_answer=other.original_answer, changed_answer=other.changed_answer)
        for pair, other in zip(pairs, [*pairs[1:], pairs[0]], strict=True)
    ]


def distances_of(pairs: Sequence[Pair]) -> list[int | None]:
    """Return the `DISTANCES` of all pairs, and None for the cut before the last token."""
    longest = max(len(pair.original) - 1 - pair.fact_end for pair in pairs)
    return [*(distance for distance in DISTANCES if distance < longest), None]


def measure(
    runner: Runner,
    pairs: Sequence[Pair],
    parts: Sequence[Component],
    distances: Sequence[int | None],
    progress: Callable[[], Any] = lambda: None,
) -> Effects:
    """Patch components of the states of pairs at distances of `Pair.cut`.

    ``progress`` is called after each pair.

    Raises:
        BadInput: The log-probabilities are not finite.
    """
    shape = len(pairs), len(parts), len(distances)
    effects = Effects(
        *(np.empty(len(pairs)) for _ in range(2)), *(np.full(shape, np.nan) for _ in range(2))
    )
    longest = max(len(pair.original) + len(pair.original_answer) for pair in pairs)
    reader = _Reader(runner, runner.padded_tokens(longest), 2 * (len(parts) + 1))
    for index, pair in enumerate(pairs):
        for place, cut, original, changed in reader.states(pair, distances):
            patched = [original, changed]
            for part in parts:
                patched += [part.patch(original, changed), part.patch(changed, original)]
            preferences = reader.preferences(pair, cut, patched)
            check_finite(runner, preferences)
            effects.original[index], effects.changed[index] = preferences[:2]
            effects.sufficient[index, :, place] = preferences[2::2] - preferences[0]
            effects.necessary[index, :, place] = preferences[1] - preferences[3::2]
        progress()
    return effects


def check_finite(runner: Runner, values: np.ndarray) -> None:
    """Raise BadInput if a log-probability is NaN or infinite."""
    if not np.isfinite(values).all():
        raise BadInput(
            "the answers have log-probabilities that are not finite: the weights may be damaged, "
            f"or {runner.dtype} too narrow: convert the checkpoint with --dtype float32"
        )


def softmax_dtype(runner: Runner) -> str:
    """Return the dtype in which a runner's logits are normalised."""
    return "float64" if runner.dtype == "float64" else "float32"


class _Reader:
    """Reader of documents into two rows of a pool, and of patched states into all rows."""

    def __init__(self, runner: Runner, capacity: int, rows: int):
        fit = runner.free_memory() // 4 // max(runner.state_bytes(capacity), 1)
        self._runner, self._capacity, self._rows = runner, capacity, max(min(rows, fit), 2)
        self._pool = runner.open_pool(self._rows, capacity)
        self._softmax = softmax_dtype(runner)

    def states(
        self, pair: Pair, distances: Sequence[int | None]
    ) -> Iterator[tuple[int, int, State, State]]:
        """Yield the index of every distance of the pair, its cut, and both documents' states."""
        before: list[State] = []
        done, both = 0, np.stack([pair.original, pair.changed])
        for place, distance in enumerate(distances):
            cut = pair.cut(distance)
            if cut is None:
                continue
            if cut > done or not before:
                self._write(before, done)
                self._read(both[:, done:cut], started=bool(before))
                before = [self._runner.state_tensors(self._pool, row, cut) for row in range(2)]
                done = cut
            yield place, cut, before[0], before[1]

    def preferences(self, pair: Pair, cut: int, states: Sequence[State]) -> np.ndarray:
        """Return L, float64 [S], after each state has read on to the question."""
        parts = []
        for first in range(0, len(states), self._rows):
            some = states[first : first + self._rows]
            self._write(some, cut)
            rest = np.tile(pair.original[cut:], (len(some), 1))
            hidden, width = self._read(rest, started=True)
            parts.append(self._preferences(hidden, width, len(some), pair))
        return np.concatenate(parts)

    def _preferences(self, hidden: Any, width: int, rows: int, pair: Pair) -> np.ndarray:
        """Return L of each row, from the hidden vectors of its last ``width`` tokens."""
        answers = np.stack([pair.original_answer, pair.changed_answer])  # [2, M]
        last = np.arange(rows) * width + width - 1
        firsts, of_row = np.tile(answers[:, 0], rows), np.repeat(np.arange(rows), 2)
        logprobs = self._score(hidden, last, firsts, of_row).reshape(rows, 2)
        if answers.shape[1] > 1:
            # Both answers go on from the row of their question, which neither changes.
            tokens, kept = np.tile(answers[:, :-1], (rows, 1)), np.full(2 * rows, -1)
            lengths = np.full(2 * rows, tokens.shape[1])
            hidden, self._pool = self._runner.read(
                self._pool, tokens.ravel(), lengths, of_row, kept
            )
            everywhere = np.arange(tokens.size)
            targets = np.tile(answers[:, 1:], (rows, 1)).ravel()
            rest = self._score(hidden, everywhere, targets, everywhere)
            logprobs = logprobs + rest.reshape(rows, 2, -1).sum(2)
        return logprobs[:, 1] - logprobs[:, 0]

    def _score(
        self, hidden: Any, positions: np.ndarray, targets: np.ndarray, position_of: np.ndarray
    ) -> np.ndarray:
        return self._runner.score(hidden, positions, targets, position_of, self._softmax)[0]

    def _read(self, tokens: np.ndarray, *, started: bool) -> tuple[Any, int]:
        """Read int [R, T] tokens into the first R rows of the pool, a step at a time.

        Returns:
            Hidden vectors of the last step, and its number of tokens a row.
        """
        rows, total = tokens.shape
        step = max(1, self._runner.step_tokens // rows)
        places, hidden, width = np.arange(rows), None, 0
        for begin in range(0, total, step):
            part = tokens[:, begin : begin + step]
            width = part.shape[1]
            sources = places if started else np.full(rows, -1)
            hidden, self._pool = self._runner.read(
                self._pool, part.ravel(), np.full(rows, width), sources, places
            )
            started = True
        return hidden, width

    def _write(self, states: Sequence[State], read: int) -> None:
        for row, tensors in enumerate(states):
            self._pool = self._runner.write_state(self._pool, row, tensors, read, self._capacity)
