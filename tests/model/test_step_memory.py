"""A step copies no weights: XLA would convert a whole weight of 16 bits, or transpose one of 32,
where a product has the wrong form."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from parity import BASE
from slow import slow

from griffin_eval.layout import param_specs
from griffin_eval.model_jax.decoding import DecodingState
from griffin_eval.model_jax.griffin import initialize
from griffin_eval.model_jax.state import AttentionState, PoolRows

# Weights are most of the memory: few tokens, a short window, and gates of small blocks.
CONFIG = replace(
    BASE, width=256, mlp_width=768, lru_width=256, num_heads=4, num_layers=3, gate_blocks=16
)
LARGEST = max(
    spec.size for spec in param_specs(CONFIG).values() if spec.name.startswith("model.layers")
)


def temporary_bytes(step, *arguments, dtype) -> int:
    graph, params = nnx.split(initialize(CONFIG, dtype=dtype))

    def run(params, *arguments):
        model = nnx.merge(graph, params)
        hidden, state = step(model, *arguments)
        return model.logits(hidden), state

    state = len(arguments)  # the last argument: its memory is written again
    compiled = jax.jit(run, donate_argnums=state).lower(params, *arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_reading_copies_no_weights(tokens, dtype):
    state = initialize(CONFIG, dtype=dtype).init_state(1)

    def step(model, ids, lengths, pool):
        rows = PoolRows(*jnp.zeros((3, 1), jnp.int32))
        return model.step_packed(ids, lengths, pool, rows)

    found = temporary_bytes(
        step, jnp.zeros(tokens, jnp.int32), jnp.full(1, tokens), state, dtype=dtype
    )
    assert found < LARGEST * jnp.dtype(dtype).itemsize


@pytest.mark.ci
def test_reading_copies_no_pool_of_states():
    """XLA would copy all keys of the pool, which attention reads and the step then writes."""
    pool = initialize(CONFIG).init_state(2000)
    keys = next(layer.k for layer in pool.layers if isinstance(layer, AttentionState))

    def step(model, ids, lengths, pool):
        rows = PoolRows(*jnp.arange(12, dtype=jnp.int32).reshape(3, 4))
        return model.step_packed(ids, lengths, pool, rows)

    lengths = jnp.full(4, 2)
    found = temporary_bytes(step, jnp.zeros(8, jnp.int32), lengths, pool, dtype="float32")
    assert found < keys.nbytes / 2


@pytest.mark.parametrize(
    ("rows", "dtype"), [(2, "bfloat16"), slow(1, "bfloat16"), slow(8, "float32")]
)
def test_decoding_copies_no_weights(rows, dtype):
    state = DecodingState.start(initialize(CONFIG, dtype=dtype), rows).rows

    def step(model, ids, active, state):
        return model.step_rings(ids, active, state)

    ids = jnp.zeros(rows, jnp.int32)
    found = temporary_bytes(step, ids, jnp.ones_like(ids), state, dtype=dtype)
    assert found < LARGEST * jnp.dtype(dtype).itemsize
