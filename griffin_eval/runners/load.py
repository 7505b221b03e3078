"""Loading a checkpoint into a runner of either framework."""

from pathlib import Path

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ArgumentError, MissingExtraError
from griffin_eval.messages import did_you_mean
from griffin_eval.runners.protocol import DTYPES, FRAMEWORKS, Runner


def load_runner(
    checkpoint: str | Path | Checkpoint,
    *,
    framework: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
) -> Runner:
    """Loads a checkpoint of any format into a runner.

    Args:
        checkpoint: folder or file, or one that is open already.
        framework: ``torch`` or ``jax``; None takes the first of these that is installed.
        dtype: one of ``DTYPES``, or ``auto`` for the dtype of the checkpoint.
        device: its name in the framework; None, or an accelerator that does not exist, takes the
            best device of this machine, which the log names.

    Raises:
        CheckpointError: it cannot be read as a model; says which file or tensor.
        ArgumentError: unknown framework, dtype or device.
        MissingExtraError: the framework is not installed.
    """
    framework = choose_framework(framework)
    if dtype not in ("auto", *DTYPES):
        raise ArgumentError(
            f"unknown dtype {dtype!r}: expected auto, {', '.join(DTYPES)}"
            f"{did_you_mean(dtype, DTYPES)}"
        )
    if framework == "torch":
        from griffin_eval.runners.torch_runner import TorchRunner as Adapter
    else:
        from griffin_eval.runners.jax_runner import JaxRunner as Adapter
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    return Adapter.load(checkpoint, dtype, device)


def load_runners(
    checkpoint: Checkpoint,
    *,
    framework: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
) -> list[Runner]:
    """A runner on each device of this process that ``device`` may mean.

    That is one, except with JAX where ``device`` is None, a platform without a number, or does not
    exist: then it is every local device of the platform, each with all of the weights.

    Args and errors: see `load_runner`.
    """
    first = load_runner(checkpoint, framework=framework, dtype=dtype, device=device)
    if first.framework == "torch":
        return [first]
    from griffin_eval.runners.jax_runner import other_devices

    return [first] + [
        load_runner(checkpoint, framework="jax", dtype=dtype, device=other)
        for other in other_devices(first.device, device)
    ]


def choose_framework(framework: str | None) -> str:
    """The framework asked for, checked to be installed; without one, the first that is."""
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
