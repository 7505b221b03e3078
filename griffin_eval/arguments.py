"""Checks of arguments of commands, models and tasks: sizes, counts, lists of lengths."""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from griffin_eval.errors import ArgumentError
from griffin_eval.messages import brief, did_you_mean

FRAMEWORKS = ("torch", "jax")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def positive_integer(name: str, value: Any, also: str = "") -> int:
    """Return a positive integer that may be given as text, or raise ArgumentError. ``also`` names
    other allowed values in the message, such as " or auto"."""
    try:
        number = int(value)
    except (OverflowError, TypeError, ValueError):
        number = 0
    cut = isinstance(value, bool) or isinstance(value, float) and number != value
    if number < 1 or cut:
        raise ArgumentError(f"{name} must be a positive integer{also}, found {value!r}")
    return number


def text_argument(name: str, value: Any) -> str:
    """Return the text of an argument that is a path, a hub id, a revision or a device."""
    if isinstance(value, str | os.PathLike) or is_integer(value):
        return str(value)
    if name == "device" and type(value).__module__.partition(".")[0] == "torch":
        return str(value)
    save = (
        "; save it with save_pretrained(FOLDER) and name the folder"
        if hasattr(value, "save_pretrained")
        else ""
    )
    raise ArgumentError(f"{name} must be a text, found an object {type(value).__name__}{save}")


def dtype_name(name: str, value: Any) -> str:
    """Return the name of a dtype of NumPy, PyTorch or JAX, or of its name."""
    if isinstance(value, str):
        return value
    if type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    import numpy as np

    try:
        return np.dtype(value).name
    except TypeError:
        raise ArgumentError(
            f"{name} must be a dtype such as float32 or bfloat16, found {value!r:.100}"
        ) from None


def model_dtype(name: str, value: Any) -> str:
    """Return the name of a model's dtype, or ``auto`` for that of the checkpoint."""
    dtype = dtype_name(name, value)
    if dtype not in ("auto", *DTYPES):
        raise ArgumentError(
            f"unknown {name} {dtype!r}: expected auto, {', '.join(DTYPES)}"
            f"{did_you_mean(dtype, DTYPES)}"
        )
    return dtype


def visible_keys_argument(
    *, visible_keys: Any = None, window: Any = None, **_: Any
) -> dict[str, Any]:
    """Return the number of visible keys by the argument's name, or an empty dict. ``window`` is
    another name of ``visible_keys``; values that differ raise ArgumentError."""
    if visible_keys is None:
        return {} if window is None else {"window": window}
    if window not in (None, visible_keys):
        raise ArgumentError(
            f"visible_keys={visible_keys!r} and window={window!r} are two names of one number: "
            "give visible_keys alone"
        )
    return {"visible_keys": visible_keys}


def one_visible_keys(visible_keys: Any, window: Any) -> Any:
    """Return the number of visible keys under either name. See `visible_keys_argument`."""
    given = visible_keys_argument(visible_keys=visible_keys, window=window)
    return next(iter(given.values()), None)


def token_counts(text: str) -> list[int]:
    """Return the lengths in the text of ``--lengths``, such as ``1000,100000``."""
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ArgumentError(f"--lengths {text!r}: expected numbers of tokens such as 100000")
    return [int(part) for part in parts if int(part)]


def positive_integers(option: str, text: str, example: str) -> list[int]:
    """Return the distinct numbers in a text such as ``1,16``, in increasing order. ``example`` is
    the expected value in the error message, such as "numbers of rows such as 1,16"."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ArgumentError(f"{option} {text!r}: expected {example}")
    return ordered([int(part) for part in parts])


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


# Values of a task's metadata that may be lists, and minimum integers other than 1.
_LISTS = frozenset(("contexts", "depths", "lengths", "multiples"))
_LIMIT = 1 << 63  # tables of data sets hold integers of 64 bits
_MINIMA = {"candidates": 2, "depths": 0, "seed": 0}


def integer_problems(minima: Mapping[str, int], /, **values: Any) -> list[str]:
    """Return a sentence for each value of a task's metadata that is not a valid integer. ``minima``
    are those that depend on other values."""
    problems = []
    for name, value in values.items():
        least = {**_MINIMA, **minima}.get(name, 1)
        several = name in _LISTS
        numbers = value if several and isinstance(value, (list, tuple)) else [value]
        if not numbers or not all(is_integer(n) and least <= n < _LIMIT for n in numbers):
            kind = "integers" if several else "an integer"
            problems.append(f"{name} must be {kind} of at least {least}, found {brief(value)}")
    return problems


def check_integers(task: str, **values: Any) -> None:
    """Check integers, and lists of integers, of a task's metadata by name."""
    if problems := integer_problems({}, **values):
        raise ArgumentError(f"{task}: {'; '.join(problems)}")


def ordered(numbers: Any) -> list[int]:
    """Return the distinct numbers of a list in increasing order; a single number is a list."""
    return sorted(set(numbers) if isinstance(numbers, (list, tuple)) else {numbers})


def option(
    help: str,
    parse: Callable[[str, Any], Any] | None = text_argument,
    default: Any = None,
    *,
    kind: Any = str,
    flag: str | None = None,
    minimum: int | None = None,
    **more: Any,
) -> Any:
    """Return a dataclass field that is also an option of commands.

    ``parse`` converts the name and a given value to the value of the field. ``kind`` and
    ``minimum`` apply to the command line, where ``flag`` is the name of the option, if not the
    field's name with dashes. ``more`` are further arguments of `typer.Option`.
    """
    metadata = {"parse": parse, "kind": kind, "flag": flag}
    metadata["option"] = {"help": help, "min": minimum} | more
    return dataclasses.field(default=default, metadata=metadata)


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_size(text: str, option: str) -> int:
    """Return the bytes in a text such as ``500MB``, ``1.5GB`` or ``4096``."""
    unit = text.lstrip("0123456789.")
    number = text[: len(text) - len(unit)]
    try:
        size = int(float(number) * _UNITS[unit.strip().upper()])
    except (OverflowError, ValueError, KeyError):
        size = 0
    if size < 1:
        raise ArgumentError(f"{option} {text!r}: expected a size such as 500MB or 5GB")
    return size


_HUB_ID = re.compile(r"([A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]*", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Return whether a name may be a Hugging Face hub id: ``organisation/name``, or ``name``."""
    return _HUB_ID.fullmatch(name) is not None
