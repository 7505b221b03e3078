"""Inputs of the RG-LRUs of the JAX model, for `griffin_eval.analysis.half_lives`."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.model_jax.hooks import record_rg_lru_inputs
from griffin_eval.model_jax.loading import load
from griffin_eval.model_jax.state import State
from griffin_eval.runners.jax_runner import choose_device


def rg_lru_inputs(
    checkpoint: Checkpoint, ids: np.ndarray, chunk: int, device: str | None
) -> Iterator[list[np.ndarray]]:
    """Reads one document in steps; yields for each the inputs of all RG-LRUs, float32 [T, L].

    Args:
        checkpoint: the model.
        ids: int [N], tokens of the document.
        chunk: tokens that are read in one step; T is this, or less in the last step.
        device: name of the device in the framework; None for its default.
    """
    chosen = choose_device(device)
    graph, params = nnx.split(load(checkpoint, device=chosen))
    with jax.default_device(chosen):
        state = nnx.merge(graph, params).init_state(1, len(ids))
        for start in range(0, len(ids), chunk):
            tokens = np.zeros((1, chunk), np.int32)  # one shape, compiled once
            length = min(chunk, len(ids) - start)
            tokens[0, :length] = ids[start : start + length]
            seen, state = _step(graph, params, tokens, np.array([length], np.int32), state)
            yield [np.asarray(x[0, :length], np.float32) for x in seen]


@jax.jit(static_argnums=0)
def _step(
    graph: Any, params: Any, tokens: Array, lengths: Array, state: State
) -> tuple[list[Array], State]:
    model = nnx.merge(graph, params)
    seen = record_rg_lru_inputs(model.model.layers)
    _, state = model.step(tokens, lengths, state)
    return seen, state
