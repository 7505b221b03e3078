"""The collective operations of an optimised program, from its text."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_OPERATION = re.compile(rf"%(\S+) = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_COMPUTATION = re.compile(r"(?:ENTRY )?%(\S+) \(.*\{$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations)=\{?(%[^}\s]+(?:, %\S+)*)"
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One collective operation of a program.

    Attributes:
        kind: one of `KINDS`.
        shapes: of its results on one device, such as ``f32[1,64,128]``.
        nbytes: of these results.
        in_loop: whether it may run more than once.
    """

    kind: str
    shapes: tuple[str, ...]
    nbytes: int
    in_loop: bool


def collectives(text: str) -> list[Collective]:
    """The collective operations of a program in XLA's text form, in the order of the text."""
    computations = _computations(re.sub(r"/\*index=\d+\*/", "", text))
    looped = _in_loops(computations)
    return [
        Collective(kind, shapes, sum(map(_bytes, shapes)), name in looped)
        for name, lines in computations.items()
        for kind, shapes in _operations(lines)
    ]


def _operations(lines: list[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for line in lines:
        match = _OPERATION.search(line)
        if match is None:
            continue
        _, result, kind, started = match.groups()
        shapes = [f"{dtype}[{sizes}]" for dtype, sizes in _SHAPE.findall(result)]
        if started and kind != "all-reduce":  # operands first, then results
            shapes = shapes[len(shapes) // 2 :]
        yield kind, tuple(shapes)


def _computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation of a module, by its name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start:
            lines = found[start.group(1)] = []
        else:
            lines.append(line)
    return found


def _in_loops(computations: dict[str, list[str]]) -> set[str]:
    """Names of the computations that a loop runs."""
    called = {
        name: {c.strip("%, ") for line in lines for c in _names(line)}
        for name, lines in computations.items()
    }
    pending = [
        each.strip("%, ")
        for lines in computations.values()
        for line in lines
        if " while(" in line
        for each in _names(line)
    ]
    inside: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in inside:
            inside.add(name)
            pending += called.get(name, ())
    return inside


def _names(line: str) -> list[str]:
    return [name for group in _CALLED.findall(line) for name in group.split(", ")]


def _bytes(shape: str) -> int:
    match = _SHAPE.fullmatch(shape)
    assert match is not None
    dtype, sizes = match.groups()
    bits = re.search(r"\d+", dtype)
    width = max(int(bits.group()) // 8, 1) if bits else 1
    return width * math.prod(int(n) for n in sizes.split(",") if n)
