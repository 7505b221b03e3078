"""From a checkpoint folder into the model: weights stay mapped from the file where they can."""

from pathlib import Path

import torch
from torch import nn

from griffin_eval.converters.checkpoint import Checkpoint, warn_not_finite
from griffin_eval.layout import ParamSpec
from griffin_eval.model_torch.griffin import Griffin, param_dtype


def load(
    folder: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    visible_keys: int | None = None,
) -> Griffin:
    """Loads a Hugging Face RecurrentGemma folder, tensor by tensor.

    On the CPU and without a change of dtype a weight is the file itself, mapped; otherwise one
    tensor at a time is converted, so that the model is never in memory twice.

    Args:
        folder: holds config.json and safetensors.
        dtype: to run in; None for that of the checkpoint. Λ is float32 at least.
        device: to run on; None for the CPU.
        visible_keys: overrides the config's.

    Raises:
        CheckpointError: the folder is not a checkpoint of this architecture.
    """
    checkpoint = Checkpoint(folder, visible_keys)
    run_dtype = dtype or getattr(torch, checkpoint.dtype)

    def make(spec: ParamSpec) -> nn.Parameter:
        stored = checkpoint.tensors.torch(spec.name)
        if not torch.isfinite(stored.sum(dtype=torch.float32)):
            warn_not_finite(spec.name, int((~torch.isfinite(stored)).sum()), spec.size)
        value = stored.to(device=device, dtype=param_dtype(spec, run_dtype))
        return nn.Parameter(value, requires_grad=False)

    return Griffin(checkpoint.config, make)
