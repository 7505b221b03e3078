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
from griffin_eval.errors import BadInput
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
    """

    original: np.ndarray
    changed: np.ndarray
    fact_end: int
    original_answer: np.ndarray
    changed_answer: np.ndarray

    def cut(self, distance: int | None) -> int | None:
        """Number of tokens before a cut; None if the question ends before it.

        Args:
            distance: tokens between the fact and the cut; None for the cut before the last token.
        """
        last = len(self.original) - 1
        cut = last if distance is None else self.fact_end + distance
        return cut if cut <= last else None


class Component(NamedTuple):
    """A part of the state that is patched.

    Attributes:
        layer: index of the layer, from 0; None for all layers that have such a state.
        kinds: keys of `KINDS`.
    """

    layer: int | None
    kinds: tuple[str, ...]

    @property
    def label(self) -> str:
        """Its name in tables and figures."""
        kind = self.kinds[0] if len(self.kinds) == 1 else "recurrent"
        return f"all {kind}" if self.layer is None else f"{self.layer} {kind}"

    def patch(self, to: dict[str, np.ndarray], of: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The tensors of a state, with those of this component from another one.

        Args:
            to, of: tensors of a `griffin_eval.states.saved_state.SavedState`.
        """
        leaves = [leaf for kind in self.kinds for leaf in KINDS[kind]]
        return {name: (of if self._holds(name, leaves) else to)[name] for name in to}

    def _holds(self, name: str, leaves: list[str]) -> bool:
        _, layer, leaf = name.split(".")
        return leaf in leaves and self.layer in (None, int(layer))


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
    def answered(self) -> np.ndarray:
        """bool [P]: in both documents the right answer is the likelier of the two."""
        return (self.original < 0) & (self.changed > 0)

    def share(self, effects: np.ndarray, component: int, distance: int) -> Estimate | None:
        """The share of D, with its interval over the pairs that were answered; None of no pair.

        Args:
            effects: ``sufficient`` or ``necessary``.
            component, distance: indices.
        """
        values = effects[:, component, distance]
        used = np.flatnonzero(self.answered & ~np.isnan(values))
        if not len(used):
            return None
        between = self.changed - self.original
        return ratio(values[used].tolist(), between[used].tolist(), used.tolist())


def components(config: GriffinConfig, *, groups: bool = False) -> list[Component]:
    """The parts of a model's state, from the bottom, and then groups of them.

    Args:
        config: the architecture.
        groups: whether to leave out the single layers.
    """
    recurrent = "recurrent" in config.block_types
    single = [
        Component(layer, (kind,))
        for layer, block in enumerate(config.block_types)
        for kind in (RECURRENT if block == "recurrent" else ("attention",))
    ]
    together = [Component(None, RECURRENT)] if recurrent else []
    if set(config.block_types) != {"recurrent"}:
        together.append(Component(None, ("attention",)))
    return together if groups else single + together


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
            if not np.isfinite(preferences).all():
                raise BadInput(
                    "the answers have log-probabilities that are not finite: the weights may be "
                    f"damaged, or {runner.dtype} too narrow: try --dtype float32"
                )
            found.original[index], found.changed[index] = preferences[:2]
            found.sufficient[index, :, place] = preferences[2::2] - preferences[0]
            found.necessary[index, :, place] = preferences[1] - preferences[3::2]
        progress(1)
    return found


class _Reader:
    """Reads documents into the first two rows of a pool, and patched states into all of it."""

    def __init__(self, runner: Runner, capacity: int, rows: int):
        self._runner = runner
        self._capacity = capacity
        self._rows = rows
        self._pool = runner.open_pool(rows, capacity)
        self._softmax = "float64" if runner.dtype == "float64" else "float32"

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
