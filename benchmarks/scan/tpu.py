"""Recurrence and attention on TPUs, compiled without one.

All figures are the compiler's or follow from its schedule (`benchmarks.scan.tpu_compiler`). The
other scans are those of DeepMind's recurrentgemma, if installed.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.peers import why_absent
from benchmarks.scan.tpu_compiler import TARGETS, compile_for
from griffin_eval.errors import ArgumentError, MissingExtraError
from griffin_eval.kernels.attention.tpu_jax import attend_rows
from griffin_eval.kernels.rglru.reference import Gates
from griffin_eval.kernels.rglru.tpu.rglru import rglru
from griffin_eval.kernels.rglru.tpu.scan import linear_scan
from griffin_eval.messages import first_line

_TILE = 8 * 128


class Shape(NamedTuple):
    """Inputs of the recurrent block, and of attention."""

    name: str
    batch: int
    time: int
    width: int
    blocks: int
    heads: int
    head_dim: int
    window: int


SHAPES = (
    Shape("RecurrentGemma 2B", 1, 8192, 2560, 10, 10, 256, 2048),
    Shape("RecurrentGemma 9B", 1, 8192, 4096, 16, 16, 256, 2048),
    Shape("Griffin 400M", 1, 8192, 2048, 16, 12, 128, 1024),
)
DTYPES = ("float32", "bfloat16")
SHORT = 1024
PEER = ("recurrentgemma.jax.scan", "recurrentgemma.jax.pallas")


def absent_peers() -> dict[str, str]:
    """Return the reasons why peers are left out, by name."""
    reason = why_absent(*PEER)
    return {} if reason is None else {"DeepMind, lax.scan and associative_scan": reason}


def shape_of(time: int, width: int, blocks: int) -> Shape:
    """Return a model of another size, with heads as wide as the gates' blocks and a window of
    2048."""
    return Shape(f"T = {time}, D = {width}", 1, time, width, blocks, blocks, width // blocks, 2048)


def measure(
    targets: Sequence[str],
    shapes: Sequence[Shape] = SHAPES,
    dtypes: Sequence[str] = DTYPES,
    tell: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Compile every implementation for every target; return a dict for each row.

    ``what`` is ``scan``, ``RG-LRU`` or ``attention``, each also ``and gradient``, or ``block``:
    convolution, gates, scan and the product with the other branch. ``bundles_per_tile`` counts for
    8 x 128 numbers, ``bundles_over_memory`` over the cycles of the ideal bytes. A figure is None if
    the compiler does not report it; ``error`` holds its message if it fails.
    """
    unknown = [target for target in targets if target not in TARGETS]
    if unknown:
        raise ArgumentError(f"unknown TPU {', '.join(unknown)}: one of {', '.join(TARGETS)}")
    if find_spec("libtpu") is None:
        raise MissingExtraError("libtpu", "tpu")
    peers = not absent_peers()
    rows = []
    for target, shape, dtype in itertools.product(targets, shapes, dtypes):
        for entry in _entries(shape, jnp.dtype(dtype), peers):
            tell(f"{target}, {shape.name}, {dtype}: {entry[0]}, {entry[1]}")
            rows.append(_row(target, shape, dtype, *entry))
    return rows


def _row(
    target: str,
    shape: Shape,
    dtype: str,
    what: str,
    implementation: str,
    ideal: int,
    function: Callable,
    arguments: tuple,
) -> dict[str, Any]:
    sizes = {key: getattr(shape, key) for key in ("batch", "time", "width")}
    row: dict[str, Any] = {"target": target, "shape": shape.name, **sizes, "dtype": dtype}
    row |= {"what": what, "implementation": implementation}
    empty = ("hbm_over_ideal", "bundles_per_tile", "bundles_over_memory", "cycles")
    row |= dict.fromkeys((*empty, "temporary_bytes", "error"))
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            report = compile_for(target, function, *arguments)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        return row | {"error": first_line(error)}
    tiles = shape.batch * shape.time * shape.width / _TILE
    memory = ideal / TARGETS[target].bytes_per_cycle
    bundles = [kernel.bundles for kernel in report.kernels if kernel.bundles is not None]
    if bundles and len(bundles) == len(report.kernels):
        row["bundles_per_tile"] = sum(bundles) / tiles
        row["bundles_over_memory"] = sum(bundles) / memory
    if report.hbm_bytes is not None:
        row["hbm_over_ideal"] = report.hbm_bytes / ideal
    return row | {"cycles": report.cycles, "temporary_bytes": report.temporary_bytes}


def _entries(shape: Shape, dtype: Any, peers: bool) -> Iterator[tuple]:
    """Yield (what, implementation, ideal bytes, function, arguments), with or without peers."""

    def array(*dimensions: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dimensions, dtype)

    x = array(shape.batch, shape.time, shape.width)
    h0 = array(shape.batch, shape.width, dtype=jnp.dtype("float32"))
    size = shape.width // shape.blocks
    weight, bias = array(shape.blocks, size, size), array(shape.blocks, size)
    gates = Gates(array(shape.width), weight, bias, weight, bias)
    conv = (array(4, shape.width), array(shape.width))
    one = x.size * dtype.itemsize

    yield "scan", "griffin", 3 * one, linear_scan, (x, x, h0)
    other_scans = _other_scans() if peers else {}
    for name, other in other_scans.items():
        yield "scan", name, 3 * one, other, (x, x, h0)
    if peers:  # at full length the compiler takes minutes
        length = min(SHORT, shape.time)
        short = array(shape.batch, length, shape.width)
        name, ideal = f"associative_scan, T = {length}", 3 * short.size * dtype.itemsize
        yield "scan", name, ideal, _associative_scan, (short, short, h0)
    yield "RG-LRU", "griffin", 2 * one, rglru, (x, gates, h0)
    yield "scan and gradient", "griffin", 8 * one, _with_gradient(linear_scan), ((x, x, h0), x, h0)
    yield "RG-LRU and gradient", "griffin", 6 * one, _with_gradient(rglru), ((x, gates, h0), x, h0)

    q = array(shape.batch, shape.time, shape.heads, shape.head_dim)
    keys = array(shape.batch, shape.window - 1 + shape.time, shape.head_dim)
    max_age = array(shape.batch, shape.time, dtype=jnp.dtype("int32"))
    ideal = 2 * (q.size + keys.size) * dtype.itemsize
    yield "attention", "griffin", ideal, _attention, (q, keys, keys, max_age)
    whole = (_with_gradient(_attention), ((q, keys, keys, max_age), q))
    yield "attention and gradient", "griffin", 2 * ideal, *whole

    def of(scan: Callable) -> Callable:
        return lambda x, gates, h0: _by_xla(scan, x, gates, h0)

    recurrences = [("griffin", rglru), *((name, of(scan)) for name, scan in other_scans.items())]
    for name, recurrence in recurrences:
        yield "block", name, 3 * one, _block(recurrence), (x, x, conv, gates, h0)


def _associative_scan(a: Array, x: Array, h0: Array) -> Any:
    from recurrentgemma.jax import scan

    return scan.lru_associative_scan(x, a, h0)


def _with_gradient(function: Callable) -> Callable:
    def run(arguments: tuple, *cotangents: Array) -> Any:
        outputs, pull_back = jax.vjp(function, *arguments)
        return outputs, pull_back(jax.tree.unflatten(jax.tree.structure(outputs), cotangents))

    return run


def _attention(q: Array, keys: Array, values: Array, max_age: Array) -> Array:
    exact = "highest" if q.dtype == jnp.float32 else "default"  # precision in the models
    with jax.default_matmul_precision(exact):
        return attend_rows(q, keys, values, max_age)


def _other_scans() -> dict[str, Callable]:
    from recurrentgemma.jax import pallas, scan

    return {
        "DeepMind": lambda a, x, h0: pallas.lru_pallas_scan(x, a, h0),
        "lax.scan": lambda a, x, h0: scan.lru_linear_scan(x, a, h0),
    }


def _block(recurrence: Callable) -> Callable:
    """Return the recurrent block without linear layers: convolution, RG-LRU, branch product."""

    def run(x: Array, y: Array, conv: tuple[Array, Array], gates: Gates, h0: Array) -> Any:
        weight, bias = (p.astype(jnp.float32) for p in conv)
        taps, time = weight.shape[0], x.shape[1]
        padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
        total = bias
        for k in range(taps):
            total = total + padded[:, k : k + time].astype(jnp.float32) * weight[k]
        h, last = recurrence(total.astype(x.dtype), gates, h0)
        return h * jax.nn.gelu(y, approximate=True), last

    return run


def _by_xla(scan: Callable, x: Array, gates: Gates, h0: Array) -> tuple[Array, Array]:
    """Compute the RG-LRU with another scan, and its gates by XLA."""
    batch, time, width = x.shape
    blocks = x.reshape(batch, time, *gates.input_weight.shape[:2])

    def gate(weight: Array, bias: Array) -> Array:
        product = jnp.einsum("btgi,gio->btgo", blocks, weight, preferred_element_type=jnp.float32)
        return jax.nn.sigmoid((product + bias.astype(jnp.float32)).reshape(batch, time, width))

    i_t = gate(gates.input_weight, gates.input_bias)
    r_t = gate(gates.recurrent_weight, gates.recurrent_bias)
    log_a = -8.0 * jax.nn.softplus(gates.recurrent_param.astype(jnp.float32)) * r_t
    gated = jnp.sqrt(-jnp.expm1(2 * log_a)) * i_t * x.astype(jnp.float32)
    return scan(jnp.exp(log_a).astype(x.dtype), gated.astype(x.dtype), h0)


def table(rows: Sequence[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """Return title, headings and cells of the rows of `measure`."""
    names = ["target", "shape", "dtype", "what", "implementation"]
    ratios = ("hbm_over_ideal", "bundles_per_tile", "bundles_over_memory")
    cells = []
    for row in rows:
        numbers = ["" if row[key] is None else f"{row[key]:.2f}" for key in ratios]
        cycles = "" if row["cycles"] is None else f"{row['cycles']:,.0f}"
        memory = row["temporary_bytes"]
        numbers += ["refused" if row["error"] else cycles]
        numbers += ["" if memory is None else f"{memory / 1e6:.1f} MB"]
        cells.append([*(row[name] for name in names), *numbers])
    headings = [*names, "HBM / ideal", "bundles / tile", "/ memory", "cycles", "temporaries"]
    return "compiled without a TPU; bundles and cycles are lower bounds", headings, cells
