"""States that wait for those who go on from them, within a budget, and the steps that read."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.errors import is_out_of_memory
from griffin_eval.runners.protocol import Runner


class Part(NamedTuple):
    """What a step reads of one edge.

    Attributes:
        edge: the edge, as the caller knows it.
        tokens: int32 [N], the tokens that are read.
        source: slot of the state before them, -1 at the start of a document.
        target: slot that the state after them is written to, -1 if it is not needed.
        ablation: number of the `griffin_eval.engine.tree.Ablation` of the state before them.
    """

    edge: Any
    tokens: np.ndarray
    source: int
    target: int
    ablation: int = 0


class Pool:
    """Slots, each of which is free, is being written, or holds the state at the end of an edge.

    Where a slot is needed and none is free, the pool grows, or a state is evicted: the one that
    was not used for longest.

    Args:
        most: number of slots that the pool may grow to.
        capacity: most tokens of a document, padded.
        on_evicted: called with the edge whose state is evicted.

    Attributes:
        states: as the runner keeps them.
    """

    def __init__(
        self,
        runner: Runner,
        slots: int,
        most: int,
        capacity: int,
        on_evicted: Callable[[Any], object],
    ):
        self._runner, self._capacity, self._on_evicted = runner, capacity, on_evicted
        self._slots, self._most = slots, most
        self._free = list(range(slots))[::-1]
        self._held = OrderedDict[Any, int]()  # what was not used for longest comes first
        self._pinned: dict[Any, int] = {}
        self.states: Any = runner.open_pool(slots, capacity)

    @property
    def taken(self) -> int:
        """Number of slots that are not free."""
        return self._slots - len(self._free)

    def __contains__(self, edge: Any) -> bool:
        return edge in self._held or edge in self._pinned

    def slot_of(self, edge: Any) -> int:
        """Slot of the state at the end of an edge; -1 if it is not held."""
        return self._held.get(edge, self._pinned.get(edge, -1))

    def take(self, spared: Callable[[], Collection[Any]] = tuple) -> int | None:
        """A slot to write.

        Args:
            spared: gives edges whose states are not evicted; called only if one has to be.

        Returns:
            The slot; None if all are being written, or spared.
        """
        if self._free or self._grow():
            return self._free.pop()
        kept = spared()
        edge = next((edge for edge in self._held if edge not in kept), None)
        if edge is None:
            return None
        self._on_evicted(edge)
        return self._held.pop(edge)

    def hold(self, edge: Any, slot: int, *, pinned: bool = False) -> None:
        """Keeps the state in a slot, which was taken, as that at the end of an edge.

        Args:
            pinned: whether it is never evicted, nor dropped.
        """
        (self._pinned if pinned else self._held)[edge] = slot

    def used(self, edge: Any) -> None:
        """Notes that the state at the end of an edge, if it is held, was used now."""
        if edge in self._held:
            self._held.move_to_end(edge)

    def take_over(self, edge: Any) -> int:
        """The slot of a held state, which the caller may write from now on."""
        return self._held.pop(edge)

    def free(self, slot: int) -> None:
        """Gives back a slot that was taken; -1 is none."""
        if slot >= 0:
            self._free.append(slot)

    def drop(self, edge: Any) -> None:
        """Gives up the state at the end of an edge, if it is held and not pinned."""
        self.free(self._held.pop(edge, -1))

    def _grow(self) -> bool:
        """Adds slots; whether the budget and the memory allowed it."""
        if self._slots == self._most:
            return False
        try:
            self.states = self._runner.grow_pool(self.states, self._most, self._capacity)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._most = self._slots
            return False
        self._free = list(range(self._slots, self._most))[::-1]
        self._slots = self._most
        return True

    def read(self, parts: Sequence[Part], filler: int = 0) -> tuple[Any, np.ndarray]:
        """Reads parts of edges in one step.

        A slot may be written that parts before it take, but none behind it.

        Args:
            parts: of different edges.
            filler: tokens that are read behind them for nothing.

        Returns:
            Hidden vectors, and int [P], the index of each part's first one.
        """
        extra = [Part(None, np.zeros(filler, np.int32), -1, -1)] if filler else []
        every = [*parts, *extra]
        counts = np.array([len(part.tokens) for part in every])
        ablations = np.array([part.ablation for part in every])
        hidden, self.states = self._runner.read(
            self.states,
            np.concatenate([part.tokens for part in every]),
            counts,
            np.array([part.source for part in every]),
            np.array([part.target for part in every]),
            ablations if ablations.any() else None,
        )
        return hidden, (np.cumsum(counts) - counts)[: len(parts)]

    def tensors(self, slot: int, read: int) -> dict[str, np.ndarray]:
        """The state in a slot after so many tokens, as `SavedState` holds it."""
        return self._runner.state_tensors(self.states, slot, read)

    def write(self, slot: int, tensors: dict[str, np.ndarray], read: int) -> None:
        """Writes a state into a slot. See `Runner.write_state`."""
        self.states = self._runner.write_state(self.states, slot, tensors, read, self._capacity)
