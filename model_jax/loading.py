"""From a checkpoint into the model: weights are copied from the mapped file one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from griffin_eval.converters.arrays.pieces import drop_pages
from griffin_eval.converters.checkpoint import Checkpoint, warn_not_finite
from griffin_eval.layout import ParamSpec
from griffin_eval.model_jax.griffin import Griffin, param_dtype


def load(
    checkpoint: Checkpoint,
    dtype: Any = None,
    device: Any = None,
) -> Griffin:
    """Loads a checkpoint of any format, tensor by tensor.

    JAX owns its memory, so every weight is copied; one at a time, so that the model is never in
    memory twice.

    Args:
        checkpoint: opened with ``Checkpoint(path)``.
        dtype: to run in; None for that of the checkpoint. Λ and θ are float32 at least.
        device: the jax.Device to run on; None for JAX's default.

    Raises:
        CheckpointError: a tensor that cannot be read.

    Logs a warning for each tensor that holds NaN or infinity in the dtype it is held in.
    """
    run_dtype = jnp.dtype(dtype or checkpoint.dtype)

    def make(spec: ParamSpec) -> nnx.Param:
        stored = checkpoint.numpy(spec.name)
        with jax.default_device(device), np.errstate(over="ignore"):  # which is said below
            # A copy even where JAX could alias the mapped file, which may change or be unmapped.
            value = jnp.array(stored.astype(param_dtype(spec, run_dtype), copy=False), copy=True)
            if not jnp.isfinite(value.sum(dtype=jnp.float32)):
                warn_not_finite(spec.name, int(jnp.sum(~jnp.isfinite(value))), spec.size)
        drop_pages(stored)  # which would count as this process's memory beside the copy
        return nnx.Param(value)

    return Griffin(checkpoint.config, make)
