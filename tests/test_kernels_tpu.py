"""The TPU kernels: their numbers in interpret mode, and what the compiler says of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parity import QUICK_COMPILE, relative_error

from griffin_eval.kernels.rglru import reference, rglru_tpu, scan_tpu, tpu_block
from griffin_eval.kernels.rglru.reference import Gates
from griffin_eval.kernels.rglru.tpu_compile import TARGETS, compile_for

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
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):

        def theirs(arrays, dh, dlast):
            (h, last), pull_back = jax.vjp(expected, *arrays)
            return h, last, pull_back((dh, dlast))

        arrays, dh, dlast = jax.tree.map(_wide, (arrays, dh, dlast))
        dh = jnp.where(keep, dh, 0.0)  # what is in padding means nothing
        h_true, last_true, true = jax.jit(theirs, compiler_options=QUICK_COMPILE)(arrays, dh, dlast)

    of_h, of_last, of_gradient = TOLERANCES[dtype]
    assert relative_error(np.where(keep, h, 0), np.where(keep, h_true, 0)) <= of_h
    assert relative_error(np.asarray(last), np.asarray(last_true)) <= of_last
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(true), strict=True):
        assert relative_error(np.asarray(a), np.asarray(b)) <= of_gradient


def _wide(array):
    return jnp.asarray(np.asarray(array, np.float64))


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
        functools.partial(scan_tpu.linear_scan, **case.masks, interpret=interpret),
        functools.partial(reference.linear_scan, **case.layout, xp=jnp),
        (case.a, case.x, case.h0),
        (case.dh, case.dlast),
        case.keep,
        case.dtype,
    )


def check_rglru(case, blocks, interpret=True):
    check(
        functools.partial(rglru_tpu.rglru, **case.masks, interpret=interpret),
        functools.partial(reference.rglru, **case.layout, xp=jnp),
        (case.x, case.gates(blocks), case.h0),
        (case.dh, case.dlast),
        case.keep,
        case.dtype,
    )


@pytest.fixture
def short_blocks(monkeypatch):
    """Blocks of 128 steps and channels, so that small arrays have several."""
    of = tpu_block.Blocks.of
    monkeypatch.setattr(
        tpu_block.Blocks,
        "of",
        lambda shape, lanes=128, most=128, **options: of(shape, lanes=lanes, most=128, **options),
    )


@each_dtype
def test_the_scan_equals_the_loop(dtype, short_blocks):
    check_scan(Case(2, 137, 130, dtype))


@each_dtype
def test_the_scan_with_resets_and_lengths_equals_the_loop(dtype):
    check_scan(Case(10, 19, 3, dtype, masks=True))


@each_dtype
def test_the_rglru_equals_the_equations(dtype, short_blocks):
    check_rglru(Case(2, 137, 16, dtype), 2)


@each_dtype
def test_the_rglru_with_resets_and_lengths_equals_the_equations(dtype):
    check_rglru(Case(9, 19, 12, dtype, masks=True), 3)


def test_gates_of_many_programs():
    check_rglru(Case(1, 3, 1024, "float32"), 16)
