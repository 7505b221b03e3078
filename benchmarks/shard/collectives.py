"""The collective operations in the text of an optimised program."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_OPERATION = re.compile(rf"%(\S+) = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_COMPUTATION = re.compile(r"(?:ENTRY )?%(\S+) \(.*\{$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations)=\{?(%[^}\s]+(?:, %\S+)*)"
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_CHAIN = re.compile(r'chain_id="\d+"')
# Forms of groups of devices: lists, an array that is cut, or some axes of a mesh.
_LISTS = re.compile(r"replica_groups=\{([\d,{}]*)\}")
_CUT = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXES = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    r" \{([^}:]*)\}"
)


class Collective(NamedTuple):
    """One collective operation of a program.

    Attributes:
        kind: One of `KINDS`.
        shapes: Shapes of the results on one device, such as ``f32[1,64,128]``.
        nbytes: Bytes of these results.
        in_loop: Whether it may run more than once.
        groups: Places in the mesh of the devices that do it together, for each group; empty where
            devices send to each other, or all of them do it.
    """

    kind: str
    shapes: tuple[str, ...]
    nbytes: int
    in_loop: bool
    groups: tuple[tuple[int, ...], ...]


def collectives(text: str) -> list[Collective]:
    """Return the collective operations of a program in XLA's text form, in the order of the text,
    without those of groups of one device, which exchange nothing."""
    parts, chains = computations(re.sub(r"/\*index=\d+\*/", "", text)), set()
    looped = _in_loops(parts)
    return [
        Collective(kind, shapes, sum(map(shape_bytes, shapes)), name in looped, groups)
        for name, lines in parts.items()
        for kind, shapes, groups in _operations(lines, chains)
        if not groups or len(groups[0]) > 1
    ]


def _operations(
    lines: list[str], chains: set[str]
) -> Iterator[tuple[str, tuple[str, ...], tuple[tuple[int, ...], ...]]]:
    """Yield kind, shapes and groups of each operation, once for a chain of several instructions."""
    for line in lines:
        match = _OPERATION.search(line)
        if match is None:
            continue
        _, result, kind, started = match.groups()
        if chain := _CHAIN.search(line):
            if chain[0] in chains:
                continue
            chains.add(chain[0])
        shapes = [f"{dtype}[{sizes}]" for dtype, sizes in _SHAPE.findall(result)]
        if started and kind != "all-reduce":  # operands first, then results, then counters
            shapes = [shape for shape in shapes if shape != "u32[]"]
            shapes = shapes[len(shapes) // 2 :]
        yield kind, tuple(shapes), _groups(line)


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices of an operation."""
    if match := _LISTS.search(line):
        lists = re.findall(r"\{([\d,]+)\}", match[1])
        return tuple(tuple(_integers(each)) for each in lists)
    if match := _CUT.search(line):
        groups = _devices(match[2], match[3]).reshape(_integers(match[1]))
    elif match := _AXES.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        shape = list(sizes.values())
        devices = _devices(match[2] or str(math.prod(shape)), match[3]).reshape(shape)
        together = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", match[4])]
        last = range(len(shape) - len(together), len(shape))
        count = math.prod(shape[axis] for axis in together)
        groups = np.moveaxis(devices, together, last).reshape(-1, count)
    else:
        return ()
    return tuple(tuple(group) for group in groups.tolist())


def _devices(shape: str, turned: str | None) -> np.ndarray:
    """Return the places of devices in an array of this shape, perhaps with exchanged axes."""
    devices = np.arange(math.prod(_integers(shape))).reshape(_integers(shape))
    return devices.transpose(_integers(turned)) if turned else devices


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def computations(text: str) -> dict[str, list[str]]:
    """Return the lines of each computation of a module, by its name."""
    parts: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start:
            lines = parts[start.group(1)] = []
        else:
            lines.append(line)
    return parts


def _in_loops(parts: dict[str, list[str]]) -> set[str]:
    """Return the names of the computations that a loop runs."""
    called = {name: _called(lines) for name, lines in parts.items()}
    pending = [
        name for lines in parts.values() for name in _called(x for x in lines if " while(" in x)
    ]
    inside: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in inside:
            inside.add(name)
            pending += called.get(name, ())
    return inside


def _called(lines: Iterable[str]) -> set[str]:
    """Return the names of the computations that lines call."""
    groups = (group for line in lines for group in _CALLED.findall(line))
    return {name.strip("%, ") for group in groups for name in group.split(", ")}


def elements(shape: str) -> int:
    """Return the number of elements of a shape such as ``f32[1,64,128]``."""
    return math.prod(int(n) for n in shape.partition("[")[2].rstrip("]").split(",") if n)


def shape_bytes(shape: str) -> int:
    """Return the bytes of such a shape."""
    bits = re.search(r"\d+", shape.partition("[")[0])
    return (max(int(bits.group()) // 8, 1) if bits else 1) * elements(shape)
