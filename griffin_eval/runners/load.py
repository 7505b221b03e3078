"""Loads a checkpoint into a runner of either framework."""

import logging
import os
from pathlib import Path

from griffin_eval.arguments import FRAMEWORKS, model_dtype, text_argument
from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.tensors import ITEM_BYTES
from griffin_eval.errors import ArgumentError, MissingExtraError
from griffin_eval.layout import parameter_count
from griffin_eval.messages import did_you_mean
from griffin_eval.runners.protocol import Runner
from griffin_eval.sharding.launch import COORDINATOR, Launch
from griffin_eval.sharding.split import split_over

logger = logging.getLogger(__name__)


def load_runner(
    checkpoint: str | Path | Checkpoint,
    *,
    framework: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
) -> Runner:
    """Return the first runner of `load_runners` on one device, for a folder or file."""
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    (runner,) = load_runners(
        checkpoint, framework=framework, dtype=dtype, device=device, data_parallel=1
    )
    return runner


def load_runners(
    checkpoint: Checkpoint,
    *,
    framework: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    tensor_parallel: int = 1,
    data_parallel: int | None = None,
    launch: Launch | None = None,
    packed: bool = False,
) -> list[Runner]:
    """Load a checkpoint of any format into runners, one for each replica of the model.

    If several processes share a model (those of a launcher with PyTorch, or of `jax.distributed`
    with JAX), only the first of them returns. The others follow it and end with it.

    Args:
        framework: ``torch`` or ``jax``; None for the first of these that is installed.
        dtype: One of ``DTYPES``, or ``auto`` for the dtype of the checkpoint.
        device: The framework's name of the device; None for the best device of this machine, which
            is logged.
        tensor_parallel: Number of devices that share the weights of a replica
            (`griffin_eval.sharding`).
        data_parallel: Number of replicas. The default is one, except with JAX if ``device`` is None
            or a platform without a number: then as many as the local devices of the platform make.
        launch: This process's place among those of a launcher.
        packed: Whether quantised matrices stay quantised in memory (one device a replica).

    Raises:
        CheckpointError: The checkpoint cannot be read as a model; names the file or tensor.
        ArgumentError: Framework, dtype or device is unknown, there are too few devices, or
            ``packed`` is not possible.
        MissingExtraError: The framework is not installed.
    """
    framework, dtype = choose_framework(framework), model_dtype("dtype", dtype)
    if device is not None:
        device = text_argument("device", device)
    if packed:
        check_packed(checkpoint)
        _refuse_shared(tensor_parallel, launch)
    if launch is None or launch.rank == 0:
        _log_whole(checkpoint, dtype, tensor_parallel)
    if framework == "torch":
        from griffin_eval.runners import torch_parallel
        from griffin_eval.runners.torch_runner import TorchRunner

        if launch is not None and launch.world_size > 1:
            return [torch_parallel.join(checkpoint, dtype, device, launch)]
        if (data_parallel or 1) > 1:
            raise ArgumentError(
                f"data_parallel_size={data_parallel} with PyTorch: start as many processes with "
                "torchrun or accelerate launch, or take framework=jax"
            )
        if tensor_parallel > 1:
            return [torch_parallel.load(checkpoint, dtype, device, tensor_parallel)]
        return [TorchRunner.load(checkpoint, dtype, device, packed)]
    from griffin_eval.runners import jax_parallel
    from griffin_eval.runners.jax_runner import JaxRunner, devices_of_runners

    jax_parallel.initialize()
    mine = jax_parallel.launched(device, tensor_parallel, data_parallel)
    if packed:
        _refuse_shared(tensor_parallel, mine)
    if mine.world_size > 1:
        return jax_parallel.load(checkpoint, dtype, device, tensor_parallel, mine)
    groups = devices_of_runners(device, tensor_parallel, data_parallel)
    return [JaxRunner.load(checkpoint, dtype, group, packed) for group in groups]


def launched(
    framework: str | None, device: str | None, tensor_parallel: int, data_parallel: int | None
) -> Launch:
    """Return this process's place among those of a launcher (PyTorch) or of `jax.distributed`
    (JAX). See `load_runners` for the arguments.

    If the processes do not fit the arguments or the framework, the first one raises ArgumentError,
    and others of a launcher raise SystemExit.
    """
    framework, launch = choose_framework(framework), Launch.of_environment()
    try:
        if framework == "jax" and launch.world_size > 1:
            raise ArgumentError(
                "framework=jax takes no launcher of PyTorch: start lm_eval without one, in several "
                "processes with the variables of jax.distributed, or take framework=torch"
            )
        if framework == "torch" and launch.world_size > 1:
            return launch.shared_by(tensor_parallel, data_parallel)
    except ArgumentError:
        if launch.rank:
            raise SystemExit(2) from None
        raise
    if framework == "torch":
        if COORDINATOR in os.environ:  # otherwise each process would answer everything
            raise ArgumentError(
                f"framework=torch takes no processes of jax.distributed, and {COORDINATOR} is set: "
                "start them with torchrun or accelerate launch, take framework=jax, or unset it"
            )
        return launch
    from griffin_eval.runners import jax_parallel

    jax_parallel.initialize()
    return jax_parallel.launched(device, tensor_parallel, data_parallel)


def check_packed(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose matrices cannot stay quantised in memory."""
    if not checkpoint.codecs:
        raise ArgumentError(
            f"load=quantised: {checkpoint.path} is not quantised; leave the argument out, or "
            "quantise it first with bitsandbytes or MLX"
        )
    if "gguf" in checkpoint.codecs:
        raise ArgumentError(
            f"load=quantised takes checkpoints of bitsandbytes and MLX, and {checkpoint.path} is "
            "GGUF: leave the argument out, which dequantises it as it is loaded"
        )


def _refuse_shared(tensor_parallel: int, launch: Launch | None) -> None:
    """Refuse to share a quantised model among several devices or processes."""
    processes = 1 if launch is None else launch.world_size
    if processes > 1 or tensor_parallel > 1:
        devices = f"tensor_parallel_size={tensor_parallel}"
        found = f"{processes} processes" if processes > 1 else devices
        raise ArgumentError(
            f"load=quantised runs in one process, with one device a replica, found {found}; "
            "without it the checkpoint is dequantised, which runs everywhere"
        )


def _log_whole(checkpoint: Checkpoint, dtype: str, devices: int) -> None:
    """Log the parameters that every device holds whole although others are split."""
    found = split_over(checkpoint.config, devices)
    if found.whole:
        kept, all_of = sum(s.size for s in found.replicated()), parameter_count(found.config)
        width = ITEM_BYTES[checkpoint.dtype if dtype == "auto" else dtype]
        logger.warning(
            "%s on %d devices: every device holds these whole, since they do not divide: %s "
            "(%.0f%% of the parameters, %.1f MB of each device)",
            checkpoint.folder,
            devices,
            ", ".join(sorted(set(found.whole.values()))),
            100 * kept / all_of,
            kept * width / 1e6,
        )


def choose_framework(framework: str | None) -> str:
    """Return an installed framework: the named one, or the first one by default."""
    from importlib.util import find_spec

    if framework is None:
        installed = [name for name in FRAMEWORKS if find_spec(name)]
        if not installed:
            raise MissingExtraError("neither PyTorch nor JAX", "torch")
        return installed[0]
    if framework not in FRAMEWORKS:
        raise ArgumentError(
            f"unknown framework {framework!r}: expected {' or '.join(FRAMEWORKS)}"
            f"{did_you_mean(framework, FRAMEWORKS)}"
        )
    needs = ("torch",) if framework == "torch" else ("jax", "flax")
    for library in needs:
        if find_spec(library) is None:
            raise MissingExtraError(library, framework)
    return framework
