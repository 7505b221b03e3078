"""What the compiler says of the TPU kernels; nothing here runs.

tests/kernels/test_kernels.py has their numbers, in interpret mode.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from slow import ci, slow

from benchmarks.scan.tpu_compiler import TARGETS, compile_for
from griffin_eval.kernels.rglru.reference import Gates
from griffin_eval.kernels.rglru.tpu import rglru, scan

DTYPES = ("float32", "bfloat16")
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


MODELS = {"RecurrentGemma 2B": (2560, 10), "200M": (1536, 16), "7B": (5632, 16)}  # width, gates
VMEM = 16 * 2**20  # the smallest default limit


def array(*shape, dtype):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def with_gradient(op):
    def run(arguments, masks, dh, dlast):
        outputs, pull_back = jax.vjp(functools.partial(op, **masks), *arguments)
        return outputs, pull_back((dh, dlast))

    return run


def compiled(target, op, model, dtype, batch=1, time=8192, lengths=False):
    """Report of an op and its gradient with resets, and the bytes that they must move."""
    width, blocks = MODELS[model]
    x, h0 = array(batch, time, width, dtype=dtype), array(batch, width, dtype="float32")
    masks = {
        "resets": array(batch, time, dtype=bool),
        "lengths": array(batch, dtype="int32") if lengths else None,
    }
    sequence = batch * time * width * jnp.dtype(dtype).itemsize
    if op is scan.linear_scan:
        arguments, ideal = (x, x, h0), 8 * sequence
    else:
        size = width // blocks
        weight, bias = array(blocks, size, size, dtype=dtype), array(blocks, size, dtype=dtype)
        gates = Gates(array(width, dtype=dtype), weight, bias, weight, bias)
        arguments = x, gates, h0
        ideal = 6 * sequence + 3 * 2 * width * size * jnp.dtype(dtype).itemsize
    return compile_for(target, with_gradient(op), arguments, masks, x, h0), ideal


OPS = {"scan": scan.linear_scan, "RG-LRU": rglru.rglru}
each_op = pytest.mark.parametrize("op", OPS)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v6e"])
@each_dtype
@each_op
def test_no_copies_and_no_more_bytes_than_needed(op, dtype, target):
    report, ideal = compiled(target, OPS[op], "RecurrentGemma 2B", dtype)
    assert report.temporary_bytes == 0
    assert report.hbm_bytes <= 1.05 * ideal
    assert all(kernel.vmem_bytes <= VMEM for kernel in report.kernels)
    assert len(report.kernels) == 2


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_gates_that_are_too_wide_compile_for_every_target(target):
    report, _ = compiled(target, rglru.rglru, "7B", "bfloat16")  # blocks of 352
    assert [kernel.name for kernel in report.kernels] == ["linear_scan", "linear_scan_backward"]


@pytest.mark.ci
@each_op
def test_awkward_shapes_compile(op):
    report, _ = compiled("v5e", OPS[op], "200M", "bfloat16", batch=3, time=777, lengths=True)
    assert len(report.kernels) == 2


@pytest.mark.parametrize(
    ("dtype", "target"),
    [
        ci("float32", "v5e"),
        ci("bfloat16", "v6e"),
        slow("float32", "v6e"),
        slow("bfloat16", "v5e"),
    ],
)
def test_the_scan_is_bound_by_memory(dtype, target):
    x, h0 = array(1, 8192, 2560, dtype=dtype), array(1, 2560, dtype="float32")
    report = compile_for(target, scan.linear_scan, x, x, h0)
    (kernel,) = report.kernels
    ideal = 3 * 8192 * 2560 * jnp.dtype(dtype).itemsize
    assert report.temporary_bytes == 0
    assert report.hbm_bytes <= 1.01 * ideal
    assert kernel.bundles <= ideal / TARGETS[target].bytes_per_cycle


@pytest.mark.ci
def test_the_rglru_moves_little_more_than_its_input_and_output():
    x, h0 = array(1, 8192, 2560, dtype="bfloat16"), array(1, 2560, dtype="float32")
    weight, bias = (array(10, *rest, dtype="bfloat16") for rest in ((256, 256), (256,)))
    gates = Gates(array(2560, dtype="bfloat16"), weight, bias, weight, bias)
    report = compile_for("v5e", rglru.rglru, x, gates, h0)
    assert report.temporary_bytes == 0
    assert report.hbm_bytes <= 1.1 * 2 * 8192 * 2560 * 2


@pytest.mark.slow
def test_a_copy_is_seen():
    """What is asserted above can fail: a sum over a transposed copy, and a loop in XLA."""
    x = array(1, 1024, 2560, dtype="float32")
    size = 1024 * 2560 * 4
    report = compile_for("v5e", lambda x: jnp.sin(x.swapaxes(0, 1)), x)
    assert report.hbm_bytes >= 2 * size and report.xla_cycles > 0 and not report.kernels
    with pytest.raises(ValueError, match="unknown TPU 'v9'"):
        compile_for("v9", jnp.sin, x)
