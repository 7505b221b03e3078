"""The choice of an implementation, the same for all operators, and checks of shapes."""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from griffin_eval.errors import ArgumentError
from griffin_eval.kernels import devices

logger = logging.getLogger(__name__)

# Implementations of an operator in each framework, in order of preference; the last supports
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
# Unsupported features. Dtypes and shapes are checked by each module's `unsupported`.
LACKS = {
    ("rglru", "triton"): (COMPLEX_GATES, OTHER_CONSTANTS),
    ("rglru", "tpu"): (COMPLEX_GATES, OTHER_CONSTANTS),
    ("rglru", "cpu"): (COMPLEX_GATES,),
    ("attention", "tpu"): (SEVERAL_SEGMENTS,),
}


class Choice(NamedTuple):
    """The name of an implementation, and the reasons against each preferred one by name."""

    name: str
    refused: dict[str, str]


class Trial(NamedTuple):
    """A small problem that shows whether kernels work on this device.

    Attributes:
        of: Properties that the result depends on, such as the dtype.
        error: Function that computes the problem and returns the largest error.
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
    """Return the first implementation that supports these arrays on their device.

    Args:
        operator: Key of `IMPLEMENTATIONS`.
        x, others: Arguments of the function `unsupported` of the operator's implementations.
        needs: Keys of `LACKS` that the problem requires.
        trial: Function that returns the test of a module, run on devices other than a CPU.
        impl: Name of an implementation, or ``auto``.

    Raises:
        NotImplementedError: The named implementation does not support the arrays.
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
    """Return the reason why an implementation cannot run, or None."""
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
    """Return the module of an implementation in the framework of x."""
    framework = devices.framework(x)
    file = name if framework == "numpy" else f"{name}_{framework}"
    return import_module(f"griffin_eval.kernels.{operator}.{file}")


_faults: dict[Hashable, str | None] = {}


def fault(kernels: str, key: Hashable, error: Callable[[], float]) -> str | None:
    """Test kernels once per key; log a warning and return the reason if they cannot be used.

    Args:
        kernels: Name of the kernels in the warning.
        error: Function that computes a small problem and returns its largest error, for numbers of
            about 1.
    """
    if key not in _faults:
        _faults[key] = _tried(kernels, error)
    return _faults[key]


def _tried(kernels: str, error: Callable[[], float]) -> str | None:
    try:
        off = error()
        reason = f"{kernels} are wrong here: off by {off:.2g} in a small problem"
    except Exception as problem:  # compilers and drivers raise any kind
        off, reason = float("inf"), f"{kernels} do not run here: {problem}"
    if off <= 0.05:
        return None
    logger.warning("%s; plain implementations are used instead", reason)
    return reason


def check_shapes(name: str, x: Any, expected: Mapping[str, tuple[Any, Sequence[int]]]) -> None:
    """Check that arrays belong together, since kernels would read beyond smaller ones.

    Args:
        name: Name of x.
        expected: Other arrays by name, each with its required shape; None is skipped.

    Raises:
        ArgumentError: Shapes or devices do not match; the message names all of them.
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
    """Check that x [..., I] has as many inputs as a weight [O, I].

    Raises:
        ArgumentError: The numbers of inputs differ.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            f"linear: x must have the {weight.shape[1]} inputs of a weight of "
            f"{list(weight.shape)}, found {x.shape[-1]} in an x of {list(x.shape)}"
        )
