"""From a checkpoint into the model: weights stay mapped from the file where they can."""

import numpy as np
import torch
from torch import nn

from griffin_eval.converters.arrays.torch import torch_tensor
from griffin_eval.converters.checkpoint import Checkpoint, warn_not_finite
from griffin_eval.converters.codecs.bitsandbytes import code_of
from griffin_eval.converters.codecs.quantised import Dequantised, Quantised
from griffin_eval.errors import ArgumentError
from griffin_eval.kernels.linear import cuda_torch
from griffin_eval.kernels.linear.packed_torch import Blocks, PackedMatrix
from griffin_eval.layout import ParamSpec
from griffin_eval.model_torch.griffin import Griffin, param_dtype
from griffin_eval.sharding import processes_torch
from griffin_eval.sharding.split import split_over

_SUMMED = 1 << 22  # weights at a time


def load(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Griffin:
    """Loads a checkpoint of any format, tensor by tensor.

    On the CPU and without a change of dtype a weight of a safetensors file is mapped from it;
    otherwise one tensor at a time is converted, so that the model is never in memory twice. Where
    processes share the model (`griffin_eval.sharding.processes_torch.share`), each takes its part.

    Args:
        checkpoint: opened with ``Checkpoint(path)``.
        dtype: to run in; None for that of the checkpoint. Λ and θ are float32 at least.
        device: to run on; None for the CPU.

    Raises:
        CheckpointError: a tensor that cannot be read, or a part that is not what the manifest says.

    Logs a warning for each tensor that holds NaN or infinity in the dtype it is held in.
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
    """Loads a quantised checkpoint. Its quantised matrices stay so and are dequantised while the
    model runs; all others are as in `load`. On a CPU they are mapped from the file.

    Args:
        checkpoint, dtype: as of `load`.
        device: a CPU or a CUDA device; None for the CPU.

    Raises:
        ArgumentError: another device, or a matrix that the kernels for a CUDA device do not know.
        CheckpointError: a tensor that cannot be read.
    """
    run_dtype, where = dtype or getattr(torch, checkpoint.dtype), device or torch.device("cpu")
    if where.type not in ("cpu", "cuda"):
        raise ArgumentError(
            f"load=quantised with framework=torch runs on a CPU or a CUDA device, found {where}: "
            "add device=cpu"
        )

    def make(spec: ParamSpec) -> nn.Parameter | PackedMatrix:
        matrix = _packed(checkpoint, spec, run_dtype, where)
        if matrix is not None:
            return matrix
        return _parameter(spec, checkpoint.torch(spec.name), run_dtype, device)

    return Griffin(checkpoint.config, make)


def _parameter(
    spec: ParamSpec, stored: torch.Tensor, dtype: torch.dtype, device: torch.device | None
) -> nn.Parameter:
    """A parameter on its device, in the dtype that it is held in; NaN and infinity are logged."""
    value = stored.to(device=device, dtype=param_dtype(spec, dtype))
    # In pieces: a sum in float32 widens what it adds up first.
    sums = [piece.sum(dtype=torch.float32) for piece in value.flatten().split(_SUMMED)]
    if not torch.stack(sums).isfinite().all():
        warn_not_finite(spec.name, int((~torch.isfinite(value)).sum()), spec.size)
    return nn.Parameter(value, requires_grad=False)


def _packed(
    checkpoint: Checkpoint, spec: ParamSpec, dtype: torch.dtype, device: torch.device
) -> PackedMatrix | None:
    """A matrix as it is quantised in the file; None if it is not, or an adapter changes it."""
    stored, container = checkpoint.quantised(spec.name), checkpoint.container
    if stored is None or not isinstance(container, Dequantised) or len(spec.shape) != 2:
        return None
    foreign, blocks = checkpoint.homes[spec.name][0].foreign, _blocks(container, stored, spec)
    if device.type == "cuda":
        reason = "the Triton kernels have bitsandbytes' and MLX's blocks of 64 elements"
        if blocks is not None:
            blocks = blocks.to(device)
            reason = cuda_torch.unsupported(blocks, dtype)
            if reason is None:
                return cuda_torch.DevicePackedMatrix(blocks, dtype)
        raise ArgumentError(
            f"load=quantised on {device}: no kernel for {spec.name}, {stored.scheme}, in "
            f"{str(dtype).removeprefix('torch.')}: {reason}; leave load out, or add device=cpu"
        )

    def read(start: int, stop: int) -> torch.Tensor:
        return torch_tensor(container.slice(foreign, start, stop))

    rows, columns = spec.shape
    return PackedMatrix((rows, columns), dtype, read, blocks)


def _blocks(container: Dequantised, stored: Quantised, spec: ParamSpec) -> Blocks | None:
    """The tensors of a matrix that kernels compute with; None where it is in other blocks."""
    names, rows = stored.blocks, spec.shape[0]
    if names is None:
        return None
    elements, scales = container.stored.torch(names.elements), names.scales
    scales = (
        torch.from_numpy(scales)
        if isinstance(scales, np.ndarray)
        else container.stored.torch(scales)
    )
    shifts = None if names.shifts is None else container.stored.torch(names.shifts)
    return Blocks(
        names.packing,
        elements.contiguous().view(torch.uint8).reshape(rows, -1),
        scales.reshape(rows, -1),
        shifts,
        getattr(torch, stored.dtype),
        torch.from_numpy(code_of(names.packing)) if names.packing in ("nf4", "fp4") else None,
    )
