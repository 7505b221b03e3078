"""A pool of states with a memory budget, and the steps that read from it and write to it."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.errors import is_out_of_memory
from griffin_eval.runners.protocol import Runner


class Part(NamedTuple):
    """Tokens of one edge that a step reads."""

    edge: Any  # the caller's object
    tokens: np.ndarray  # int32 [N]
    source: int  # slot of the state before the tokens; -1 at the start of a document
    target: int  # slot for the state after the tokens; -1 to discard it
    ablation: int = 0  # `griffin_eval.engine.tree.Ablation` before the tokens


class Pool:
    """Slots that are free, being written, or hold the state at the end of an edge.

    If no slot is free, the pool grows; at its maximum size it evicts the least recently used state.

    Args:
        max_slots: Maximum number of slots.
        capacity: Maximum number of tokens of a document, padded.
        on_evicted: Function of the edge whose state is evicted.
    """

    def __init__(
        self,
        runner: Runner,
        slots: int,
        max_slots: int,
        capacity: int,
        on_evicted: Callable[[Any], object],
    ):
        self._runner, self._capacity, self._on_evicted = runner, capacity, on_evicted
        self._slots, self._max_slots = slots, max_slots
        self._free = list(range(slots))[::-1]
        self._evictable = OrderedDict[Any, int]()  # least recently used first
        self._pinned: dict[Any, int] = {}
        self.states: Any = runner.open_pool(slots, capacity)

    @property
    def taken(self) -> int:
        """Number of slots that are not free."""
        return self._slots - len(self._free)

    def __contains__(self, edge: Any) -> bool:
        return edge in self._evictable or edge in self._pinned

    def slot_of(self, edge: Any) -> int:
        """Return the slot of the state at the end of an edge; -1 if the pool does not hold it."""
        return self._evictable.get(edge, self._pinned.get(edge, -1))

    def take(self, spared: Callable[[], Collection[Any]] = tuple) -> int | None:
        """Return a slot to write; None if all slots are being written or hold states of the edges
        that ``spared``, which is called only if necessary, returns."""
        if self._free or self._grow():
            return self._free.pop()
        kept = spared()
        edge = next((edge for edge in self._evictable if edge not in kept), None)
        if edge is None:
            return None
        self._on_evicted(edge)
        return self._evictable.pop(edge)

    def hold(self, edge: Any, slot: int, *, pinned: bool = False) -> None:
        """Keep the state in a taken slot as the one at the end of an edge. Pinned states stay."""
        (self._pinned if pinned else self._evictable)[edge] = slot

    def used(self, edge: Any) -> None:
        """Mark the state at the end of an edge as recently used, if it is held."""
        if edge in self._evictable:
            self._evictable.move_to_end(edge)

    def take_over(self, edge: Any) -> int:
        """Remove a held state from the pool and return its slot to be overwritten."""
        return self._evictable.pop(edge)

    def free(self, slot: int) -> None:
        """Free a taken slot; does nothing for -1."""
        if slot >= 0:
            self._free.append(slot)

    def drop(self, edge: Any) -> None:
        """Free the state at the end of an edge, if it is held and not pinned."""
        self.free(self._evictable.pop(edge, -1))

    def _grow(self) -> bool:
        """Add slots; return whether budget and memory allowed it."""
        if self._slots == self._max_slots:
            return False
        try:
            self.states = self._runner.grow_pool(self.states, self._max_slots, self._capacity)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._max_slots = self._slots
            return False
        self._free = list(range(self._slots, self._max_slots))[::-1]
        self._slots = self._max_slots
        return True

    def read(self, parts: Sequence[Part], filler: int = 0) -> tuple[Any, np.ndarray]:
        """Read parts of distinct edges, and ``filler`` padding tokens, in one step.

        A part may write to the slot that an earlier part reads, but not to that of a later part.
        Returns hidden vectors, and int [P], the index of each part's first one.
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
        """Return the state in a slot after ``read`` tokens as the tensors of a `SavedState`."""
        return self._runner.state_tensors(self.states, slot, read)

    def write(self, slot: int, tensors: dict[str, np.ndarray], read: int) -> None:
        """Write a state into a slot. See `Runner.write_state`."""
        self.states = self._runner.write_state(self.states, slot, tensors, read, self._capacity)
