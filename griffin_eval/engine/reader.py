"""Reads a radix tree of tokens: every edge once, with the state copied where sequences diverge."""

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
    """An edge that is being read, from its first token on. Positions are indices in ``edge.path``.

    Attributes:
        scored: Position up to which the edge was read before its state was lost.
        begun: Whether it has taken its parent's state.
        slot: Slot of its state in the pool; -1 while it has none.
    """

    __slots__ = ("begun", "edge", "position", "scored", "slot")

    def __init__(self, edge: Edge, scored: int):
        self.edge, self.position, self.scored = edge, edge.start, scored
        self.begun, self.slot = False, -1

    @property
    def left(self) -> int:
        """Number of unread tokens."""
        return self.edge.end - self.position

    def next_ids(self, count: int) -> np.ndarray:
        """Return the int32 [count] ids of the next tokens."""
        return ids_of(self.edge.path[self.position : self.position + count])

    def next_part(self, max_tokens: int) -> tuple[int, int]:
        """Return how many tokens can be read before the next ablation, and the ablation to apply
        before the first of them."""
        begin = max(self.position - 1, 0)
        ablations = ablation_of(self.edge.path[begin : self.position + max_tokens])
        before, ahead = (ablations[0], ablations[1:]) if self.position else (0, ablations)
        changes = np.flatnonzero(ahead != ahead[0])
        return int(changes[0]) if len(changes) else len(ahead), int(ahead[0] & ~before)


class Reader:
    """Reads a tree of tokens in steps of several edges, within a memory budget for states.

    Edges that are ready wait on a stack, so that the tree is read depth first and few states are
    alive. A step reads up to ``limits.tokens`` tokens of up to ``limits.rows`` edges. The state at
    the end of an edge is kept until the last of its children has begun. If all slots are taken, the
    least recently used state is evicted, and computed again when it is needed.

    Args:
        capacity: Length in tokens of the longest sequence.
        stats: Counters, updated in place.
        on_step: Function called after each step with its hidden vectors, its parts, and the index
            of each part's first hidden vector. The edge of a part is its `ActiveEdge`.
        progress: Function of the number of tokens that were read for the first time.
        describe: Function that names a sequence by its index, for error messages.
        cache: Cache of states on disk to start from.
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
        self._pending: dict[Edge, int] = {}  # number of children that have not begun, by edge
        self._again: dict[Edge, list[Edge]] = {}  # edges waiting for a lost state, by its edge
        self._scored: dict[Edge, int] = {}  # `ActiveEdge.scored` of edges whose state was lost
        self.pool = self._open_pool()

    @property
    def busy(self) -> bool:
        """Whether any edge is still to be read."""
        return bool(self._stack or self._active)

    def fill(self, ends: int = 0) -> list[tuple[int, int]]:
        """Activate edges from the stack until a step is full.

        Returns at most ``ends`` finished sequences: the index of each, and the slot of its state
        (-1 for a sequence without tokens), valid until the next step.
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
                if parent in self._again:  # already being computed
                    self._again[parent].append(edge)
                    break
                self._again[parent] = [edge]
                if parent.parent is not None:
                    self._pending[parent.parent] = self._pending.get(parent.parent, 0) + 1
                edge = parent
            else:
                if edge.stored is not None:
                    # A loaded state may take the slot of a sequence that has been reached.
                    if reached or not self._load(edge):
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
        """Load the state at the end of an edge from disk, or queue the edge for reading if the file
        is gone; return False if no slot is free yet."""
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
        """Read the next tokens of the active edges; halve the limits if memory runs out. The
        MemoryError of the smallest step names a sequence."""
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
        # Two pool sizes only, since each one may be compiled for.
        rows = min(self._limits.rows, self._runner.decode_rows)
        few, most = (1 << min(fit, times * rows).bit_length() - 1 for times in (1, 8))
        stats = self._stats

        def count(_: Edge) -> None:  # no method: a pool that refers to its reader lives too long
            stats.states_evicted += 1

        return Pool(self._runner, few, most, self._capacity, count)

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
        """Return the parts of the next step."""
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
                # Wait until another edge is done, or the parent is read again.
                if target is None:
                    self._stack.append(active.edge)
                    self._active.remove(active)
                    continue
                active.begun = True
            unused -= count
            parts.append(Part(active, active.next_ids(count), source, target, ablation))
        return parts

    def _begin(self, edge: Edge, leaf: bool) -> int | None:
        """Return a slot for the state of an edge; -1 if it needs none, None if no slot is free."""
        parent = edge.parent
        last = parent is not None and self._pending[parent] == 1
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
            self._pending[parent] -= 1
            if last:
                del self._pending[parent]
                self.pool.drop(parent)
        return slot

    def _parents_of_active(self) -> set[Edge | None]:
        """Return the parents of active edges that have not taken their parent's state yet."""
        return {active.edge.parent for active in self._active if not active.begun}

    def _finish(self, edge: Edge, slot: int) -> None:
        if edge.keep is not None and self._cache is not None and slot >= 0:
            tensors = self.pool.tensors(slot, edge.end)
            self._cache.save(edge.keep, edge.path[: edge.end + 1], tensors)
            edge.keep = None
        self._scored[edge] = edge.end  # its targets are not scored again if it is read again
        if edge in self._again:
            children = self._again.pop(edge)
        else:
            children = edge.children
            if children:
                self._pending[edge] = len(children)
        if children:
            self.pool.hold(edge, slot)
            self._stack += children[::-1]
        else:
            self.pool.free(slot)

    def _first_active(self) -> str:
        """Name a sequence that is being read."""
        edge = self._active[0].edge
        while not edge.targets and edge.sequence is None:
            if not edge.children:
                return "a sequence without a token to score"
            edge = edge.children[0]
        sequence = edge.targets[0].sequence if edge.targets else edge.sequence
        assert sequence is not None
        return self._describe(sequence)

    def _begin_again(self) -> None:
        """Drop all states; they are computed again when needed."""
        for active in reversed(self._active):
            self._stack.append(active.edge)
            self._scored[active.edge] = max(active.scored, active.position)
            if active.begun and (parent := active.edge.parent) is not None:
                self._pending[parent] = self._pending.get(parent, 0) + 1
        self._active = []
        del self.pool  # free its memory before the next one is allocated
        self.pool = self._open_pool()
