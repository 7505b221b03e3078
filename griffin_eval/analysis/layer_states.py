"""The states and gates of every layer after each token of a text."""

import importlib
from typing import Any

import numpy as np

from griffin_eval.analysis.half_lives import CHUNK, decay_rates, gate_parameters, gate_values
from griffin_eval.converters.checkpoint import Checkpoint


def layer_states(
    checkpoint: Checkpoint, ids: np.ndarray, *, framework: str, model: Any
) -> dict[str, np.ndarray]:
    """Return float32 tensors of T tokens by name.

    For a recurrent layer I:

        layers.I.x               [T, L], input of the RG-LRU
        layers.I.h               [T, L], state after each token, equation (4)
        layers.I.recurrent_gate  [T, D], r_t of equation (1)
        layers.I.input_gate      [T, D], i_t of equation (2)
        layers.I.log_a           [T, D], log a_t = -c softplus(Λ) r_t of equation (3)

    For an attention layer: ``layers.I.k`` (rotated) and ``layers.I.v`` [T, J], all key heads. D is
    L for real channels, L / 2 for complex ones.

    Args:
        ids: int32 [T], tokens of the text.
    """
    own: Any = importlib.import_module(f"griffin_eval.analysis.gates_{framework}")
    steps = list(own.layer_values(model, ids, CHUNK))
    rates = {layer.number: layer.rate for layer in decay_rates(checkpoint)}
    found: dict[str, np.ndarray] = {}
    for index in range(checkpoint.config.num_layers):
        values = {
            name: np.concatenate([step[index][name] for step in steps]) for name in steps[0][index]
        }
        if index in rates:
            for name in ("recurrent_gate", "input_gate"):
                values[name] = gate_values(values["x"], *gate_parameters(checkpoint, index, name))
            values["log_a"] = (-rates[index] * values["recurrent_gate"]).astype(np.float32)
        found |= {f"layers.{index}.{name}": value for name, value in values.items()}
    return found
