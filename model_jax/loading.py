"""Loading of a checkpoint into the model, which copies weights from the mapped file one by one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from griffin_eval.converters.checkpoint import Checkpoint, warn_not_finite
from griffin_eval.converters.tensors import drop_pages
from griffin_eval.errors import ArgumentError
from griffin_eval.kernels.linear.quantised_jax import QuantisedMatrix
from griffin_eval.layout import ParamSpec
from griffin_eval.model_jax.griffin import Griffin, param_dtype
from griffin_eval.sharding.mesh_jax import param_sharding
from griffin_eval.sharding.split import MODEL, split_over


def load(
    checkpoint: Checkpoint,
    dtype: Any = None,
    device: Any = None,
) -> Griffin:
    """Load a checkpoint of any format, tensor by tensor.

    JAX owns its memory, so every weight is copied; one at a time, so that the model is never in
    memory twice. A warning is logged for each tensor with NaN or infinity in its final dtype.

    Args:
        dtype: Dtype to run in; None for the checkpoint's. Λ and θ are at least float32.
        device: jax.Device to run on, None for JAX's default, or a mesh that splits the weights:
            each device reads its own part, and `nnx.get_partition_spec` returns each parameter's
            axes.

    Raises:
        CheckpointError: A tensor cannot be read, or a part differs from the manifest.
    """
    run_dtype = jnp.dtype(dtype or checkpoint.dtype)
    mesh = device if isinstance(device, jax.sharding.Mesh) else None
    split = split_over(checkpoint.config, mesh.shape.get(MODEL, 1) if mesh else 1)

    def put(spec: ParamSpec) -> jax.Array:
        held = param_dtype(spec, run_dtype)
        if mesh is None:
            return _copied(checkpoint.numpy(spec.name), held)
        where, parts = param_sharding(mesh, split, spec), checkpoint.parts(spec.name)
        value = jax.make_array_from_callback(
            spec.shape, where, lambda part: parts.numpy(part or ()).astype(held, copy=True)
        )
        parts.release()
        return value

    def make(spec: ParamSpec) -> nnx.Param:
        one_device = None if mesh else device
        with jax.default_device(one_device), np.errstate(over="ignore"):  # warned about below
            value = put(spec)
            _warn_not_finite(spec, value)
        if mesh is None:
            return nnx.Param(value)
        # For trainers that call `nnx.get_partition_spec`; the value is already sharded so.
        return nnx.Param(value, out_sharding=split.axes(spec), eager_sharding=False)

    model = Griffin(checkpoint.config, make)
    checkpoint.log_parts()
    return model


def load_packed(checkpoint: Checkpoint, dtype: Any = None, device: Any = None) -> Griffin:
    """Load a quantised checkpoint whose quantised matrices are dequantised while the model runs.

    They are copied from the file unchanged; all other parameters are loaded as by `load`.

    Raises:
        ArgumentError: The device is a mesh, which cannot split quantised matrices.
        CheckpointError: A tensor cannot be read.
    """
    if isinstance(device, jax.sharding.Mesh):
        raise ArgumentError(
            f"load=quantised runs on one device, found a mesh of {device.size}: give one, or load "
            "the checkpoint dequantised"
        )
    run_dtype = jnp.dtype(dtype or checkpoint.dtype)

    def make(spec: ParamSpec) -> nnx.Param:
        with jax.default_device(device), np.errstate(over="ignore"):  # warned about below
            matrix = _quantised(checkpoint, spec, run_dtype)
            if matrix is not None:
                return nnx.Param(matrix)
            value = _copied(checkpoint.numpy(spec.name), param_dtype(spec, run_dtype))
            _warn_not_finite(spec, value)
            return nnx.Param(value)

    return Griffin(checkpoint.config, make)


def _quantised(checkpoint: Checkpoint, spec: ParamSpec, dtype: jnp.dtype) -> QuantisedMatrix | None:
    """Return a matrix quantised as in the file; None if it is not quantised or an adapter changes
    it."""
    stored = checkpoint.quantised(spec.name)
    rows = None if stored is None else stored.quantised.packed_rows()
    if stored is None or rows is None:
        return None
    elements, scales, shifts, table = (
        None if array is None else _copied(array, array.dtype)
        for array in (rows.elements, rows.scales, rows.shifts, rows.table)
    )
    rounded_to = jnp.dtype(stored.dtype)
    return QuantisedMatrix(rows.bits, elements, scales, shifts, table, rounded_to, dtype)


def _copied(stored: np.ndarray, dtype: Any) -> jax.Array:
    """Copy an array even if JAX could alias the mapped file, which may change or be unmapped."""
    value = jnp.array(stored.astype(dtype, copy=False), copy=True)
    drop_pages(stored)  # otherwise they count as this process's memory
    return value


def _warn_not_finite(spec: ParamSpec, value: jax.Array) -> None:
    if not jnp.isfinite(value.sum(dtype=jnp.float32)):
        warn_not_finite(spec.name, int(jnp.sum(~jnp.isfinite(value))), spec.size)
