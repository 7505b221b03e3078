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
KINDS = {
    "RG-LRU": ("h",),
    "conv": ("conv",),
    "attention": ("k", "v"),
}  # leaves of the state by kind
RECURRENT = ("RG-LRU", "conv")


class Component(NamedTuple):
    """A part of the state that is patched.

    Attributes:
        label: Name in tables and figures.
        layers: Indices of layers, from 0.
        kinds: Keys of `KINDS`; layers without them are not patched.
    """

    label: str
    layers: tuple[int, ...]
    kinds: tuple[str, ...]

    def patch(self, to: dict[str, np.ndarray], of: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the tensors ``to`` of a `griffin_eval.states.saved_state.SavedState`, with those
        of this component taken from ``of``."""
        leaves = [leaf for kind in self.kinds for leaf in KINDS[kind]]
        return {name: (of if self._holds(name, leaves) else to)[name] for name in to}

    def _holds(self, name: str, leaves: list[str]) -> bool:
        _, layer, leaf = name.split(".")
        return leaf in leaves and int(layer) in self.layers


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
        """Return the share of D with its interval over the answered pairs, or None without any.

        ``nats`` is float64 [P], NaN for pairs without a value.
        """
        used = np.flatnonzero(self.answered & ~np.isnan(nats))
        if not len(used):
            return None
        return ratio(nats[used].tolist(), self.between[used].tolist(), used.tolist())


def components(config: GriffinConfig, *, groups: bool = False) -> list[Component]:
    """Return the parts of a model's state, from the bottom: a component for each layer and kind,
    then all recurrent states, and all keys and values of attention.

    ``groups`` returns the lower and upper half of the depth instead of layers.
    """
    depth, blocks = config.num_layers, config.block_types

    def of(kinds: tuple[str, ...]) -> list[int]:
        return [i for i, block in enumerate(blocks) if (block == "recurrent") == ("conv" in kinds)]

    named = {"recurrent": RECURRENT, "attention": ("attention",)}
    together = [
        Component(f"all {name}", tuple(layers), kinds)
        for name, kinds in named.items()
        if (layers := of(kinds))
    ]
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
        for kind in (RECURRENT if block == "recurrent" else ("attention",))
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
    """Patch the states of pairs with components at distances of `Pair.cut`."""
    shape = len(pairs), len(parts), len(distances)
    found = Effects(
        *(np.empty(len(pairs)) for _ in range(2)), *(np.full(shape, np.nan) for _ in range(2))
    )
    capacity = runner.padded_tokens(
        max(len(pair.original) + len(pair.original_answer) for pair in pairs)
    )
    rows = 2 * (len(parts) + 1)
    fit = runner.free_memory() // 4 // max(runner.state_bytes(capacity), 1)
    reader = _Reader(runner, capacity, max(min(rows, fit), 2))
    for index, pair in enumerate(pairs):
        for place, original, changed in reader.states(pair, distances):
            cut = pair.cut(distances[place])
            assert cut is not None
            patched = [original, changed]
            for part in parts:
                patched += [part.patch(original, changed), part.patch(changed, original)]
            preferences = reader.preferences(pair, cut, patched)
            check_finite(runner, preferences)
            found.original[index], found.changed[index] = preferences[:2]
            found.sufficient[index, :, place] = preferences[2::2] - preferences[0]
            found.necessary[index, :, place] = preferences[1] - preferences[3::2]
        progress()
    return found


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
        self._runner = runner
        self._capacity = capacity
        self._rows = rows
        self._pool = runner.open_pool(rows, capacity)
        self._softmax = softmax_dtype(runner)

    def states(
        self, pair: Pair, distances: Sequence[int | None]
    ) -> Iterator[tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]]:
        """Yield the index of every distance of the pair, and both documents' states at its cut."""
        before: list[dict[str, np.ndarray]] | None = None
        done = 0
        both = np.stack([pair.original, pair.changed])
        for place, distance in enumerate(distances):
            cut = pair.cut(distance)
            if cut is None:
                continue
            if cut > done or before is None:
                if before is not None:
                    self._write(before, done)
                self._read(both[:, done:cut], started=before is not None)
                before, done = [self._state(row, cut) for row in range(2)], cut
            original, changed = before
            yield place, original, changed

    def preferences(
        self, pair: Pair, cut: int, states: Sequence[dict[str, np.ndarray]]
    ) -> np.ndarray:
        """Return L, float64 [S], after each state has read on to the question."""
        found = []
        for first in range(0, len(states), self._rows):
            some = states[first : first + self._rows]
            self._write(some, cut)
            rest = np.tile(pair.original[cut:], (len(some), 1))
            hidden, width = self._read(rest, started=True)
            found.append(self._preferences(hidden, width, len(some), pair))
        return np.concatenate(found)

    def _preferences(self, hidden: Any, width: int, rows: int, pair: Pair) -> np.ndarray:
        """Return L of each row, from the hidden vectors of its last ``width`` tokens."""
        answers = np.stack([pair.original_answer, pair.changed_answer])  # [2, M]
        last = np.arange(rows) * width + width - 1
        firsts, of_row = np.tile(answers[:, 0], rows), np.repeat(np.arange(rows), 2)
        logprobs = self._score(hidden, last, firsts, of_row).reshape(rows, 2)
        if answers.shape[1] > 1:
            # Both answers continue the row of their question, which is not changed.
            read, several = answers[:, :-1], 2 * rows
            tokens = np.tile(read, (rows, 1))
            hidden, self._pool = self._runner.read(
                self._pool,
                tokens.ravel(),
                np.full(several, read.shape[1]),
                of_row,
                np.full(several, -1),
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

        ``started`` says whether the rows hold states to continue. Return the hidden vectors of the
        last step, and its number of tokens per row.
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

    def _state(self, row: int, read: int) -> dict[str, np.ndarray]:
        return self._runner.state_tensors(self._pool, row, read)

    def _write(self, states: Sequence[dict[str, np.ndarray]], read: int) -> None:
        for row, tensors in enumerate(states):
            self._pool = self._runner.write_state(self._pool, row, tensors, read, self._capacity)
