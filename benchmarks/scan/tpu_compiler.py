"""Compilation for an absent TPU, and the compiler's figures.

libtpu compiles on any Linux machine for any TPU. For a kernel it writes the schedule: bundles of
instructions, one bundle per cycle without waits, so their number is a lower bound of the cycles.
For XLA's own operations it writes an estimate of the cycles. Nothing here is measured on a TPU.
"""

import atexit
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr  # pyright: ignore
from jax.experimental import topologies
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.ahead_of_time import ENVIRONMENT, no_compilation_cache


class Target(NamedTuple):
    """A TPU by the compiler's name, with its makers' figures for one core.

    Attributes:
        topology: Smallest slice of this generation.
        bandwidth: Bandwidth of HBM, bytes/s.
        clock: Clock rate, cycles/s.
    """

    topology: str
    bandwidth: float
    clock: float

    @property
    def bytes_per_cycle(self) -> float:
        return self.bandwidth / self.clock


TARGETS = {
    "v4": Target("v4:2x2x1", 1.228e12 / 2, 1.05e9),
    "v5e": Target("v5e:2x2", 8.19e11, 1.5e9),
    "v5p": Target("v5p:2x2x1", 2.765e12 / 2, 1.75e9),
    "v6e": Target("v6e:2x2", 1.64e12, 1.75e9),
    "tpu7x": Target("tpu7x:2x2x1", 7.38e12 / 2, 2.2e9),
}


class Kernel(NamedTuple):
    """A Pallas kernel as compiled.

    Attributes:
        name: Name of the kernel, or else of the function around it.
        hbm_bytes: Bytes that its blocks move, each fetched when its position changes; None if a
            table of positions is an argument.
        bundles: Bundles of all programs; None if a loop has no fixed length, or if such a table
            decides which programs work.
        vmem_bytes: Bytes of VMEM.
    """

    name: str
    hbm_bytes: int | None
    bundles: int | None
    vmem_bytes: int


class Report(NamedTuple):
    """The compiler's figures for a function.

    Attributes:
        temporary_bytes: Bytes of HBM between its operations.
        hbm_bytes: Bytes that all operations move; None if a loop or a kernel hides them.
        xla_cycles: Estimated cycles of everything but kernels.
        kernels: Kernels in order.
        target: TPU it was compiled for.
    """

    temporary_bytes: int
    hbm_bytes: int | None
    xla_cycles: int
    kernels: tuple[Kernel, ...]
    target: Target

    @property
    def cycles(self) -> float | None:
        """The larger of bundles and bytes over bandwidth for kernels, plus XLA's estimate."""
        total = float(self.xla_cycles)
        for kernel in self.kernels:
            if kernel.bundles is None or kernel.hbm_bytes is None:
                return None
            total += max(kernel.bundles, kernel.hbm_bytes / self.target.bytes_per_cycle)
        return total


def compile_for(target: str, function: Callable, *arguments: Any) -> Report:
    """Compile a function of arrays for a TPU.

    Args:
        target: Key of `TARGETS`.
        arguments: Trees of `jax.ShapeDtypeStruct` or None.

    Raises:
        ValueError: The target is unknown.
        RuntimeError: libtpu is missing, or was loaded before with other settings.
        jax.errors.JaxRuntimeError: The compiler fails, for instance for too much VMEM.
    """
    folder, sharding = _dumps(), _sharding(target)
    known = set(folder.iterdir())

    def placed(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    traced = jax.jit(function).trace(*jax.tree.map(placed, arguments))
    with no_compilation_cache():
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    text = re.sub(r"/\*index=\d+\*/", "", compiled.as_text() or "")
    files = [path for path in folder.iterdir() if path not in known]
    calls = list(_pallas_calls(traced.jaxpr.jaxpr))
    memory: Any = compiled.memory_analysis()
    module = _Module(text, TARGETS[target])
    kernels = []
    for line in re.findall(r".*custom_call_target=\"tpu_custom_call\".*", text):
        name = line.split("=")[0].replace("ROOT", "").strip().lstrip("%")
        call = _call_of(name, calls)
        calls.remove(call)
        mapping = call.params["grid_mapping"]
        moved = bundles = None
        if not mapping.num_index_operands:
            moved = sum(
                _traffic(block, mapping.grid)
                for block, in_hbm in zip(mapping.block_mappings, module.in_hbm(line), strict=True)
                if in_hbm
            )
            programs = math.prod(mapping.grid)
            bundles = _bundles(_file(files, name, "final_bundles"), programs)
        kernels.append(
            Kernel(
                call.params["name"] or name.rpartition(".")[0] or name,
                moved,
                bundles,
                _vmem(_file(files, name, "pre-finalize-registers-and-allocations")),
            )
        )
    for path in files:
        path.unlink()
    of_kernels = [kernel.hbm_bytes for kernel in kernels]
    if module.has_loop or None in of_kernels:
        hbm = None
    elif kernels:
        hbm = module.hbm_bytes + sum(of_kernels)
    else:
        hbm = int((compiled.cost_analysis() or {})["bytes accessed"])
    return Report(memory.temp_size_in_bytes, hbm, module.cycles(), tuple(kernels), TARGETS[target])


def xla_cycles(text: str, target: str) -> int:
    """Return the estimated cycles of an optimised program's text, without its kernels."""
    return _Module(re.sub(r"/\*index=\d+\*/", "", text), TARGETS[target]).cycles()


@cache
def _dumps() -> Path:
    """Return the folder of libtpu's schedules; libtpu reads the setting when it is loaded."""
    folder = Path(tempfile.mkdtemp(prefix="griffin-tpu-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, value in {"JAX_PLATFORMS": "cpu", **ENVIRONMENT}.items():
        os.environ.setdefault(name, value)
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_pass_label_regex=.*final.*"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
    return folder


@cache
def _sharding(target: str) -> NamedSharding:
    if target not in TARGETS:
        raise ValueError(f"unknown TPU {target!r}: one of {', '.join(TARGETS)}")
    topology = topologies.get_topology_desc(TARGETS[target].topology, "tpu")
    return NamedSharding(Mesh(np.array(topology.devices[:1]), ("x",)), PartitionSpec())


def _file(files: list[Path], kernel: str, what: str) -> str:
    pattern = re.compile(rf"\d+-{re.escape(kernel)}-\d+-{what}\.txt")
    found = [path for path in files if pattern.fullmatch(path.name)]
    if not found:
        raise RuntimeError(
            f"libtpu wrote no schedule of {kernel}: it was loaded before griffin_eval's settings; "
            "compile in a fresh process"
        )
    return found[-1].read_text()


def _pallas_calls(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from _pallas_calls(inner)


def _call_of(name: str, calls: list[Any]) -> Any:
    """Return the Pallas call that XLA compiled under a name.

    XLA's name contains the kernel's name and its transformations; an unnamed kernel has the name of
    the function around it. Calls of the same name, or without one, are in program order.
    """
    candidates = [call for call in calls if (call.params["name"] or "") in name]
    return max(candidates, key=lambda call: len(call.params["name"] or ""))


def _traffic(block: Any, grid: tuple[int, ...]) -> int:
    """Return the bytes of a block over the grid: its part in the array at each new position."""
    array = block.array_aval
    shape = [getattr(size, "block_size", size) for size in block.block_shape]
    shape = [1 if not isinstance(size, int) else size for size in shape]
    steps = jnp.stack(
        [i.reshape(-1) for i in jnp.meshgrid(*map(jnp.arange, grid), indexing="ij")], 1
    )
    closed = block.index_map_jaxpr

    def place(step: Any) -> list:
        return eval_jaxpr(closed.jaxpr, closed.consts, *step.astype(jnp.int32))

    places = np.stack([np.broadcast_to(p, len(steps)) for p in jax.vmap(place)(steps)], 1)
    changed = np.ones(len(places), bool)
    changed[1:] = (places[1:] != places[:-1]).any(1)
    rest = np.array(array.shape) - places[changed] * np.array(shape)
    elements = np.minimum(rest, shape).prod(1).sum()
    return int(elements) * array.dtype.itemsize


def _bundles(text: str, programs: int) -> int | None:
    """Return the bundles of all programs of a grid, with those of loops times their iterations."""
    total, inside, length, steps, limit = 0, False, 0, {}, None
    depth = 1 if programs > 1 else 0  # depth of the loop over the grid
    for line in [*text.splitlines(), "0x0 : {"]:
        bundle = re.match(r"\s*(?:0x[0-9a-f]+|0)\s+(\w\w)?\s*:\s*(>*)\s*\{", line)
        if bundle is None:
            continue
        label, deep = bundle.group(1), len(bundle.group(2)) > depth
        if inside and (label == "LB" or not deep):
            if limit is None or limit[0] not in steps:
                return None
            total += length * (limit[1] // steps[limit[0]])
            inside = False
        if label == "LB" and deep:
            inside, length, steps, limit = True, 0, {}, None
        if not inside:
            total += len(bundle.group(2)) >= depth
            continue
        length += 1
        steps |= {r: int(n) for r, n in re.findall(r"(%s\S+) = sadd\.s32 (\d+), ", line)}
        test = re.search(r"scmp\.ge\.s32\.totalorder (%s\S+), (\d+) /\* loop exit", line)
        limit = (test.group(1), int(test.group(2))) if test else limit
    return total * programs


def _vmem(text: str) -> int:
    sizes = re.findall(r"space=vmem, size = (0x[0-9a-f]+)", text)
    return sum(int(size, 16) for size in sizes)


_SHAPE = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")


class _Module:
    """The operations of an optimised HLO module."""

    _FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "custom-call"}

    def __init__(self, text: str, target: Target):
        self._target = target
        self._computations: dict[str, list[str]] = {}
        lines: list[str] = []
        for line in text.splitlines():
            start = re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line)
            if start:
                lines = self._computations[start.group(1)] = []
                if line.startswith("ENTRY"):
                    self._entry = start.group(1)
            elif line.startswith("  ") and " = " in line:
                lines.append(line)
        self._sizes: dict[str, int] = {}
        self.has_loop = " while(" in text
        self.hbm_bytes = sum(self._bytes(self._computations[self._entry]).values())

    def in_hbm(self, line: str) -> list[bool]:
        """Return whether each of a kernel's inputs and outputs is in HBM rather than in VMEM."""
        result, _, operands = line.partition(" custom-call(")
        names = operands.partition(")")[0].split(",")
        outputs = _SHAPE.findall(result.partition(" = ")[2])
        return [self._sizes[name.strip()] > 0 for name in names] + [_size(s) > 0 for s in outputs]

    def cycles(self, computation: str | None = None) -> int:
        """Return estimated cycles; without an estimate those of the necessary bytes."""
        lines = self._computations[computation or self._entry]
        moved, total = self._bytes(lines), 0.0
        for line in lines:
            estimate = re.search(r'"estimated_cycles":"(\d+)"', line)
            loop = re.search(r" while\(.*condition=%(\S+), body=%([^\s,]+)", line)
            if loop:
                tests = self._computations[loop.group(1)]
                turns = [int(n) for test in tests for n in re.findall(r"constant\((\d+)\)", test)]
                total += max(turns, default=1) * self.cycles(loop.group(2))
            elif estimate:
                total += int(estimate.group(1))
            elif computation is None:
                total += moved.get(line, 0) / self._target.bytes_per_cycle
        return round(total)

    def _bytes(self, lines: list[str]) -> dict[str, int]:
        """Return the bytes of HBM that each operation reads and writes."""
        sizes, found = self._sizes, {}
        for line in lines:
            name, _, rest = line.replace("ROOT ", "").strip().partition(" = ")
            match = re.match(r"(.*?) ([a-z][\w-]*)\((.*?)\)", rest)
            if match is None:
                continue
            shapes, operation, operands = match.groups()
            sizes[name] = sum(map(_size, _SHAPE.findall(shapes)))
            if operation not in self._FREE and not operation.endswith(("-done", "-start")):
                read = sum(sizes.get(o.strip(), 0) for o in operands.split(","))
                found[line] = sizes[name] + read
            elif operation.endswith("-start"):
                found[line] = sum(sizes.get(o.strip(), 0) for o in operands.split(","))
        return found


def _size(shape: str) -> int:
    """Return the bytes of a shape such as ``bf16[1,8,128]{2,1,0}``; 0 in VMEM, ``S(1)``."""
    kind, _, dimensions = shape.partition("]")[0].partition("[")
    if "S(" in shape:
        return 0
    bits = re.search(r"\d+$", kind)
    width = int(bits.group()) // 8 if bits else 1
    return width * math.prod(int(n) for n in dimensions.split(",") if n)
