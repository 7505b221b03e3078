"""Reads a radix tree of tokens: every edge once, states forked where sequences part."""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from griffin_eval.engine.limits import Limits, is_out_of_memory
from griffin_eval.engine.stats import Stats
from griffin_eval.engine.tree import Edge, Tree, forgotten, unmarked
from griffin_eval.runners import Runner

logger = logging.getLogger(__name__)


class Row:
    """An edge that is being read.

    Attributes:
        edge: what is read.
        at: up to where in its path.
        scored: up to where it was read and scored before its state was lost.
        begun: whether it has taken its parent's state.
        slot: of its own state, -1 while it has none.
    """

    __slots__ = ("at", "begun", "edge", "scored", "slot")

    def __init__(self, edge: Edge, scored: int):
        self.edge, self.at, self.scored = edge, edge.start, scored
        self.begun, self.slot = False, -1

    @property
    def left(self) -> int:
        return self.edge.end - self.at

    def next(self, most: int) -> tuple[int, int]:
        """How many of the next tokens have nothing forgotten between them, and what was before."""
        known = forgotten(self.edge.path[max(self.at - 1, 0) : self.at + most])
        before, ahead = (known[0], known[1:]) if self.at else (0, known)
        forget, other = ahead[0] & ~before, np.flatnonzero(ahead != ahead[0])
        return int(other[0]) if len(other) else len(ahead), int(forget)


class Reader:
    """Reads a tree of tokens in steps of several edges, within a budget of states.

    Edges that are ready wait on a stack, so that the tree is read depth first and few states are
    alive. A step reads up to ``limits.tokens`` tokens of up to ``limits.rows`` edges. The state at
    the end of an edge is kept until the last of its children has begun. If there is no room for
    another, the state that has waited longest is given up, and read again when its turn comes.

    Attributes:
        pool: the states, as the runner keeps them.

    Args:
        runner: the model.
        tree: what to read.
        limits: tokens and rows of a step, and states.
        capacity: tokens that a document may have.
        stats: where to count.
        visit: called with the hidden vectors of a step, what it read, and where each part begins.
        progress: called with the number of tokens that were read for the first time.
        name: what to call a sequence in an error.
    """

    def __init__(
        self,
        runner: Runner,
        tree: Tree,
        limits: Limits,
        capacity: int,
        stats: Stats,
        *,
        visit: Callable[[Any, list["Part"], np.ndarray], None],
        progress: Callable[[int], None],
        name: Callable[[int], str],
    ):
        self._runner, self._limits, self._stats = runner, limits, stats
        self._capacity = runner.bucket(capacity)
        self._visit, self._progress, self._name = visit, progress, name
        stats.tokens_unique += tree.tokens
        self._stack = tree.roots[::-1]
        self._active: list[Row] = []
        self._held: dict[Edge, int] = {}  # edges read to their end, and the slots of their states
        self._wanted: dict[Edge, int] = {}  # how many children have yet to begin from that state
        self._again: dict[Edge, list[Edge]] = {}  # to be read again, and which edges wait for it
        self._scored: dict[Edge, int] = {}  # up to where edges were read whose state was lost
        self._open_pool()

    @property
    def busy(self) -> bool:
        """Whether there is anything left to read."""
        return bool(self._stack or self._active)

    def fill(self, ends: int = 0) -> list[tuple[int, int]]:
        """Takes edges from the stack until a step is full.

        Args:
            ends: how many ends of sequences the caller can take.

        Returns:
            Sequences that have been read to their end, and the slots of their states (-1 if there
            was nothing to read), valid until the next step.
        """
        reached: list[tuple[int, int]] = []
        planned = sum(row.left for row in self._active)
        while self._stack and planned < self._limits.tokens:
            if len(self._active) == self._limits.rows:
                break
            edge = self._stack[-1]
            if edge.sequence is not None and len(reached) == ends:
                break
            self._stack.pop()
            while (parent := edge.parent) is not None and parent not in self._held:
                if parent in self._again:  # its state is on its way
                    self._again[parent].append(edge)
                    break
                self._again[parent] = [edge]
                if parent.parent is not None:
                    self._wanted[parent.parent] = self._wanted.get(parent.parent, 0) + 1
                edge = parent
            else:
                if edge.sequence is not None:
                    reached.append((edge.sequence, -1 if parent is None else self._held[parent]))
                    self._begin(edge, leaf=True)
                else:
                    self._active.append(Row(edge, self._scored.get(edge, 0)))
                    planned += edge.end - edge.start
        return reached

    def step(self) -> None:
        """Reads a chunk of the edges that were taken, in smaller steps from now on if memory runs
        out.

        Raises:
            MemoryError: not even the smallest step fits; names a sequence.
        """
        if not self._active:
            return
        try:
            self._step()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._shrink(error)

    def _open_pool(self) -> None:
        budget = self._limits.state_bytes or self._runner.free_memory() // 4
        fit = max(budget // self._runner.state_bytes(self._capacity), 1)
        # Pools of two sizes, since each of them may be compiled for.
        few, self._most = (
            1 << min(fit, times * self._limits.rows).bit_length() - 1 for times in (1, 8)
        )
        self._free = list(range(few))[::-1]
        self.pool: Any = self._runner.open_pool(few, self._capacity)
        self._states = few

    def _grow_pool(self) -> bool:
        """Makes room for more states, if there may be more."""
        if self._states == self._most:
            return False
        try:
            self.pool = self._runner.grow_pool(self.pool, self._most, self._capacity)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._most = self._states
            return False
        self._free = list(range(self._states, self._most))[::-1]
        self._states = self._most
        return True

    def _step(self) -> None:
        chunk = self._chunk()
        counts = np.array([part.tokens for part in chunk])
        tokens = np.concatenate([p.row.edge.path[p.row.at : p.row.at + p.tokens] for p in chunk])
        forget = np.array([part.forget for part in chunk])
        hidden, self.pool = self._runner.read(
            self.pool,
            unmarked(tokens),
            counts,
            np.array([part.source for part in chunk]),
            np.array([part.target for part in chunk]),
            *([forget] if forget.any() else []),
        )
        self._visit(hidden, chunk, np.cumsum(counts) - counts)
        again = 0
        for row, count, _, target, _ in chunk:
            again += min(max(row.scored - row.at, 0), count)
            row.at, row.slot = row.at + count, target
            if not row.left:
                self._finish(row)
        self._active = [row for row in self._active if row.left]
        self._stats.steps += 1
        self._stats.tokens_computed += len(tokens)
        self._stats.tokens_again += again
        self._progress(len(tokens) - again)

    def _chunk(self) -> list["Part"]:
        """What the next step reads, and where it finds and leaves states.

        A step takes all states before it leaves any, so a slot that is read may be written too.
        """
        chunk: list[Part] = []
        room = self._limits.tokens
        for row in self._active:
            if most := min(row.left, room):
                count, forget = row.next(most)
                parent = row.edge.parent
                source = row.slot if row.begun else -1 if parent is None else self._held[parent]
                chunk.append(Part(row, count, source, row.slot, forget))
                room -= count
        ready = []
        for part in chunk:
            row = part.row
            if not row.begun:
                leaf = part.tokens == row.left and not row.edge.children
                target = self._begin(row.edge, leaf)
                if target is None:  # not before another edge is done
                    self._stack.append(row.edge)
                    self._active.remove(row)
                    continue
                row.begun, part = True, part._replace(target=target)
            ready.append(part)
        return ready

    def _begin(self, edge: Edge, leaf: bool) -> int | None:
        """Where the state of an edge goes, -1 if it needs none; None if there is no room now."""
        parent = edge.parent
        last = parent is not None and self._wanted[parent] == 1
        if leaf:
            slot = -1
        elif last and parent in self._held:
            slot = self._held.pop(parent)
        elif self._free or self._grow_pool():
            slot = self._free.pop()
        elif self._held:
            slot = self._held.pop(next(iter(self._held)))
            self._stats.states_evicted += 1
        else:
            return None
        if parent is not None:
            self._wanted[parent] -= 1
            if last:
                del self._wanted[parent]
                if parent in self._held:
                    self._free.append(self._held.pop(parent))
        return slot

    def _finish(self, row: Row) -> None:
        edge = row.edge
        self._scored[edge] = edge.end  # whenever it is read again, nothing on it is scored
        if edge in self._again:
            children = self._again.pop(edge)
        else:
            children = edge.children
            if children:
                self._wanted[edge] = len(children)
        if children:
            self._held[edge] = row.slot
            self._stack += children[::-1]
        elif row.slot >= 0:
            self._free.append(row.slot)

    def _shrink(self, error: BaseException) -> None:
        """Goes on with smaller steps after memory ran out; all states are lost and read again.

        Raises:
            MemoryError: the steps cannot get smaller.
        """
        if self._limits == self._limits.halved():
            edge = self._active[0].edge
            while edge.targets is None and edge.sequence is None:
                edge = edge.children[0]
            sequence = edge.sequence if edge.targets is None else int(edge.targets.sequence[0])
            assert sequence is not None
            raise MemoryError(
                f"{self._name(sequence)}: not even {self._limits.tokens} tokens at a time "
                "fit into memory"
            ) from error
        self._limits = self._limits.halved()
        logger.warning("out of memory: going on with %s", self._limits)
        for row in reversed(self._active):
            self._stack.append(row.edge)
            self._scored[row.edge] = max(row.scored, row.at)
            if row.begun and (parent := row.edge.parent) is not None:
                self._wanted[parent] = self._wanted.get(parent, 0) + 1
        self._active = []
        self._held.clear()
        self.pool = None  # before another one is made
        self._open_pool()


class Part(NamedTuple):
    """What a step does to a row: tokens to read, the slots of the states before and after, and what
    is forgotten of the state before."""

    row: Row
    tokens: int
    source: int
    target: int
    forget: int
