"""A step copies no weights: XLA would convert a whole weight of 16 bits where a product has the
wrong form."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from parity import BASE

from griffin_eval.layout import param_specs
from griffin_eval.model_jax.decoding import DECODE_STEPS_PER_COMPACTION, DecodingState
from griffin_eval.model_jax.griffin import initialize
from griffin_eval.model_jax.layouts import DecodeLayout

# Weights are most of the memory: few tokens, a short window, and gates of small blocks.
CONFIG = replace(
    BASE, width=256, mlp_width=768, lru_width=256, num_heads=4, num_layers=3, gate_blocks=16
)
LARGEST = 2 * max(
    spec.size for spec in param_specs(CONFIG).values() if spec.name.startswith("model.layers")
)


def temporary_bytes(step, *arguments) -> int:
    graph, params = nnx.split(initialize(CONFIG, dtype=jnp.bfloat16))

    def run(params, *arguments):
        model = nnx.merge(graph, params)
        hidden, state = step(model, *arguments)
        return model.logits(hidden), state

    state = len(arguments)  # the last argument: its memory is written again
    compiled = jax.jit(run, donate_argnums=state).lower(params, *arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_reading_copies_no_weights_of_16_bits(tokens):
    state = initialize(CONFIG, dtype=jnp.bfloat16).init_state(1)

    def step(model, ids, lengths, state):
        return model.step_packed(ids, lengths, state)

    found = temporary_bytes(step, jnp.zeros(tokens, jnp.int32), jnp.full(1, tokens), state)
    assert found < LARGEST, (found, LARGEST)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_decoding_copies_no_weights_of_16_bits(rows):
    state = DecodingState.start(initialize(CONFIG, dtype=jnp.bfloat16), rows).rows

    def step(model, ids, active, state):  # without the compaction, which needs the states again
        layout = DecodeLayout(active, DECODE_STEPS_PER_COMPACTION, 0)
        return model.decode_step(ids, state, layout)

    ids = jnp.zeros(rows, jnp.int32)
    found = temporary_bytes(step, ids, jnp.ones_like(ids), state)
    assert found < LARGEST, (found, LARGEST)
