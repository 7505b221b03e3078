"""The linear recurrence in torch and JAX against the loop in numpy."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import compare
from slow import examples, slow

from griffin_eval.kernels.rglru import plain_scan_jax, plain_scan_torch, reference


def linear_scan(*arrays):
    return reference.linear_scan(*arrays)[0]


# Around the stepwise limit (8), around squares (blocks of sqrt(T)), primes, one step.
LENGTHS = (1, 2, 7, 8, 9, 10, 15, 16, 17, 25, 31, 64, 97, 100, 257)
PRECISIONS = ("float32", "float64")
each_scan = pytest.mark.parametrize("name", ["torch", "jax"])


def torch_scan(*arrays):
    return plain_scan_torch.linear_scan(*map(torch.from_numpy, arrays)).numpy()


_jitted = jax.jit(plain_scan_jax.linear_scan)


def jax_scan(*arrays):
    with precision(arrays[0].dtype):
        return np.asarray(_jitted(*map(jnp.asarray, arrays)))


def precision(dtype):
    return jax.enable_x64(True) if dtype == np.float64 else contextlib.nullcontext()


SCANS = {"torch": torch_scan, "jax": jax_scan}


def inputs(batch, length, width, dtype, seed=0):
    """Decays that forget at once, never, and anything between."""
    rng = np.random.default_rng([seed, batch, length, width])
    a = rng.uniform(0, 1, (batch, length, width)) ** rng.choice([0.01, 1.0], (batch, 1, width))
    a[rng.random(a.shape) < 0.1] = 0.0
    a[rng.random(a.shape) < 0.2] = 1.0
    x, h0 = rng.standard_normal(a.shape), rng.standard_normal((batch, width))
    return tuple(v.astype(dtype) for v in (a, x, h0))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("jax", n) if n in (1, 9, 64) else slow("jax", n)  # each of which JAX compiles
        for n in LENGTHS
    ]
    + [("torch", n) for n in LENGTHS],
)
def test_scan_equals_the_loop(name, length, dtype, record_parity):
    arrays = inputs(2, length, 5, dtype)
    found = SCANS[name](*arrays)
    assert found.dtype == dtype
    compare(record_parity, f"{name} scan - loop", dtype, found, linear_scan(*arrays))


@each_scan
@settings(max_examples=examples(10))
@given(shape=st.sampled_from([(1, 20, 6), (3, 3, 1)]), seed=st.integers(0, 2**32))
def test_scan_equals_the_loop_for_any_numbers(name, shape, seed, record_parity):
    arrays = inputs(*shape, "float32", seed)
    expected = linear_scan(*arrays)
    compare(record_parity, f"{name} scan - loop", "float32", SCANS[name](*arrays), expected)


@pytest.mark.parametrize("length", [5, 40])
@each_scan
def test_no_decay_sums_and_full_decay_forgets(name, length):
    _, x, h0 = inputs(2, length, 3, "float32")
    forgetful = SCANS[name](np.zeros_like(x), x, h0)
    np.testing.assert_array_equal(forgetful, x)
    keeping = SCANS[name](np.ones_like(x), np.zeros_like(x), h0)
    np.testing.assert_array_equal(keeping, np.broadcast_to(h0[:, None], x.shape))


@functools.cache
def expected_gradients(length):
    """By torch's own differentiation of the loop, in float64: of a, x and h0."""
    a, x, h0 = (torch.tensor(v, requires_grad=True) for v in inputs(2, length, 5, "float64"))
    h, total = h0, 0.0
    for t in range(length):
        h = a[:, t] * h + x[:, t]
        total = total + (h * torch.from_numpy(cotangent(length)[:, t])).sum()
    return [g.numpy() for g in torch.autograd.grad(total, (a, x, h0))]


def cotangent(length):
    return np.random.default_rng(1).standard_normal((2, length, 5))


def torch_gradients(arrays, dh):
    arrays = [torch.tensor(v, requires_grad=True) for v in arrays]
    h = plain_scan_torch.linear_scan(*arrays)
    return [g.numpy() for g in torch.autograd.grad(h, arrays, torch.from_numpy(dh))]


@jax.jit
def _pull_back(arrays, dh):
    return jax.vjp(plain_scan_jax.linear_scan, *arrays)[1](dh)


def jax_gradients(arrays, dh):
    with precision(dh.dtype):
        return [np.asarray(g) for g in _pull_back(tuple(map(jnp.asarray, arrays)), jnp.asarray(dh))]


GRADIENTS = {"torch": torch_gradients, "jax": jax_gradients}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("length", [slow(1), slow(2), slow(8), 9, slow(31), slow(97)])
@each_scan
def test_gradients_equal_those_of_the_loop(name, length, dtype, record_parity):
    found = GRADIENTS[name](inputs(2, length, 5, dtype), cotangent(length).astype(dtype))
    expected = expected_gradients(length)
    compare(record_parity, f"{name} scan - loop", f"gradients, {dtype}", found, expected)


@pytest.mark.parametrize("decay", [1e-30, 1e-3, 0.5])
@each_scan
def test_products_that_underflow_do_no_harm(name, decay, record_parity):
    a, x, h0 = inputs(1, 1024, 4, "float32")
    a = np.full_like(a, decay)
    found = SCANS[name](a, x, h0)
    compare(record_parity, f"{name} scan - loop", "float32", found, linear_scan(a, x, h0))
    assert all(np.isfinite(g).all() for g in GRADIENTS[name]((a, x, h0), x))


@pytest.mark.parametrize("name", ["torch", slow("jax")])
def test_a_scan_in_two_parts_carries_its_state(name, record_parity):
    a, x, h0 = inputs(2, 97, 5, "float32")
    first = SCANS[name](a[:, :40], x[:, :40], h0)
    second = SCANS[name](a[:, 40:], x[:, 40:], first[:, -1])
    found = np.concatenate([first, second], 1)
    compare(record_parity, f"{name} scan - loop", "float32", found, linear_scan(a, x, h0))


def test_the_example_of_the_docstring():
    h = linear_scan(np.full((1, 2, 1), 0.5), np.ones((1, 2, 1)), np.array([[4.0]]))
    np.testing.assert_array_equal(h, [[[3.0], [2.5]]])
