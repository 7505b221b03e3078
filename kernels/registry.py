"""The choice of an implementation, the same for all operators: what each of them lacks, whether it
works on this device, and which arrays belong together."""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from griffin_eval.errors import ArgumentError
from griffin_eval.kernels import devices

logger = logging.getLogger(__name__)

# The implementations of an operator in each framework, the one to prefer first; the last takes
# everything. In PyTorch ``cpu`` is the module ``cpu_torch`` in the operator's folder.
IMPLEMENTATIONS = {
    "rglru": {
        "torch": ("triton", "cpu", "plain"),
        "jax": ("tpu", "cpu", "plain"),
        "numpy": ("reference",),
    },
    "attention": {
        "torch": ("cpu", "plain"),
        "jax": ("tpu", "cpu", "plain"),
        "numpy": ("reference",),
    },
}
PLATFORMS = {"triton": "cuda", "tpu": "tpu", "cpu": "cpu"}  # others run anywhere
COMPLEX_GATES, OTHER_CONSTANTS = "complex gates", "constant c other than 8"
SEVERAL_SEGMENTS = "more than one packed segment"
# What implementations lack, beside dtypes and shapes, which their function `unsupported` knows.
LACKS = {
    ("rglru", "triton"): (COMPLEX_GATES, OTHER_CONSTANTS),
    ("rglru", "tpu"): (COMPLEX_GATES, OTHER_CONSTANTS),
    ("rglru", "cpu"): (COMPLEX_GATES,),
    ("attention", "tpu"): (SEVERAL_SEGMENTS,),
}


class Choice(NamedTuple):
    """An implementation, and the reasons for which those preferred to it cannot run.

    Attributes:
        name: one of `IMPLEMENTATIONS`.
        refused: reason by name of each implementation that comes before it.
    """

    name: str
    refused: dict[str, str]


class Trial(NamedTuple):
    """A small problem that shows whether kernels work on this device.

    Attributes:
        of: Properties that the result depends on, such as the dtype.
        error: computes it, and returns the largest error.
    """

    of: Hashable
    error: Callable[[], float]


def choose(
    operator: str,
    x: Any,
    *others: Any,
    needs: Sequence[str] = (),
    trial: Callable[[ModuleType], Trial] | None = None,
    impl: str = "auto",
) -> Choice:
    """The implementation that will run: the first that takes these arrays where they are.

    Args:
        operator: key of `IMPLEMENTATIONS`.
        x, others: arguments of the function `unsupported` of the operator's implementations.
        needs: Keys of `LACKS` that the problem has.
        trial: Test of a module, run on devices other than a CPU.
        impl: an implementation, or ``auto``.

    Raises:
        NotImplementedError: if the one asked for does not take them, and why.
    """
    framework = devices.framework(x)
    names = IMPLEMENTATIONS[operator][framework]
    if impl not in (*names, "auto"):
        raise NotImplementedError(
            f"there is no implementation {impl!r} in {framework}: expected auto, "
            + ", ".join(names)
        )
    refused: dict[str, str] = {}
    for name in names if impl == "auto" else (impl,):
        reason = None
        if name in PLATFORMS:
            reason = _reason(operator, name, (x, *others), needs, trial)
        if reason is None:
            return Choice(name, refused)
        refused[name] = reason
    raise NotImplementedError(refused[impl])


def _reason(
    operator: str,
    name: str,
    arrays: Sequence[Any],
    needs: Sequence[str],
    trial: Callable[[ModuleType], Trial] | None,
) -> str | None:
    """The reason for which an implementation cannot run, or None."""
    for need in needs:
        if need in LACKS.get((operator, name), ()):
            return f"{name} kernels have no {need}"
    platform = devices.platform(arrays[0])
    if platform != PLATFORMS[name]:
        return f"{name} kernels run on {PLATFORMS[name]}, and the arrays are on {platform}"
    kernels = module(operator, name, arrays[0])
    reason = kernels.unsupported(*arrays)
    here = platform == "cuda" or (platform == "tpu" and devices.compiled_for_here())
    if reason or trial is None or not here:
        return reason
    problem = trial(kernels)
    return fault(f"the kernels of {kernels.__name__}", (kernels, problem.of), problem.error)


def module(operator: str, name: str, x: Any) -> ModuleType:
    """The implementation of this name in the framework of x."""
    framework = devices.framework(x)
    file = name if framework == "numpy" else f"{name}_{framework}"
    return import_module(f"griffin_eval.kernels.{operator}.{file}")


_faults: dict[Hashable, str | None] = {}


def fault(kernels: str, key: Hashable, error: Callable[[], float]) -> str | None:
    """Self-test of kernels, which is run once and logs a warning if it fails.

    Args:
        kernels: Name of the kernels in the warning.
        key: Key of the test.
        error: computes a small problem; returns its largest error, of numbers of about 1.

    Returns:
        The reason for which they cannot be used on this device, or None.
    """
    if key not in _faults:
        _faults[key] = _tried(kernels, error)
    return _faults[key]


def _tried(kernels: str, error: Callable[[], float]) -> str | None:
    try:
        off = error()
        reason = f"{kernels} are wrong here: off by {off:.2g} in a small problem"
    except Exception as problem:  # of a compiler or a driver: anything
        off, reason = float("inf"), f"{kernels} do not run here: {problem}"
    if off <= 0.05:
        return None
    logger.warning("%s; plain ones do their work", reason)
    return reason


def check_shapes(name: str, x: Any, expected: Mapping[str, tuple[Any, Sequence[int]]]) -> None:
    """Checks that arrays belong together, since kernels would read what is behind them.

    Args:
        name: Name of x.
        x: the array that the others belong to.
        expected: other arrays by name, each with the shape that it must have; None is left out.

    Raises:
        ArgumentError: shapes and devices that do not belong together, all of them.
    """
    article = "an" if name == "x" else "a"
    there = {key: pair for key, pair in expected.items() if pair[0] is not None}
    wrong = [
        f"{key} must have the shape {list(shape)} beside {article} {name} of {list(x.shape)}, "
        f"found {list(array.shape)}"
        for key, (array, shape) in there.items()
        if tuple(array.shape) != tuple(shape)
    ]
    wrong += devices.elsewhere(name, x, {key: array for key, (array, _) in there.items()})
    if wrong:
        raise ArgumentError("; ".join(wrong))


def check_widths(x: Any, weight: Any) -> None:
    """Checks that x [..., I] has as many inputs as a weight [O, I].

    Raises:
        ArgumentError: it has not.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            f"linear: x must have the {weight.shape[1]} inputs of a weight of "
            f"{list(weight.shape)}, found {x.shape[-1]} in an x of {list(x.shape)}"
        )
