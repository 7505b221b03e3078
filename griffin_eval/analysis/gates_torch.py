"""Layer inputs and states of the PyTorch model for each token, for `griffin_eval.analysis`."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from griffin_eval.model_torch.griffin import Griffin
from griffin_eval.model_torch.hooks import record_temporal


def twin_of(model: Griffin) -> Any:
    """Return a copy of a model that shares its parameters, for changes to its modules."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


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
    model = twin_of(model)
    seen = record_temporal(model.model.layers)
    weight = model.model.embed_tokens.weight
    state = model.init_state(1, len(ids))
    for start in range(0, len(ids), chunk):
        tokens = torch.from_numpy(ids[None, start : start + chunk]).to(weight.device, torch.int64)
        with torch.inference_mode():
            lengths = torch.tensor([tokens.shape[1]], device=weight.device)
            _, state = model.step(tokens, lengths, state)
        yield [{name: x[0].float().cpu().numpy() for name, x in layer.items()} for layer in seen]
        seen.clear()
