"""Inputs of the RG-LRUs of the PyTorch model, for `griffin_eval.analysis.half_lives`."""

from collections.abc import Iterator

import numpy as np
import torch

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.model_torch.hooks import record_rg_lru_inputs
from griffin_eval.model_torch.loading import load
from griffin_eval.runners.torch_runner import choose_device


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
    model = load(checkpoint, device=choose_device(device)).eval()
    seen = record_rg_lru_inputs(model.model.layers)
    weight = model.model.embed_tokens.weight
    state = model.init_state(1, len(ids))
    for start in range(0, len(ids), chunk):
        tokens = torch.from_numpy(ids[None, start : start + chunk]).to(weight.device, torch.int64)
        with torch.inference_mode():
            lengths = torch.tensor([tokens.shape[1]], device=weight.device)
            _, state = model.step(tokens, lengths, state)
        yield [x[0].float().cpu().numpy() for x in seen]
        seen.clear()
