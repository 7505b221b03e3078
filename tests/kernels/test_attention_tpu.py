"""Local attention on a TPU: its numbers in interpret mode, and what the compiler says of it."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_torch import written_out
from flax import nnx
from parity import BASE, relative_error
from slow import ci, slow
from torch_gradients import pulled_back
from xla_options import QUICK_COMPILE

from benchmarks.scan.tpu_compiler import TARGETS, compile_for
from griffin_eval.kernels import devices, registry
from griffin_eval.kernels.attention import api, reference, tpu_jax
from griffin_eval.model_jax.griffin import initialize
from griffin_eval.model_jax.state import PoolRows
from griffin_eval.runners.jax_runner import JaxRunner

interpreted = functools.partial(tpu_jax.attend_rows, interpret=True)
# Largest difference over largest value, of what comes out and of gradients.
TOLERANCES = {"float32": (2e-6, 5e-6), "bfloat16": (1e-2, 2e-2)}


def results(arrays, max_age, cotangent):
    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def both(arrays, max_age, cotangent):
        out, pull_back = jax.vjp(lambda *arrays: interpreted(*arrays, max_age), *arrays)
        return out, *pull_back(cotangent)

    return [np.asarray(value, np.float64) for value in both(arrays, max_age, cotangent)]


# A row that goes on, one that starts in the chunk and one that starts with it.
@pytest.mark.parametrize(
    ("length", "past", "key_heads", "dtype"),
    [
        ci(130, 70, 2, "float32"),
        slow(130, 70, 2, "bfloat16"),
        slow(128, 300, 1, "float32"),
        slow(400, 1, 1, "bfloat16"),
    ],
)
def test_numbers_are_those_of_attention_written_out(length, past, key_heads, dtype):
    rng = np.random.default_rng(length)
    start = np.arange(length)
    max_age = np.stack([start + 40, np.where(start < 90, start + 5000, start - 90), start])
    joined = 3, past + length, key_heads * 128
    shapes = [(3, length, 2 * key_heads, 128), joined, joined]
    arrays = [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]
    cotangent = jnp.asarray(rng.standard_normal(shapes[0]), dtype)
    found = results(arrays, jnp.asarray(max_age, jnp.int32), cotangent)
    (output,), gradients = pulled_back(
        lambda *arrays: (written_out(*arrays, max_age, past),), arrays, [cotangent]
    )
    of_output, of_gradient = TOLERANCES[dtype]
    floats = [np.asarray(v, np.float64) for v in arrays]
    right = reference.local_attention(*floats, max_age, past=past, lengths=[length] * 3)
    assert relative_error(output, right.reshape(output.shape)) <= 1e-12
    assert relative_error(found[0], output) <= of_output
    for ours, theirs in zip(found[1:], gradients, strict=True):
        assert relative_error(ours, theirs) <= of_gradient


def as_on_a_tpu(monkeypatch, attention):
    """Make models call this attention; count the calls."""
    calls = []

    def counted(*arrays):
        calls.append(arrays[0].shape)
        return attention(*arrays)

    monkeypatch.setattr(registry, "_faults", {})  # nothing was tried yet
    where = SimpleNamespace(**vars(devices) | {"platform": lambda x: "tpu"})
    monkeypatch.setattr(registry, "devices", where)
    monkeypatch.setattr(tpu_jax, "attend_rows", counted)
    return calls


CONFIG = dataclasses.replace(
    BASE,
    vocab_size=32,
    width=128,
    mlp_width=128,
    num_heads=1,
    num_layers=2,
    lru_width=128,
    gate_blocks=1,
    block_pattern=("recurrent", "local_attention"),
    visible_keys=100,
)


@pytest.mark.ci
def test_models_read_rows_and_single_segments_with_it(monkeypatch):
    model = initialize(CONFIG)
    graph, params = nnx.split(model)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 300)), jnp.int32)
    lengths, resets = jnp.asarray([150, 128]), jnp.zeros((2, 150), bool).at[1, 70].set(True)
    after = model.step(tokens[:, :150], lengths, model.init_state(2), resets)[1]

    def read(count):
        def rows(params, tokens, state, resets):
            hidden, after = nnx.merge(graph, params).step(tokens, lengths, state, resets)
            read = jnp.arange(tokens.shape[1])[None] < lengths[:, None]  # the rest is padding
            return jnp.where(read[:, :, None], hidden, 0.0), after

        def segment(params, tokens, state):
            rows = PoolRows(*jnp.zeros((3, 1), jnp.int32))
            return nnx.merge(graph, params).step_packed(tokens, lengths[:1], state, rows)

        new, one = tokens[:, 150 : 150 + count], jax.tree.map(lambda leaf: leaf[:1], after)
        compiled = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
        first = compiled(rows)(params, new, after, resets[:, :count])
        return first, compiled(segment)(params, new[0], one)

    expected = read(150)
    assert JaxRunner(model).attention_kernel == "cpu"
    calls = as_on_a_tpu(monkeypatch, interpreted)
    found = read(150)
    assert calls == [(1, 256, 2, 128), (2, 150, 1, 128), (1, 150, 1, 128)]  # the first is a trial
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(np.asarray(ours), np.asarray(theirs)) <= 1e-5
    assert JaxRunner(model).attention_kernel == "plain, tpu in steps of one text"
    hawk = dataclasses.replace(CONFIG, block_pattern=("recurrent",))
    assert JaxRunner(initialize(hawk)).attention_kernel == "none"
    read(127)  # fewer tokens than it takes
    assert len(calls) == 3


def no_such_instruction(*arrays):
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        (no_such_instruction, "do not run here: no such instruction"),
        slow(lambda *arrays: interpreted(*arrays) / 2, "are wrong here: off by"),
    ],
)
def test_it_gives_way_where_it_does_not_work(attention, said, monkeypatch, caplog):
    as_on_a_tpu(monkeypatch, attention)
    q = jnp.zeros((1, 128, 1, 128))
    choice = api.choose(q)
    assert said in choice.refused["tpu"] and choice.name == "plain"
    assert said in caplog.text and "plain implementations are used instead" in caplog.text


def test_what_it_does_not_take_is_named():
    for shape, dtype, said in (
        ((1, 128, 1, 128), "float16", "float32 and bfloat16, not float16"),
        ((1, 128, 1, 64), "float32", "whole 128 dimensions, not 64"),
        ((1, 127, 1, 128), "float32", "128 queries of a row or more, not 127"),
    ):
        assert said in tpu_jax.unsupported(jnp.zeros(shape, dtype))


def compiled(target, dtype, length, gradient):
    """RecurrentGemma 2B's attention: 10 heads of 256, a window of 2048."""

    def array(*shape, kind=dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(kind))

    q, keys = array(1, length, 10, 256), array(1, length + 2047, 256)
    max_age = array(1, length, kind="int32")

    def pull_back(q, keys, values, max_age, cotangent):
        attention = functools.partial(tpu_jax.attend_rows, max_age=max_age)
        return jax.vjp(attention, q, keys, values)[1](cotangent)

    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        if gradient:
            return compile_for(target, pull_back, q, keys, keys, max_age, q)
        return compile_for(target, tpu_jax.attend_rows, q, keys, keys, max_age)


@pytest.mark.parametrize(
    ("target", "dtype", "gradient"),
    [
        slow("v5e", "float32", False),
        ci("v5e", "bfloat16", True),
        *(slow(target, "float32", True) for target in sorted(TARGETS)),
    ],
)
def test_no_scores_are_kept(target, dtype, gradient):
    """Queries and results lie head by head for the kernel; scores would be 80 times as large."""
    report = compiled(target, dtype, 8192, gradient)
    queries = 8192 * 10 * 256 * jnp.dtype(dtype).itemsize
    assert [kernel.name.partition("_segmented")[0] for kernel in report.kernels] == [
        "splash_mqa_fwd",
        *(["splash_mqa_dkv", "splash_mqa_dq"] if gradient else []),
    ]
    assert max(kernel.vmem_bytes for kernel in report.kernels) <= 16 * 2**20
    assert report.temporary_bytes <= 2.5 * queries, report.temporary_bytes / queries
