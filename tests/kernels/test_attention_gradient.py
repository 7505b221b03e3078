"""The gradient of attention in JAX: exact wherever documents start, of about the causal pairs alone
where no row sees a remembered key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_torch import written_out
from slow import slow
from torch_gradients import pulled_back
from xla_options import QUICK_COMPILE

from griffin_eval.kernels.attention import api, plain_jax

ROWS, LENGTH, HEADS, SIZE = 2, 45, 2, 4


KINDS = ["documents start with the row", "one starts within", "one goes on, another starts"]


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks to a range of keys, and a block that is not whole."""
    monkeypatch.setattr(plain_jax, "QUERY_BLOCK", 4)
    monkeypatch.setattr(plain_jax, "KEY_RANGES", 3)


def max_ages(kind: str) -> np.ndarray:
    age = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    if kind == KINDS[1]:
        age[1, 17:] -= 17
    if kind == KINDS[2]:
        age[1] += 5
        age[0, :9] += 30
        age[0, 9:] -= 9
    return age


def problem(past: int, key_heads: int = 1):
    rng = np.random.default_rng(past)
    shapes = (ROWS, LENGTH, HEADS, SIZE), *[(ROWS, past + LENGTH, key_heads * SIZE)] * 2
    arrays = [rng.standard_normal(shape, np.float32) for shape in shapes]
    return arrays, rng.standard_normal((ROWS, LENGTH, HEADS * SIZE), np.float32)


@functools.cache
def ours(past, impl, key_heads):
    """Return a compiled function of arrays, ages and a cotangent that gives attention and its
    gradients. Of one program for ages of every kind: in a step they are an argument too."""

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def both(arrays, ages, cotangent):
        lengths = jnp.full(ROWS, LENGTH, jnp.int32)

        def attention(*arrays):
            return api.local_attention(*arrays, ages, past=past, lengths=lengths, impl=impl)

        y, pull = jax.vjp(attention, *arrays)
        return y, *pull(cotangent)

    return both


SHAPES = [
    ("cpu", LENGTH - 1, 1),
    slow("plain", LENGTH - 1, 1),
    slow("cpu", 6, 1),
    slow("cpu", LENGTH - 1, 2),
    slow("plain", 0, 2),
    slow("plain", LENGTH + 10, 1),
]


@pytest.mark.parametrize("impl, past, key_heads", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_attention_written_out(kind, past, impl, key_heads, small_blocks):
    arrays, cotangent = problem(past, key_heads)
    age = max_ages(kind)
    found = ours(past, impl, key_heads)(arrays, age, cotangent)
    _, right = pulled_back(lambda *x: (written_out(*x, age, past).flatten(2),), arrays, [cotangent])
    reference = api.local_attention(
        *(x.astype(np.float64) for x in arrays), age, past=past, lengths=np.full(ROWS, LENGTH)
    )
    np.testing.assert_allclose(found[0], reference, rtol=0, atol=3e-6)
    for mine, other in zip(found[1:], right, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=5e-6)


@pytest.mark.parametrize("impl", ["cpu", slow("plain")])
def test_remembered_keys_that_no_row_sees_are_not_read(impl, small_blocks):
    past = LENGTH - 1
    arrays, cotangent = problem(past)
    age, attention = max_ages(KINDS[0]), ours(past, impl, 1)
    right = attention(arrays, age, cotangent)
    for x in arrays[1:]:
        x[:, :past] = np.nan
    found = attention(arrays, age, cotangent)
    for mine, other in zip(found, right, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert not np.asarray(found[2])[:, :past].any()
