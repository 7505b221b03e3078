"""The TPU kernels: their numbers in interpret mode, and what the compiler says of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rglru_torch
from jax.experimental.compilation_cache import compilation_cache
from parity import relative_error
from slow import ci, slow
from torch_gradients import pulled_back
from xla_options import QUICK_COMPILE

from benchmarks.scan.tpu_compiler import TARGETS, compile_for
from griffin_eval.kernels.rglru import reference
from griffin_eval.kernels.rglru.reference import Gates
from griffin_eval.kernels.rglru.tpu import block, rglru, scan

DTYPES = ("float32", "bfloat16")
# Largest difference over largest value. h, its dtype's rounding; states; gradients.
TOLERANCES = {"float32": (1e-6, 1e-6, 3e-6), "bfloat16": (4e-3, 1e-6, 1.2e-2)}
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def check(kernel, expected, arrays, cotangents, keep, dtype):
    """Compares a kernel's results and gradients with the reference's in float64."""
    dh, dlast = cotangents

    def ours(arrays, dh, dlast):
        (h, last), pull_back = jax.vjp(kernel, *arrays)
        return h, last, pull_back((dh, dlast))

    h, last, found = jax.jit(ours, compiler_options=QUICK_COMPILE)(arrays, dh, dlast)
    h = np.asarray(h, np.float64)
    assert np.isfinite(h).all()
    flat, structure = jax.tree.flatten(jax.tree.map(_wide, arrays))

    def theirs(*flat):
        return expected(rglru_torch, *jax.tree.unflatten(structure, flat))

    kept_dh = np.where(keep, _wide(dh), 0.0)  # what is in padding means nothing
    (h_true, last_true), true = pulled_back(theirs, flat, (kept_dh, _wide(dlast)))
    exact = expected(reference, *jax.tree.unflatten(structure, flat))
    h_true = np.where(keep, h_true, 0)
    assert relative_error(h_true, np.where(keep, exact[0], 0)) <= 1e-12
    assert relative_error(last_true, exact[1]) <= 1e-12

    of_h, of_last, of_gradient = TOLERANCES[dtype]
    assert relative_error(np.where(keep, h, 0), h_true) <= of_h
    assert relative_error(np.asarray(last), last_true) <= of_last
    for a, b in zip(jax.tree.leaves(found), true, strict=True):
        assert relative_error(np.asarray(a), b) <= of_gradient


def _wide(array):
    return np.asarray(array, np.float64)


class Case:
    """Random arrays of one shape."""

    def __init__(self, batch, time, width, dtype, *, masks=False, seed=0):
        self.rng = np.random.default_rng([seed, batch, time, width])
        self.dtype = dtype
        shape = (batch, time, width)
        self.x, self.dh = self.normal(*shape), self.normal(*shape)
        self.a = jnp.asarray(self.rng.uniform(0, 1, shape) ** 0.2, dtype)
        self.h0 = self.normal(batch, width, dtype="float32")
        self.dlast = self.normal(batch, width, dtype="float32")
        self.resets = self.lengths = None
        self.keep = np.ones((batch, time, 1), bool)
        if masks:
            self.resets = self.rng.random((batch, time)) < 0.1
            self.lengths = self.rng.integers(0, time + 1, batch, dtype=np.int32)
            self.lengths[:2] = time, 0
            self.keep = np.arange(time)[None, :, None] < self.lengths[:, None, None]

    def normal(self, *shape, dtype=None):
        return jnp.asarray(self.rng.standard_normal(shape), dtype or self.dtype)

    @property
    def layout(self):
        return {"resets": self.resets, "lengths": self.lengths}

    @property
    def masks(self):
        return {name: None if m is None else jnp.asarray(m) for name, m in self.layout.items()}

    def gates(self, blocks):
        width = self.x.shape[-1]
        size = width // blocks
        weight = (blocks, size, size)
        return Gates(
            jnp.asarray(self.rng.uniform(-6, 1, width), self.dtype),
            self.normal(*weight) * jnp.asarray(size**-0.5, self.dtype),
            self.normal(blocks, size),
            self.normal(*weight) * jnp.asarray(size**-0.5, self.dtype),
            self.normal(blocks, size),
        )


def check_scan(case, interpret=True):
    check(
        functools.partial(scan.linear_scan, **case.masks, interpret=interpret),
        lambda module, *z: module.linear_scan(*z, **case.layout),
        (case.a, case.x, case.h0),
        (case.dh, case.dlast),
        case.keep,
        case.dtype,
    )


def check_rglru(case, blocks, interpret=True):
    check(
        functools.partial(rglru.rglru, **case.masks, interpret=interpret),
        lambda module, *z: module.rglru(*z, **case.layout),
        (case.x, case.gates(blocks), case.h0),
        (case.dh, case.dlast),
        case.keep,
        case.dtype,
    )


@pytest.fixture
def short_blocks(monkeypatch):
    """Blocks of 128 steps and channels, so that small arrays have several."""
    of = block.Blocks.of
    monkeypatch.setattr(
        block.Blocks,
        "of",
        lambda shape, lanes=128, most=128, **options: of(shape, lanes=lanes, most=128, **options),
    )


@pytest.mark.slow
@each_dtype
def test_the_scan_equals_the_loop(dtype, short_blocks):
    check_scan(Case(2, 137, 130, dtype, masks=dtype == "bfloat16"))


@pytest.mark.parametrize("dtype", [ci("float32"), slow("bfloat16")])
def test_the_scan_with_resets_and_lengths_equals_the_loop(dtype):
    check_scan(Case(10, 19, 3, dtype, masks=True))


@pytest.mark.slow
@each_dtype
def test_the_rglru_equals_the_equations(dtype, short_blocks):
    check_rglru(Case(2, 137, 16, dtype, masks=dtype == "bfloat16"), 2)


@pytest.mark.parametrize("dtype", [ci("float32"), slow("bfloat16")])
def test_the_rglru_with_resets_and_lengths_equals_the_equations(dtype):
    check_rglru(Case(9, 19, 12, dtype, masks=True), 3)


@pytest.mark.slow
def test_gates_of_many_programs():
    check_rglru(Case(1, 3, 640, "float32"), 5)


@pytest.mark.slow
def test_gates_too_wide_for_the_kernel():
    case = Case(3, 9, 1200, "float32", masks=True)
    check_rglru(case, 2)
    gates = case.gates(2)

    @jax.jit
    def gradients(x):
        def run(x, gates):
            return rglru.rglru(x, gates, case.h0, **case.masks, interpret=True)

        return jax.vjp(run, x, gates)[1]((case.dh, case.dlast))

    # What is in padding is not read.
    for ours, right in zip(
        jax.tree.leaves(gradients(jnp.where(case.keep, case.x, jnp.nan))),
        jax.tree.leaves(gradients(case.x)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, right)


def test_what_the_kernels_do_not_take_is_named():
    case = Case(1, 4, 8, "float32")
    gates = case.gates(2)
    with pytest.raises(NotImplementedError, match="complex"):
        rglru.rglru(case.x, gates._replace(imaginary_param=case.h0[0]), case.h0)
    with pytest.raises(NotImplementedError, match="a is float16"):
        scan.linear_scan(case.a.astype(jnp.float16), case.x, case.h0)


# What the compiler says. Nothing below runs.

MODELS = {  # width, gate blocks
    "RecurrentGemma 2B": (2560, 10),
    "RecurrentGemma 9B": (4096, 16),
    "100M": (1024, 16),
    "200M": (1536, 16),
    "400M": (2048, 16),
    "1.3B": (2560, 16),
    "7B": (5632, 16),
    "14B": (8192, 16),
}
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


def check_report(report, ideal, temporaries=0, bytes_over_ideal=1.05):
    assert report.temporary_bytes <= temporaries
    assert report.hbm_bytes <= bytes_over_ideal * ideal
    assert all(kernel.vmem_bytes <= VMEM for kernel in report.kernels)
    assert len(report.kernels) == 2


OPS = {"scan": scan.linear_scan, "RG-LRU": rglru.rglru}
each_op = pytest.mark.parametrize("op", OPS)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5e", "v6e"])
@each_dtype
@each_op
def test_no_copies_and_no_more_bytes_than_needed(op, dtype, target):
    check_report(*compiled(target, OPS[op], "RecurrentGemma 2B", dtype))


# Where XLA moves whole arrays into VMEM and back besides, since they fit.
MOVED = {
    ("scan", "bfloat16", "100M", "v6e"): 1.13,
    ("scan", "bfloat16", "200M", "v6e"): 1.38,
    ("RG-LRU", "float32", "14B", "v6e"): 1.08,
}
# All but those of the test above.
SHAPES = [
    (model, target) if target == "v5e" else slow(model, target)
    for model in MODELS
    for target in sorted(TARGETS)
    if not (target in ("v5e", "v6e") and model == "RecurrentGemma 2B")
]


@pytest.mark.slow
@pytest.mark.parametrize("model, target", SHAPES)
@each_dtype
@each_op
def test_every_shape_compiles_for_every_target(op, dtype, model, target):
    most = MOVED.get((op, dtype, model, target), 1.05)
    report, ideal = compiled(target, OPS[op], model, dtype)
    if model == "7B" and op == "RG-LRU":  # four blocks of 352: too wide
        names = [kernel.name for kernel in report.kernels]
        assert names == ["linear_scan", "linear_scan_backward"]
        return
    # Gradients of biases change their layout on some targets: a few rows.
    check_report(report, ideal, temporaries=2**18, bytes_over_ideal=most)


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
def test_what_is_compiled_is_not_cached(tmp_path, request):
    """JAX could not load it again, and would warn."""
    for name, value in {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        request.addfinalizer(functools.partial(jax.config.update, name, getattr(jax.config, name)))
        jax.config.update(name, value)
    request.addfinalizer(compilation_cache.reset_cache)
    compilation_cache.reset_cache()
    jax.jit(lambda x: jnp.sin(x) + 2)(jnp.ones(3))
    kept = set(tmp_path.iterdir())
    assert kept  # the cache is on
    for _ in range(2):
        compile_for("v5e", lambda x: jnp.sin(x) + 2, array(1, 1024, 2560, dtype="float32"))
    assert set(tmp_path.iterdir()) == kept


@pytest.mark.slow
def test_a_copy_is_seen():
    """What is asserted above can fail: a sum over a transposed copy, and a loop in XLA."""
    x = array(1, 1024, 2560, dtype="float32")
    size = 1024 * 2560 * 4
    report = compile_for("v5e", lambda x: jnp.sin(x.swapaxes(0, 1)), x)
    assert report.hbm_bytes >= 2 * size and report.xla_cycles > 0 and not report.kernels
    with pytest.raises(ValueError, match="unknown TPU 'v9'"):
        compile_for("v9", jnp.sin, x)
