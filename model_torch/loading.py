"""Loading of a checkpoint into the model, which keeps weights mapped from the file if possible."""

import numpy as np
import torch
from torch import nn

from griffin_eval.converters.checkpoint import Checkpoint, warn_not_finite
from griffin_eval.converters.tensors import drop_pages, torch_tensor
from griffin_eval.kernels.linear.quantised_torch import QuantisedMatrix
from griffin_eval.layout import ParamSpec
from griffin_eval.model_torch.griffin import Griffin, param_dtype
from griffin_eval.sharding import processes_torch
from griffin_eval.sharding.split import split_over

_SUMMED = 1 << 22  # weights that are summed at a time


def load(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Griffin:
    """Load a checkpoint of any format, tensor by tensor.

    On the CPU and without a change of dtype, weights of a safetensors file stay mapped from it;
    otherwise one tensor at a time is converted, so that the model is never in memory twice. If
    processes share the model (`griffin_eval.sharding.processes_torch.share`), each loads its part.
    A warning is logged for each tensor with NaN or infinity in its final dtype.

    Args:
        dtype: Dtype to run in; None for the checkpoint's. Λ and θ are at least float32.
        device: Device to run on; None for the CPU.

    Raises:
        CheckpointError: A tensor cannot be read, or a part differs from the manifest.
    """
    run_dtype = dtype or getattr(torch, checkpoint.dtype)
    split = split_over(checkpoint.config, processes_torch.parts())

    def make(spec: ParamSpec) -> nn.Parameter:
        if split.devices == 1:
            stored = checkpoint.torch(spec.name)
        else:
            part = split.part(spec, processes_torch.rank())
            stored = checkpoint.parts(spec.name).torch(part)
        if split.adds_once(spec) and processes_torch.rank() > 0:
            stored = torch.zeros_like(stored)
        return _parameter(spec, stored, run_dtype, device)

    model = Griffin(checkpoint.config, make)
    checkpoint.log_parts()
    return model


def load_packed(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Griffin:
    """Load a quantised checkpoint whose quantised matrices are dequantised while the model runs.

    They are copied from the file unchanged; all other parameters are loaded as by `load`.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    run_dtype = dtype or getattr(torch, checkpoint.dtype)

    def make(spec: ParamSpec) -> nn.Parameter | QuantisedMatrix:
        matrix = _quantised(checkpoint, spec, run_dtype, device)
        if matrix is not None:
            return matrix
        return _parameter(spec, checkpoint.torch(spec.name), run_dtype, device)

    return Griffin(checkpoint.config, make)


def _parameter(
    spec: ParamSpec, stored: torch.Tensor, dtype: torch.dtype, device: torch.device | None
) -> nn.Parameter:
    """Return a parameter on its device in its final dtype; log NaN and infinity."""
    value = stored.to(device=device, dtype=param_dtype(spec, dtype))
    # In pieces, since a sum in float32 first widens its input.
    sums = [piece.sum(dtype=torch.float32) for piece in value.flatten().split(_SUMMED)]
    if not torch.stack(sums).isfinite().all():
        warn_not_finite(spec.name, int((~torch.isfinite(value)).sum()), spec.size)
    return nn.Parameter(value, requires_grad=False)


def _quantised(
    checkpoint: Checkpoint, spec: ParamSpec, dtype: torch.dtype, device: torch.device | None
) -> QuantisedMatrix | None:
    """Return a matrix quantised as in the file; None if it is not quantised or an adapter changes
    it."""
    stored = checkpoint.quantised(spec.name)
    rows = None if stored is None else stored.quantised.packed_rows()
    if stored is None or rows is None:
        return None
    shifts, table = (
        None if array is None else _copied(array, device) for array in (rows.shifts, rows.table)
    )
    return QuantisedMatrix(
        rows.bits,
        _copied(rows.elements, device),
        _copied(rows.scales, device),
        shifts,
        table,
        rounded_to=getattr(torch, stored.dtype),
        dtype=dtype,
    )


def _copied(stored: np.ndarray, device: torch.device | None) -> torch.Tensor:
    tensor = torch_tensor(stored).to(device)
    drop_pages(stored)  # otherwise they count as this process's memory
    return tensor
