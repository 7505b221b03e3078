"""The memory that a conversion takes, known before it begins, and the least it can do with."""

import math
from typing import TYPE_CHECKING, NamedTuple

from griffin_eval.converters.arrays.dtypes import ITEM_BYTES
from griffin_eval.converters.containers.registry import CONTAINERS
from griffin_eval.converters.naming.ops import SAME
from griffin_eval.converters.naming.tables import Binding
from griffin_eval.errors import ArgumentError

if TYPE_CHECKING:
    from griffin_eval.converters.checkpoint import Checkpoint
    from griffin_eval.converters.plan import Plan, Write


_MB = 10**6
_BASE = 60 * _MB  # Python, numpy and the command line
_KEPT = 2  # safety factor for memory that malloc keeps after a thread freed it (measured)


class Buffering(NamedTuple):
    """The amount that a conversion holds in memory at once.

    Attributes:
        workers: tensors that are converted at a time.
        piece: bytes of a tensor that are read, hashed and written at a time.
    """

    workers: int
    piece: int


# From the fastest to the smallest. Two workers keep two cores busy hashing, the slowest part.
BUFFERINGS = (
    Buffering(2, 16 << 20),
    Buffering(2, 4 << 20),
    Buffering(1, 4 << 20),
    Buffering(1, 1 << 20),
)


class Need(NamedTuple):
    """Bytes of anonymous memory that the process takes at most, and the tensor it is for."""

    nbytes: int
    tensor: str


def choose_buffering(plan: "Plan", max_memory: int | None) -> tuple[Buffering, Need]:
    """The fastest way to convert within a limit in bytes; None for no limit.

    Raises:
        ArgumentError: the limit is too small, naming the least that is needed and for what.
    """
    limit = math.inf if max_memory is None else max_memory
    needs = []
    for buffering in BUFFERINGS:
        need = memory_needed(plan, buffering)
        if need.nbytes <= limit:
            return buffering, need
        needs.append(need)
    least = min(needs)
    raise ArgumentError(
        f"--max-memory {limit / _MB:.0f}MB: {plan.source.format.name} to {plan.target.name} "
        f"needs {-(-least.nbytes // _MB)}MB, the most of it for {least.tensor}; allow that much"
    )


def memory_needed(plan: "Plan", buffering: Buffering) -> Need:
    """The memory of a conversion: for the largest tensors held at a time, and for libraries."""
    bindings = plan.source.bindings
    homes = {name: binding for name, (binding, _) in plan.source.homes.items()}
    # A tensor of several parameters is read once, and kept until the next such one is read.
    kept = [binding for binding in bindings if len(binding.canonical) > 1]
    shared = max((_read(plan.source, b, None) for b in kept), default=0)
    needs = [
        (_held(plan.source, homes, write, buffering, shared), write.binding.foreign)
        for write in plan.writes
    ]
    needs.sort(reverse=True)
    held = sum(nbytes for nbytes, _ in needs[: buffering.workers])
    containers = {plan.source.format.container, plan.target.container}
    held += _BASE + sum(CONTAINERS[name].library_memory for name in containers)
    largest = max(write.nbytes for write in plan.writes)
    held += plan.output.memory_to_write(largest, buffering.piece)
    return Need(held, needs[0][1])


def _held(
    source: "Checkpoint",
    homes: dict[str, Binding],
    write: "Write",
    buffering: Buffering,
    shared: int,
) -> int:
    """Bytes that a worker holds of one tensor of the output and of what it is made from."""
    reading = pieces = 0
    for spec in write.binding.canonical:
        home, stored = homes[spec.name], source.dtypes[spec.name]
        nbytes = min(buffering.piece, spec.size * ITEM_BYTES[stored])
        count = nbytes // ITEM_BYTES[stored]
        if home.op is SAME and home.entry is None:
            piece, whole = _read(source, home, buffering.piece), 0
        else:
            piece, whole = nbytes, _read(source, home, None)
        if stored != write.dtype:  # also masks of the values that were, are and stay finite
            piece += count * (ITEM_BYTES[write.dtype] + 3)
        elif stored != "bfloat16":
            piece += count * 2
        piece += source.merging_bytes(spec.name, buffering.piece)
        reading = max(reading, whole if len(home.canonical) > 1 else whole + shared)
        pieces = max(pieces, _KEPT * piece)
    if write.binding.op is SAME:
        return reading + pieces
    made = write.nbytes + max(reading + pieces, _KEPT * min(buffering.piece, write.nbytes))
    return max(made, 2 * write.nbytes) if len(write.binding.canonical) > 1 else made


def _read(source: "Checkpoint", binding: Binding, nbytes: int | None) -> int:
    """Bytes of memory that reading takes, in pieces of ``nbytes`` or whole."""
    container = source.container
    if binding.entry is not None:  # one entry of a stack is read
        nbytes = container.tensors[binding.foreign].nbytes // binding.shape[0]
    return container.memory_to_read(binding.foreign, nbytes)
