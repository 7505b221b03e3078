"""Layer inputs and states of the JAX model for each token, for `griffin_eval.analysis`."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array

from griffin_eval.model_jax.griffin import Griffin
from griffin_eval.model_jax.hooks import record_temporal
from griffin_eval.model_jax.state import State


def layer_values(
    model: Griffin, ids: np.ndarray, chunk: int
) -> Iterator[list[dict[str, np.ndarray]]]:
    """Read one document in steps; the model is not changed.

    Args:
        ids: int [N], tokens of the document.
        chunk: Number of tokens of one step; T is this, or less in the last step.

    Yields:
        For each step and layer float32 [T, …] arrays: ``x`` and ``h`` [T, L], the input of the
        RG-LRU and its state, or ``k`` and ``v`` [T, J], the keys and values of attention.
    """
    graph, params = nnx.split(model)
    (device,) = model.model.embed_tokens.weight[...].devices()
    with jax.default_device(device):
        state = model.init_state(1, len(ids))
        for start in range(0, len(ids), chunk):
            tokens = np.zeros((1, chunk), np.int32)  # a fixed shape compiles once
            length = min(chunk, len(ids) - start)
            tokens[0, :length] = ids[start : start + length]
            seen, state = _step(graph, params, tokens, np.array([length], np.int32), state)
            yield [
                {name: np.asarray(x[0, :length], np.float32) for name, x in layer.items()}
                for layer in seen
            ]


@jax.jit(static_argnums=0)
def _step(
    graph: Any, params: Any, tokens: Array, lengths: Array, state: State
) -> tuple[list[dict[str, Array]], State]:
    model = nnx.merge(graph, params)
    seen = record_temporal(model.model.layers)
    _, state = model.step(tokens, lengths, state)
    return seen, state
