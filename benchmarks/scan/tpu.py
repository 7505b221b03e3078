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

from benchmarks.commands import tell
from benchmarks.peers import absent_peers
from benchmarks.report import Report
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


SHAPES = [
    Shape("RecurrentGemma 2B", 1, 8192, 2560, 10, 10, 256, 2048),
    Shape("RecurrentGemma 9B", 1, 8192, 4096, 16, 16, 256, 2048),
    Shape("Griffin 400M", 1, 8192, 2048, 16, 12, 128, 1024),
]
SHORT = 1024
PEERS = {
    "DeepMind, lax.scan and associative_scan": (
        "recurrentgemma.jax.scan",
        "recurrentgemma.jax.pallas",
    )
}


def shape_of(time: int, width: int, blocks: int) -> Shape:
    """Return a model of another size, with heads as wide as the gates' blocks and a window of
    2048."""
    return Shape(f"T = {time}, D = {width}", 1, time, width, blocks, blocks, width // blocks, 2048)


def measure(targets: Sequence[str], shapes: Sequence[Shape], report: Report) -> dict[str, str]:
    """Compile every implementation for every target, and return why peers are left out.

    ``what`` is ``scan``, ``RG-LRU`` or ``attention``, each also ``and gradient``, or ``block``:
    convolution, gates, scan and the product with the other branch. ``bundles_per_tile`` is for 8 x
    128 numbers, ``bundles_over_memory`` over the cycles that the ideal bytes take. A figure is None
    where the compiler is silent or refuses, which a note says.

    Raises:
        ArgumentError: A target is unknown.
        MissingExtraError: libtpu is not installed.
    """
    unknown = [target for target in targets if target not in TARGETS]
    if unknown:
        raise ArgumentError(f"unknown TPU {', '.join(unknown)}: one of {', '.join(TARGETS)}")
    if find_spec("libtpu") is None:
        raise MissingExtraError("libtpu", "tpu")
    absent = absent_peers(PEERS)
    rows = report.tables["compiled without a TPU; bundles and cycles are lower bounds"] = []
    for target, shape, dtype in itertools.product(targets, shapes, ("float32", "bfloat16")):
        for what, implementation, ideal, function, arguments in _entries(
            shape, jnp.dtype(dtype), not absent
        ):
            row = {"target": target, "shape": shape.name, "dtype": dtype}
            row |= {"what": what, "implementation": implementation}
            tell(", ".join(row.values()))
            try:
                figures = _figures(target, shape, ideal, function, arguments)
            except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
                report.notes.append(f"{', '.join(row.values())}: refused: {first_line(error)}")
                figures = {}
            rows.append(row | figures)
    return absent


def _figures(
    target: str, shape: Shape, ideal: int, function: Callable, arguments: tuple
) -> dict[str, float | None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        report = compile_for(target, function, *arguments)
    tiles = shape.batch * shape.time * shape.width / _TILE
    bundles = report.bundles
    return {
        "hbm_over_ideal": None if report.hbm_bytes is None else report.hbm_bytes / ideal,
        "bundles_per_tile": None if bundles is None else bundles / tiles,
        "bundles_over_memory": bundles and bundles / (ideal / TARGETS[target].bytes_per_cycle),
        "cycles": report.cycles,
        "temporary_MB": report.temporary_bytes / 1e6,
    }


def _entries(shape: Shape, dtype: Any, peers: bool) -> Iterator[tuple]:
    """Yield operation, implementation, ideal bytes, function and arguments of each row."""

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
    exact = "highest" if q.dtype == jnp.float32 else "default"  # models run so
    with jax.default_matmul_precision(exact):
        return attend_rows(q, keys, values, max_age)


def _other_scans() -> dict[str, Callable]:
    from recurrentgemma.jax import pallas, scan

    return {
        "DeepMind": lambda a, x, h0: pallas.lru_pallas_scan(x, a, h0),
        "lax.scan": lambda a, x, h0: scan.lru_linear_scan(x, a, h0),
    }


def _block(recurrence: Callable) -> Callable:
    """Return the block between its linear layers: convolution, RG-LRU, product of branches."""

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
    """Compute the RG-LRU with its gates left to XLA, around another scan."""
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
