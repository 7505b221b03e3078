"""Keys and values of 16 bits in JAX on a CPU are kept as uint16, and give the same bits."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures_engine import random_ids
from parity import BASE, weights
from parity_twins import JaxTwin
from slow import slow
from xla_options import QUICK_COMPILE

from griffin_eval.model_jax.state import AttentionState
from griffin_eval.runners import jax_functions
from griffin_eval.runners.jax_runner import JaxRunner

CONFIG = replace(BASE, block_pattern=("recurrent", "local_attention"), num_layers=2)
CAPACITY = 64


def run(dtype):
    """What a runner keeps keys in, and all numbers that it gives."""
    runner = JaxRunner(JaxTwin(CONFIG, weights(CONFIG), dtype).model, QUICK_COMPILE)
    pool, found = runner.open_pool(3, CAPACITY), []
    ids, lengths = np.array(random_ids(20, 3)), np.array([15, 5])
    for sources in ([-1, -1], [0, 0]):  # from the start, then both from the same state
        hidden, pool = runner.read(pool, ids, lengths, np.array(sources), np.array([0, 1]))
        found.append(hidden)
    state = runner.start_decoding(2, CAPACITY)
    state = runner.insert_rows(state, np.arange(2), pool, np.array([1, -1]))
    for step in range(2 * CONFIG.visible_keys):
        active = np.array([1, step % 2])
        hidden, state = runner.decode_step(state, np.array(random_ids(2, step)), active)
        found.append(hidden)
    saved = runner.state_tensors(pool, 0, 30)
    pool = runner.write_state(pool, 2, saved, 30, CAPACITY)
    hidden, pool = runner.read(pool, ids, lengths, np.array([2, 2]), np.array([0, 1]))
    kept = next(layer.k.dtype for layer in pool.layers if isinstance(layer, AttentionState))
    return kept, [*found, hidden, *saved.values()]


@pytest.mark.parametrize("dtype", ["bfloat16", slow("float16")])
def test_bits_are_the_same(dtype, monkeypatch):
    kept, found = run(dtype)
    monkeypatch.setattr(jax_functions, "as_bits", lambda state: state)
    before, expected = run(dtype)
    assert (kept, before) == (jnp.uint16, jnp.dtype(dtype))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one, float), np.asarray(other, float))
        assert np.isfinite(np.asarray(one, float)).all() and np.any(one)
