"""The gradient of attention in JAX: exact wherever documents start, of about the causal pairs alone
where no row sees a remembered key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


def written_out(q, keys, values, max_age, past):
    """Attention with all scores, as section 2.3 has it."""
    length = q.shape[1]
    age = np.arange(length, dtype=np.int32)[:, None] - np.arange(-past, length, dtype=np.int32)
    seen = (age >= 0) & (age <= np.minimum(max_age, past)[:, :, None])
    served = q.shape[2] * q.shape[3] // keys.shape[2]  # heads of queries by each head of keys
    keys, values = (
        jnp.repeat(x.reshape(*x.shape[:2], -1, q.shape[3]), served, axis=2) for x in (keys, values)
    )
    scores = jnp.einsum("bqhd,bshd->bhqs", q, keys) * q.shape[3] ** -0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqs,bshd->bqhd", weights, values).reshape(*q.shape[:2], -1)


def pulled_back(attention, arrays, cotangent):
    """What attention gives, and the gradients of its sum with these weights."""

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def both(arrays):
        y, pull = jax.vjp(attention, *arrays)
        return y, *pull(jnp.asarray(cotangent))

    return both([jnp.asarray(x) for x in arrays])


def ours(max_age, past, impl):
    """Ages are no constant to the compiler, as in a step whose state is an argument."""
    lengths, ages = jnp.full(ROWS, max_age.shape[1], jnp.int32), jnp.asarray(max_age)
    return lambda *arrays: api.local_attention(
        *arrays, jax.lax.optimization_barrier(ages), past=past, lengths=lengths, impl=impl
    )


@pytest.mark.parametrize(
    "impl, past, key_heads",
    [("cpu", 6, 1), ("cpu", LENGTH - 1, 2), ("plain", 0, 2), ("plain", LENGTH + 10, 1)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_attention_written_out(kind, past, impl, key_heads, small_blocks):
    arrays, cotangent = problem(past, key_heads)
    age = max_ages(kind)
    found = pulled_back(ours(age, past, impl), arrays, cotangent)
    right = pulled_back(lambda *x: written_out(*x, age, past), arrays, cotangent)
    reference = api.local_attention(
        *(x.astype(np.float64) for x in arrays), age, past=past, lengths=np.full(ROWS, LENGTH)
    )
    np.testing.assert_allclose(found[0], reference, rtol=0, atol=3e-6)
    for mine, other in zip(found[1:], right[1:], strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=5e-6)


@pytest.mark.parametrize("impl", ["cpu", "plain"])
def test_remembered_keys_that_no_row_sees_are_not_read(impl, small_blocks):
    past = LENGTH - 1
    arrays, cotangent = problem(past)
    right = pulled_back(ours(max_ages(KINDS[0]), past, impl), arrays, cotangent)
    for x in arrays[1:]:
        x[:, :past] = np.nan
    found = pulled_back(ours(max_ages(KINDS[0]), past, impl), arrays, cotangent)
    for mine, other in zip(found, right, strict=True):
        np.testing.assert_array_equal(mine, other)
    assert not np.asarray(found[2])[:, :past].any()


@pytest.mark.parametrize("past", [63, 64, 200, 511])
def test_rows_that_start_a_document_read_about_the_causal_pairs(past, monkeypatch):
    """With as many ranges of keys as there are blocks of queries: what is left is half a block at
    either end of each query's window."""
    length, pairs = 512, []

    def attend(block):
        pairs.append(block.visible.shape[1] * block.visible.shape[2])
        return block.q

    monkeypatch.setattr(plain_jax, "attend", attend)
    monkeypatch.setattr(plain_jax, "QUERY_BLOCK", 64)
    monkeypatch.setattr(jax, "checkpoint", lambda block, **_: block)  # which keeps what it traced
    monkeypatch.setattr(jax.lax, "map", lambda f, x: jnp.stack([f(s) for s in list(x)]))
    q, keys = jnp.zeros((1, length, 1, SIZE)), jnp.zeros((1, past + length, SIZE))
    age = jnp.arange(length, dtype=jnp.int32)[None]
    plain_jax._attend_new(q, keys, keys, age, past)
    causal = np.minimum(np.arange(length) + 1, past + 1).sum()
    assert causal <= sum(pairs) <= causal + 64 * length
