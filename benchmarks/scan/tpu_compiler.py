"""Compile for a TPU where there is none, and read what the compiler reports.

libtpu compiles on any Linux machine for any TPU. For a kernel it writes the schedule: bundles of
instructions, one bundle per cycle without waits, so their number is a lower bound of the cycles.
For XLA's own operations it writes an estimate of the cycles. Nothing here is measured on a TPU.
"""

import atexit
import contextlib
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr  # pyright: ignore
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.core import jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.shard.collectives import computations, shape_bytes


class Target(NamedTuple):
    """A TPU: its smallest slice, and bytes/s of HBM and cycles/s of a core by its makers."""

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
# Settings that libtpu reads when it is loaded, with which it looks for no TPU.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Kernel(NamedTuple):
    """A Pallas kernel as compiled.

    Attributes:
        hbm_bytes: Bytes of its blocks, each fetched when its place changes; None where a table
            among its arguments gives the places.
        bundles: Bundles of all programs; None where a loop has no fixed length, or such a table
            says which programs work.
    """

    name: str
    hbm_bytes: int | None
    bundles: int | None
    vmem_bytes: int


class Report(NamedTuple):
    """The compiler's figures of a function.

    Attributes:
        temporary_bytes: Bytes of HBM between its operations.
        hbm_bytes: Bytes that all operations move; None where a loop or a kernel hides them.
        xla_cycles: Cycles that the compiler estimates, without those of kernels.
    """

    temporary_bytes: int
    hbm_bytes: int | None
    xla_cycles: int
    kernels: tuple[Kernel, ...]
    target: Target

    @property
    def bundles(self) -> int | None:
        """Bundles of all kernels; None if there are none, or one of them is unknown."""
        bundles = [kernel.bundles for kernel in self.kernels]
        return None if None in bundles or not bundles else sum(filter(None, bundles))

    @property
    def cycles(self) -> float | None:
        """XLA's estimate, and of each kernel the larger of bundles and bytes over bandwidth."""
        total = float(self.xla_cycles)
        for kernel in self.kernels:
            if kernel.bundles is None or kernel.hbm_bytes is None:
                return None
            total += max(kernel.bundles, kernel.hbm_bytes / self.target.bytes_per_cycle)
        return total


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Turn JAX's compilation cache off, which cannot load programs that have no device."""
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX would not look at the setting again otherwise
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def compile_for(target: str, function: Callable, *arguments: Any) -> Report:
    """Compile a function for a TPU, a key of `TARGETS`.

    The arguments are trees of `jax.ShapeDtypeStruct` or None.

    Raises:
        ValueError: The target is unknown.
        RuntimeError: libtpu is missing, or was loaded before without the settings made here.
        jax.errors.JaxRuntimeError: The compiler refuses the function, for too much VMEM perhaps.
    """
    folder, sharding = _dumps(), _sharding(target)
    known = set(folder.iterdir())

    def placed(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    traced = jax.jit(function).trace(*jax.tree.map(placed, arguments))
    with no_compilation_cache():
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    text, memory = compiled.as_text() or "", cast(Any, compiled.memory_analysis())
    files = [path for path in folder.iterdir() if path not in known]
    calls = list(_pallas_calls(traced.jaxpr.jaxpr))
    module, kernels = Module(text, TARGETS[target]), []
    for line in re.findall(r".*custom_call_target=\"tpu_custom_call\".*", module.text):
        name = line.split("=")[0].replace("ROOT", "").strip().lstrip("%")
        call = _call_of(name, calls)
        calls.remove(call)
        mapping = call.params["grid_mapping"]
        moved = bundles = None
        if not mapping.num_index_operands:
            blocks = zip(mapping.block_mappings, module.in_hbm(line), strict=True)
            moved = sum(_traffic(block, mapping.grid) for block, in_hbm in blocks if in_hbm)
            bundles = _bundles(_file(files, name, "final_bundles"), math.prod(mapping.grid))
        registers = _file(files, name, "pre-finalize-registers-and-allocations")
        vmem = re.findall(r"space=vmem, size = (0x[0-9a-f]+)", registers)
        label = call.params["name"] or name.rpartition(".")[0] or name
        kernels.append(Kernel(label, moved, bundles, sum(int(size, 16) for size in vmem)))
    for path in files:
        path.unlink()
    moved = [kernel.hbm_bytes for kernel in kernels]
    if " while(" in text or None in moved:
        hbm = None
    elif kernels:
        hbm = module.hbm_bytes + sum(filter(None, moved))
    else:
        hbm = int((compiled.cost_analysis() or {})["bytes accessed"])
    cycles = module.cycles()
    return Report(memory.temp_size_in_bytes, hbm, cycles, tuple(kernels), TARGETS[target])


@cache
def _dumps() -> Path:
    """Return the folder of libtpu's schedules, after settings that are read when it is loaded."""
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
    """Return the bytes of a block that lie in the array, each time that its place changes."""
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
    """Return the bundles of all programs of a grid: those of a loop as often as it turns."""
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


_SHAPE = re.compile(r"\w+\[[\d,]*\](?:\{[^}]*\})?")
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "custom-call"}


class Module:
    """The operations of an optimised HLO module, from its text."""

    def __init__(self, text: str, target: Target):
        self.text = re.sub(r"/\*index=\d+\*/", "", text)
        self._target, self._computations = target, computations(self.text)
        (self._entry,) = re.findall(r"^ENTRY %(\S+) \(", self.text, re.M)
        self._sizes: dict[str, int] = {}
        self.hbm_bytes = sum(self._bytes(self._computations[self._entry]).values())

    def in_hbm(self, line: str) -> list[bool]:
        """Return which inputs and outputs of a kernel XLA has not put into VMEM beforehand."""
        result, _, operands = line.partition(" custom-call(")
        names = operands.partition(")")[0].split(",")
        outputs = _SHAPE.findall(result.partition(" = ")[2])
        sizes = [self._sizes[name.strip()] for name in names] + list(map(_size, outputs))
        return [size > 0 for size in sizes]

    def cycles(self, computation: str | None = None) -> int:
        """Return the estimated cycles without those of kernels; where the compiler says nothing,
        those of the bytes that must move."""
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
        sizes, moved = self._sizes, {}
        for line in lines:
            name, _, rest = line.replace("ROOT ", "").strip().partition(" = ")
            match = re.match(r"(.*?) ([a-z][\w-]*)\((.*?)\)", rest)
            if match is None:
                continue
            shapes, operation, operands = match.groups()
            sizes[name] = sum(map(_size, _SHAPE.findall(shapes)))
            read = sum(sizes.get(o.strip(), 0) for o in operands.split(","))
            if operation.endswith("-start"):
                moved[line] = read
            elif operation not in _FREE and not operation.endswith("-done"):
                moved[line] = sizes[name] + read
        return moved


def _size(shape: str) -> int:
    """Return the bytes of HBM of a shape such as ``bf16[1,8,128]{2,1,0:S(1)}``, none in VMEM."""
    return 0 if "S(" in shape else shape_bytes(shape.partition("]")[0])
