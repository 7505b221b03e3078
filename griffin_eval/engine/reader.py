"""Reads a radix tree of tokens: every edge once, states forked where sequences part."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from griffin_eval.engine.kept import prepare
from griffin_eval.engine.limits import Limits
from griffin_eval.engine.pool import Part, Pool
from griffin_eval.engine.recovery import smaller
from griffin_eval.engine.stats import Stats
from griffin_eval.engine.tree import Edge, Tree, ablation_of, ids_of
from griffin_eval.runners.protocol import Runner
from griffin_eval.states.state_cache import StateCache

logger = logging.getLogger(__name__)


class ActiveEdge:
    """An edge that is being read.

    Attributes:
        edge: the edge.
        position: index in ``edge.path`` of the next token to read.
        scored: index in ``edge.path`` up to which it was read and scored before its state was lost.
        begun: whether it has taken its parent's state.
        slot: of its own state in the pool, -1 while it has none.
    """

    __slots__ = ("begun", "edge", "position", "scored", "slot")

    def __init__(self, edge: Edge, scored: int):
        self.edge, self.position, self.scored = edge, edge.start, scored
        self.begun, self.slot = False, -1

    @property
    def left(self) -> int:
        """Number of tokens that are still to be read."""
        return self.edge.end - self.position

    def next_ids(self, count: int) -> np.ndarray:
        """int32 [count], ids of the tokens that are read next."""
        return ids_of(self.edge.path[self.position : self.position + count])

    def next_part(self, most: int) -> tuple[int, int]:
        """How many tokens, at most ``most``, can be read before memory is cleared again, and the
        `Ablation` that comes before the first of them."""
        begin = max(self.position - 1, 0)
        ablations = ablation_of(self.edge.path[begin : self.position + most])
        before, ahead = (ablations[0], ablations[1:]) if self.position else (0, ablations)
        changes = np.flatnonzero(ahead != ahead[0])
        return int(changes[0]) if len(changes) else len(ahead), int(ahead[0] & ~before)


class Reader:
    """Reads a tree of tokens in steps of several edges, within a budget of states.

    Edges that are ready wait on a stack, so that the tree is read depth first and few states are
    alive. A step reads up to ``limits.tokens`` tokens of up to ``limits.rows`` edges. The state at
    the end of an edge is kept until the last of its children has begun. If all slots are taken, the
    state that has waited longest is evicted, and computed again when it is needed.

    Attributes:
        pool: the states at the ends of edges, from the end until the last child has begun.

    Args:
        limits: tokens and edges of a step, and bytes of states.
        capacity: length in tokens of the longest sequence.
        stats: counters that are added to.
        on_step: called after each step with its hidden vectors, its parts, and the index of each
            part's first hidden vector. The edge of a part is its `ActiveEdge`.
        progress: called with the number of tokens that were read for the first time.
        describe: names a sequence, given its index, in an error.
        cache: states on disk, from which reading begins where it can; None for none.
    """

    def __init__(
        self,
        runner: Runner,
        tree: Tree,
        limits: Limits,
        capacity: int,
        stats: Stats,
        *,
        on_step: Callable[[Any, list[Part], np.ndarray], None],
        progress: Callable[[int], Any],
        describe: Callable[[int], str],
        cache: StateCache | None = None,
    ):
        self._runner, self._stats, self._cache = runner, stats, cache
        self._capacity = runner.padded_tokens(capacity)
        self._limits = limits.fitting(runner.step_bytes(self._capacity))
        self._on_step, self._progress, self._describe = on_step, progress, describe
        if cache is not None:
            tokens, tree = tree.tokens, prepare(tree, cache)
            stats.tokens_kept += tokens - tree.tokens
        stats.tokens_unique += tree.tokens
        logger.info("griffin: %s tokens to read", f"{tree.tokens:,}")
        stats.tokens_again += tree.repeated
        self._stack = tree.roots[::-1]
        self._active: list[ActiveEdge] = []
        self._wanted: dict[Edge, int] = {}  # how many children have yet to begin from that state
        self._again: dict[Edge, list[Edge]] = {}  # to be read again, and which edges wait for it
        self._scored: dict[Edge, int] = {}  # up to where edges were read whose state was lost
        self.pool = self._open_pool()

    @property
    def busy(self) -> bool:
        """Whether there is anything left to read."""
        return bool(self._stack or self._active)

    def fill(self, ends: int = 0) -> list[tuple[int, int]]:
        """Takes edges from the stack until a step is full.

        Args:
            ends: number of sequences whose end the caller can take.

        Returns:
            Index of each sequence that has been read to its end, and the slot of its state (-1 for
            a sequence without tokens), valid until the next step.
        """
        reached: list[tuple[int, int]] = []
        planned = sum(active.left for active in self._active)
        while self._stack and planned < self._limits.tokens:
            if len(self._active) == self._limits.rows:
                break
            edge = self._stack[-1]
            if edge.sequence is not None and len(reached) == ends:
                break
            self._stack.pop()
            while (parent := edge.parent) is not None and parent not in self.pool:
                if parent in self._again:  # its state is on its way
                    self._again[parent].append(edge)
                    break
                self._again[parent] = [edge]
                if parent.parent is not None:
                    self._wanted[parent.parent] = self._wanted.get(parent.parent, 0) + 1
                edge = parent
            else:
                if edge.stored is not None:
                    if not self._load(edge):
                        self._stack.append(edge)
                        break
                elif edge.sequence is not None:
                    slot = -1 if parent is None else self.pool.slot_of(parent)
                    reached.append((edge.sequence, slot))
                    self._begin(edge, leaf=True)
                else:
                    self._active.append(ActiveEdge(edge, self._scored.get(edge, 0)))
                    planned += edge.end - edge.start
        return reached

    def _load(self, edge: Edge) -> bool:
        """Takes the state at the end of an edge from the disk, or lets it be read if it is not
        there any more; False where that has to wait for a slot."""
        assert self._cache is not None and edge.stored is not None
        slot = self._begin(edge, leaf=False)
        if slot is None:
            return False
        state = self._cache.load(edge.stored, edge.path[: edge.end + 1])
        if state is None:
            edge.keep, edge.stored = edge.stored, None
            self._stats.tokens_kept -= edge.end
            self._stats.tokens_unique += edge.end
            self.pool.free(slot)
            self._stack.append(edge)
            return True
        self.pool.write(slot, state.tensors, edge.end)
        self._finish(edge, slot)
        return True

    def step(self) -> None:
        """Reads the next tokens of the active edges; if memory runs out, later steps are smaller.

        Raises:
            MemoryError: not even the smallest step fits into memory; the message names a sequence.
        """
        if not self._active:
            return
        try:
            self._step()
        except (MemoryError, RuntimeError) as error:
            self._limits = smaller(self._limits, error, self._first_active())
            self._begin_again()

    def _open_pool(self) -> Pool:
        budget = self._limits.state_bytes or self._runner.free_memory() // 4
        fit = max(budget // self._runner.state_bytes(self._capacity), 1)
        # Pools of two sizes, since each of them may be compiled for.
        rows = min(self._limits.rows, self._runner.decode_rows)
        few, most = (1 << min(fit, times * rows).bit_length() - 1 for times in (1, 8))
        return Pool(self._runner, few, most, self._capacity, self._count_evicted)

    def _count_evicted(self, edge: Edge) -> None:
        self._stats.states_evicted += 1

    def _step(self) -> None:
        parts = self._parts()
        hidden, bases = self.pool.read(parts)
        self._on_step(hidden, parts, bases)
        total = again = 0
        for active, tokens, _, target, _ in parts:
            count = len(tokens)
            total += count
            again += min(max(active.scored - active.position, 0), count)
            active.position, active.slot = active.position + count, target
            if not active.left:
                self._finish(active.edge, active.slot)
        self._active = [active for active in self._active if active.left]
        self._stats.steps += 1
        self._stats.tokens_computed += total
        self._stats.tokens_again += again
        self._progress(total - again)

    def _parts(self) -> list[Part]:
        """What the next step reads, and the slots of states that it takes and writes."""
        parts: list[Part] = []
        unused = self._limits.tokens
        for active in list(self._active):
            if not (most := min(active.left, unused)):
                break
            count, ablation = active.next_part(most)
            source = target = active.slot
            if not active.begun:
                parent = active.edge.parent
                source = -1 if parent is None else self.pool.slot_of(parent)
                leaf = count == active.left and not active.edge.children
                lost = parent is not None and source < 0
                target = None if lost else self._begin(active.edge, leaf)
                # Not before another edge is done, or its parent is read again.
                if target is None:
                    self._stack.append(active.edge)
                    self._active.remove(active)
                    continue
                active.begun = True
            unused -= count
            parts.append(Part(active, active.next_ids(count), source, target, ablation))
        return parts

    def _begin(self, edge: Edge, leaf: bool) -> int | None:
        """Slot for the state of an edge, -1 if it needs none; None if all slots are taken."""
        parent = edge.parent
        last = parent is not None and self._wanted[parent] == 1
        if leaf:
            slot = -1
        elif last and parent in self.pool:
            slot = self.pool.take_over(parent)
        else:
            slot = self.pool.take(self._parents_of_active)
            if slot is None:
                slot = self.pool.take()
            if slot is None:
                return None
        if parent is not None:
            self._wanted[parent] -= 1
            if last:
                del self._wanted[parent]
                self.pool.drop(parent)
        return slot

    def _parents_of_active(self) -> set[Edge | None]:
        """Edges from which an active edge has yet to begin."""
        return {active.edge.parent for active in self._active if not active.begun}

    def _finish(self, edge: Edge, slot: int) -> None:
        if edge.keep is not None and self._cache is not None and slot >= 0:
            tensors = self.pool.tensors(slot, edge.end)
            self._cache.save(edge.keep, edge.path[: edge.end + 1], tensors)
            edge.keep = None
        self._scored[edge] = edge.end  # whenever it is read again, nothing on it is scored
        if edge in self._again:
            children = self._again.pop(edge)
        else:
            children = edge.children
            if children:
                self._wanted[edge] = len(children)
        if children:
            self.pool.hold(edge, slot)
            self._stack += children[::-1]
        else:
            self.pool.free(slot)

    def _first_active(self) -> str:
        """Name a sequence that is being read."""
        edge = self._active[0].edge
        while not edge.targets and edge.sequence is None:
            edge = edge.children[0]
        sequence = edge.targets[0].sequence if edge.targets else edge.sequence
        assert sequence is not None
        return self._describe(sequence)

    def _begin_again(self) -> None:
        """Drop all states, and compute them again where they are needed."""
        for active in reversed(self._active):
            self._stack.append(active.edge)
            self._scored[active.edge] = max(active.scored, active.position)
            if active.begun and (parent := active.edge.parent) is not None:
                self._wanted[parent] = self._wanted.get(parent, 0) + 1
        self._active = []
        del self.pool  # before another one is made
        self.pool = self._open_pool()
