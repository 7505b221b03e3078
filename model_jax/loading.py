"""From a checkpoint folder into the model: weights are copied from the mapped file one by one."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from griffin_eval.converters.checkpoint import Checkpoint, warn_not_finite
from griffin_eval.layout import ParamSpec
from griffin_eval.model_jax.griffin import Griffin, param_dtype


def load(
    folder: str | Path,
    dtype: Any = None,
    device: Any = None,
    visible_keys: int | None = None,
) -> Griffin:
    """Loads a Hugging Face RecurrentGemma folder, tensor by tensor.

    JAX owns its memory, so every weight is copied; one at a time, so that the model is never in
    memory twice.

    Args:
        folder: holds config.json and safetensors.
        dtype: to run in; None for that of the checkpoint. Λ is float32 at least.
        device: the jax.Device to run on; None for JAX's default.
        visible_keys: overrides the config's.

    Raises:
        CheckpointError: the folder is not a checkpoint of this architecture.
    """
    checkpoint = Checkpoint(folder, visible_keys)
    run_dtype = jnp.dtype(dtype or checkpoint.dtype)

    def make(spec: ParamSpec) -> nnx.Param:
        stored = checkpoint.tensors.numpy(spec.name)
        with jax.default_device(device):
            # A copy even where JAX could alias the mapped file, which may change or be unmapped.
            value = jnp.array(stored.astype(param_dtype(spec, run_dtype), copy=False), copy=True)
            if not jnp.isfinite(value.sum(dtype=jnp.float32)):
                warn_not_finite(spec.name, int(np.sum(~np.isfinite(stored))), spec.size)
        return nnx.Param(value)

    return Griffin(checkpoint.config, make)
