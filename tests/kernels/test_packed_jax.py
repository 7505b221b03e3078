"""Matrices that stay quantised in JAX, against what numpy dequantises them to."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import examples, fast

from griffin_eval.converters.codecs import mlx
from griffin_eval.converters.codecs.bitsandbytes import code_of
from griffin_eval.converters.codecs.encode import ENCODINGS
from griffin_eval.kernels.linear import packed_jax
from griffin_eval.kernels.linear.packed_jax import MOST_ROWS, PackedMatrix
from griffin_eval.model_jax.layers import product

DTYPES = ("float32", "bfloat16", "float16")
COMPILED = ("bnb-nf4", "bnb-int8", "mlx-4", "mlx-8")


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def matrix(encoding, dtype, outputs, inputs, seed=0, run=None):
    """A packed matrix, and what numpy dequantises it to, in the dtype to run in."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((outputs, inputs)) * rng.choice([1e-5, 1, 30], (outputs, 1))
    encoded = ENCODINGS[encoding].encode(weight.astype(numpy_dtype(dtype)))
    elements, scales, *shifts = encoded.parts
    rounded_to = encoded.values.dtype.name
    if encoding == "bnb-int8":
        kind, bits, elements = "int8", 8, elements.reshape(outputs, inputs)
    else:
        kind, bits = ("nf4", 4) if encoding == "bnb-nf4" else ("affine", int(encoding[-1]))
        elements = elements.view(np.uint8).reshape(outputs, -1)
    packed = PackedMatrix(
        kind,
        bits,
        jnp.asarray(elements),
        jnp.asarray(scales.reshape(outputs, -1)),
        jnp.asarray(shifts[0].reshape(outputs, -1)) if shifts else None,
        jnp.array(code_of("nf4")) if kind == "nf4" else None,
        jnp.dtype(rounded_to),
        jnp.dtype(run or rounded_to),
    )
    return packed, jnp.asarray(encoded.values.reshape(outputs, inputs)).astype(packed.dtype)


def unrounded(packed):
    """The values of a matrix in 8 bits, computed in float64."""
    elements, scales = np.asarray(packed.elements), np.asarray(packed.scales, np.float64)
    if packed.kind == "int8":
        return elements.view(np.int8) * scales / 127
    numbers = elements.reshape(*scales.shape, -1)
    shifts = np.asarray(packed.shifts, np.float64)
    return (numbers * scales[..., None] + shifts[..., None]).reshape(elements.shape)


def same_bits(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(
        np.asarray(found).view(np.uint8), np.asarray(expected).view(np.uint8)
    )


def without_kernel(monkeypatch):
    monkeypatch.setattr(packed_jax, "_missing", lambda: "no compiler")


def test_the_compiled_kernel_is_called():
    assert packed_jax._missing() is None
    for name in ENCODINGS:
        packed, _ = matrix(name, "float32", 8, 64)
        reason = packed_jax.unsupported(jnp.ones((2, 64)), packed)
        assert (reason is None) == (name in COMPILED)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
@given(
    dtype=st.sampled_from(DTYPES),
    run=st.sampled_from([None, "float32"]),
    outputs=st.integers(1, 40),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=examples(15))
def test_every_value_is_that_which_is_read(encoding, dtype, run, outputs, blocks, seed):
    packed, dense = matrix(encoding, dtype, outputs, 64 * blocks, seed, run)
    assert packed.shape == dense.shape
    same_bits(jax.jit(PackedMatrix.dense)(packed), dense)
    rows = np.random.default_rng(seed).integers(0, outputs, (2, 3))
    same_bits(jax.jit(lambda packed, rows: packed[rows])(packed, jnp.asarray(rows)), dense[rows])


_AS_USERS_COMPILE = """
import sys
import jax, jax.numpy as jnp, ml_dtypes, numpy as np
from griffin_eval.converters.codecs import mlx
from griffin_eval.kernels.linear.packed_jax import PackedMatrix
rng, rows, columns = np.random.default_rng(0), 40, 256
for dtype in ("float32", "bfloat16", "float16"):
    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64, 128):
            size = rows, columns // group
            words = rng.integers(0, 1 << 32, (rows, columns * bits // 32), np.uint32)
            scales, shifts = (
                (rng.standard_normal(size) * 10.0 ** rng.integers(-6, 2, (rows, 1))).astype(
                    np.dtype(getattr(ml_dtypes, dtype, dtype))
                )
                for _ in range(2)
            )
            expected = mlx.dequantised(words, scales, shifts, bits, group).reshape(rows, columns)
            for run in ("float32", "bfloat16"):
                parts = map(jnp.asarray, (words.view(np.uint8), scales, shifts))
                dtypes = jnp.dtype(dtype), jnp.dtype(run)
                packed = PackedMatrix("affine", bits, *parts, None, *dtypes)
                found = np.asarray(jax.jit(PackedMatrix.dense)(packed)).view(np.uint8)
                wanted = np.asarray(jnp.asarray(expected).astype(run)).view(np.uint8)
                assert np.array_equal(found, wanted), (dtype, bits, group, run)
print("same")
"""


@pytest.mark.slow
def test_values_are_the_same_where_xla_optimises():
    """It fuses products with sums, and leaves roundings out, which it does not in other tests."""
    environment = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", _AS_USERS_COMPILE], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "same\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3, 5, 6])
@pytest.mark.parametrize("group", [32, 128])
def test_numbers_of_any_bits(bits, group):
    rng = np.random.default_rng(bits)
    words = rng.integers(0, 1 << 32, (5, 256 * bits // 32), np.uint32)
    scales, shifts = (rng.standard_normal((5, 256 // group)).astype(np.float32) for _ in range(2))
    expected = mlx.dequantised(words, scales, shifts, bits, group).reshape(5, 256)
    parts = map(jnp.asarray, (words.view(np.uint8), scales, shifts))
    float32 = jnp.dtype("float32")
    packed = PackedMatrix("affine", bits, *parts, None, float32, float32)
    same_bits(packed.dense(), jnp.asarray(expected))
    same_bits(packed[jnp.array([4, 0, 4])], jnp.asarray(expected[[4, 0, 4]]))


@pytest.mark.parametrize("compiled", fast([True], [True, False]))
@pytest.mark.parametrize("encoding", fast(["mlx-4"], ENCODINGS))
@given(
    dtype=st.sampled_from(["float32", "bfloat16"]),
    rows=st.integers(1, 10),
    outputs=st.integers(1, 90),
    blocks=st.integers(1, 3),
)
@settings(max_examples=examples(2))
def test_products_are_those_of_the_dequantised_matrix(
    encoding, compiled, dtype, rows, outputs, blocks
):
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            without_kernel(patch)
        patch.setattr(packed_jax, "ROWS", 32)
        packed, dense = matrix(encoding, dtype, outputs, 64 * blocks, run=dtype)
        rng = np.random.default_rng(rows)
        x = jnp.asarray(rng.standard_normal((rows, 1, 64 * blocks)), dtype)
        fused = packed_jax.unsupported(x, packed) is None
        found = jax.jit(lambda x, packed: product(x, packed))(x, packed)  # traced anew
    x64, dense64 = np.asarray(x, np.float64), np.asarray(dense, np.float64)
    if fused and dtype == "bfloat16" and packed.bits == 8:  # before they are rounded
        dense64 = unrounded(packed)
    scale = (np.abs(x64) @ np.abs(dense64).T).max()
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(found), x64 @ dense64.T, rtol=0, atol=1e-6 * scale)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("rows", [2, MOST_ROWS["float32"] + 1])
def test_gradients_reach_what_comes_before(encoding, rows):
    packed, dense = matrix(encoding, "float32", 40, 64)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, 64)), jnp.float32)

    def loss(x, weight):
        return jnp.square(product(x, weight)).sum()

    expected = np.asarray(jax.grad(loss)(x, dense))
    found = np.asarray(jax.grad(loss)(x, packed))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_one_matrix_is_dequantised_at_a_time(encoding, monkeypatch):
    """A chain of products, of which XLA could dequantise all the matrices before the first."""
    width, count = 256, 12
    matrices = [matrix(encoding, "float32", width, width, seed)[0] for seed in range(count)]

    def chain(x, matrices):
        for weight in matrices:
            x = product(x, weight)
        return x

    x = jnp.ones((MOST_ROWS["float32"] + 1, width), jnp.float32)
    memory = jax.jit(chain).lower(x, matrices).compile().memory_analysis()
    whole = 4 * width * width
    assert whole <= memory.temp_size_in_bytes < 2.5 * whole
    monkeypatch.setattr(packed_jax, "ROWS", 32)  # now of a large matrix, in parts
    memory = jax.jit(lambda *a: chain(*a)).lower(x, matrices[:1]).compile().memory_analysis()
    assert memory.temp_size_in_bytes < whole / 2
