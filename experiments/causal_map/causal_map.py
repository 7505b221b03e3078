"""The causal memory map: where a model keeps a fact, by state patching.

Between two tokens the future depends on the past through the state alone. Two documents differ in
one fact; both are read up to a cut, and some components of one's state are put into the other's,
which then reads on to a question. With L = log p(changed answer) - log p(original answer) in nats,

    sufficient = (L of the original with the changed document's components - L of the original) / D
    necessary  = (L of the changed - L of the changed with the original's components) / D

where D = L of the changed document - L of the original. 1: all of the fact that the answer needs is
in these components; 0: none of it. Both are exact, since a state is a value: with every component
patched the original document answers as the changed one does, and with none as itself.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError, BadInput
from griffin_eval.intervals import Estimate, ratio
from griffin_eval.runners.protocol import Runner

DISTANCES = (0, 1, *(4**power for power in range(1, 10)))  # tokens between fact and cut
KINDS = {"RG-LRU": ("h",), "conv": ("conv",), "attention": ("k", "v")}  # leaves of a state
RECURRENT = ("RG-LRU", "conv")


class Pair(NamedTuple):
    """Two documents that differ in one fact, and a question about it.

    Attributes:
        original, changed: int32 [N], the documents with their question, of equal length.
        fact_end: number of tokens up to the last that differs; less than N.
        original_answer, changed_answer: int32 [M] each, the answers, of equal length.
        end: tokens before the last cut; None for all but the last.
    """

    original: np.ndarray
    changed: np.ndarray
    fact_end: int
    original_answer: np.ndarray
    changed_answer: np.ndarray
    end: int | None = None

    def cut(self, distance: int | None) -> int | None:
        """Number of tokens before a cut; None if the question ends before it.

        Args:
            distance: tokens between the fact and the cut; None for the last cut, which is before
                the last token, or at ``end``.
        """
        last = len(self.original) - 1 if self.end is None else self.end
        cut = last if distance is None else self.fact_end + distance
        return cut if cut <= last else None


class Component(NamedTuple):
    """A part of the state that is patched.

    Attributes:
        label: its name in tables and figures.
        layers: indices of layers, from 0.
        kinds: keys of `KINDS`; those that a layer has not are left out.
    """

    label: str
    layers: tuple[int, ...]
    kinds: tuple[str, ...]

    def patch(self, to: dict[str, np.ndarray], of: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors of a state, with those of this component from another one.

        Args:
            to, of: tensors of a `griffin_eval.states.saved_state.SavedState`.
        """
        leaves = [leaf for kind in self.kinds for leaf in KINDS[kind]]
        return {name: (of if self._holds(name, leaves) else to)[name] for name in to}

    def _holds(self, name: str, leaves: list[str]) -> bool:
        _, layer, leaf = name.split(".")
        return leaf in leaves and int(layer) in self.layers


class Effects(NamedTuple):
    """What patching did to P pairs, at K distances and for C components.

    Attributes:
        original, changed: float64 [P], L of the documents as they are, in nats.
        sufficient, necessary: float64 [P, C, K], by how much patching moved L to the other
            document's, in nats; NaN where a pair has no such cut.
    """

    original: np.ndarray
    changed: np.ndarray
    sufficient: np.ndarray
    necessary: np.ndarray

    @property
    def between(self) -> np.ndarray:
        """float64 [P]: D in nats."""
        return self.changed - self.original

    @property
    def answered(self) -> np.ndarray:
        """bool [P]: in both documents the right answer is the likelier of the two."""
        return (self.original < 0) & (self.changed > 0)

    def apart(self, columns: Sequence[int], count: int) -> "Effects":
        """The effects at a single distance as those of several columns.

        Args:
            columns: the column of each pair.
            count: number of columns, which take the place of K.
        """

        def spread(values: np.ndarray) -> np.ndarray:
            pairs, parts, _ = values.shape
            spread = np.full((pairs, parts, count), np.nan)
            spread[np.arange(pairs), :, columns] = values[:, :, 0]
            return spread

        return self._replace(sufficient=spread(self.sufficient), necessary=spread(self.necessary))

    def share(self, effects: np.ndarray, component: int, distance: int) -> Estimate | None:
        """The share of D, with its interval over the pairs that were answered; None of no pair.

        Args:
            effects: ``sufficient`` or ``necessary``.
            component, distance: indices.
        """
        return self.share_of(effects[:, component, distance])

    def share_of(self, values: np.ndarray) -> Estimate | None:
        """The same of float64 [P] nats, one for each pair."""
        used = np.flatnonzero(self.answered & ~np.isnan(values))
        if not len(used):
            return None
        return ratio(values[used].tolist(), self.between[used].tolist(), used.tolist())


def components(config: GriffinConfig, *, groups: bool = False) -> list[Component]:
    """The parts of a model's state, from the bottom: a component for each layer and kind, and then
    all recurrent states, and all keys and values of attention.

    Args:
        config: the architecture.
        groups: whether to leave out the single layers, and to have the lower and the upper half of
            the depth instead.
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
    """The same documents, each with the answers of the next pair: patching cannot move them.

    Raises:
        ArgumentError: there is one pair only.
    """
    if len(pairs) < 2:
        raise ArgumentError("answers of other pairs need two pairs at least, found one")
    return [
        pair._replace(original_answer=other.original_answer, changed_answer=other.changed_answer)
        for pair, other in zip(pairs, [*pairs[1:], pairs[0]], strict=True)
    ]


def distances_of(pairs: Sequence[Pair]) -> list[int | None]:
    """Those of `DISTANCES` that some pair has, and then the cut before the last token."""
    longest = max(len(pair.original) - 1 - pair.fact_end for pair in pairs)
    return [*(distance for distance in DISTANCES if distance < longest), None]


def measure(
    runner: Runner,
    pairs: Sequence[Pair],
    parts: Sequence[Component],
    distances: Sequence[int | None],
    progress: Callable[[int], Any] = lambda pairs: None,
) -> Effects:
    """Patches the states of pairs.

    Args:
        runner: the model.
        pairs: documents and questions.
        parts: what to patch.
        distances: see `Pair.cut`.
        progress: called with the number of pairs that are done.

    Raises:
        BadInput: the log-probabilities are not finite.
    """
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
        progress(1)
    return found


def check_finite(runner: Runner, values: np.ndarray) -> None:
    """Refuses log-probabilities that are not.

    Raises:
        BadInput: some value is NaN or infinite.
    """
    if not np.isfinite(values).all():
        raise BadInput(
            "the answers have log-probabilities that are not finite: the weights may be "
            f"damaged, or {runner.dtype} too narrow: try --dtype float32"
        )


def softmax_dtype(runner: Runner) -> str:
    """The dtype in which a runner's logits are normalised."""
    return "float64" if runner.dtype == "float64" else "float32"


class _Reader:
    """Reads documents into the first two rows of a pool, and patched states into all of it."""

    def __init__(self, runner: Runner, capacity: int, rows: int):
        self._runner = runner
        self._capacity = capacity
        self._rows = rows
        self._pool = runner.open_pool(rows, capacity)
        self._softmax = softmax_dtype(runner)

    def states(
        self, pair: Pair, distances: Sequence[int | None]
    ) -> Iterator[tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]]:
        """The index of every distance that the pair has, and both documents' states at its cut."""
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
        """float64 [S]: L after each state has read on to the question."""
        found = []
        for first in range(0, len(states), self._rows):
            some = states[first : first + self._rows]
            self._write(some, cut)
            rest = np.tile(pair.original[cut:], (len(some), 1))
            hidden, width = self._read(rest, started=True)
            found.append(self._preferences(hidden, width, len(some), pair))
        return np.concatenate(found)

    def _preferences(self, hidden: Any, width: int, rows: int, pair: Pair) -> np.ndarray:
        """L of each row, from the hidden vectors of its last ``width`` tokens."""
        answers = np.stack([pair.original_answer, pair.changed_answer])  # [2, M]
        last = np.arange(rows) * width + width - 1
        firsts, of_row = np.tile(answers[:, 0], rows), np.repeat(np.arange(rows), 2)
        logprobs = self._score(hidden, last, firsts, of_row).reshape(rows, 2)
        if answers.shape[1] > 1:
            # Both answers go on from the row of their question, which neither changes.
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
        """Reads int [R, T] tokens into the first R rows of the pool, a step at a time.

        Args:
            tokens: one row for each document.
            started: whether the rows hold states to go on from.

        Returns:
            The hidden vectors of the last step, and its number of tokens a row.
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
