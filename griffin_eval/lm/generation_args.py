"""lm_eval's generation arguments (``--gen_kwargs``, and those of a task)."""

import math
from typing import Any, NamedTuple

from lm_eval.models.utils import normalize_gen_kwargs

from griffin_eval.arguments import positive_integer
from griffin_eval.engine.neutral import NEUTRAL, is_neutral
from griffin_eval.engine.sampling import GREEDY, Sampling, checked
from griffin_eval.errors import ArgumentError
from griffin_eval.messages import brief

DEFAULT_GENERATED_TOKENS = 256  # hf's default
_LENGTHS = {"max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"}
_NUMBERS = ("temperature", "top_k", "top_p")


class GenerationArguments(NamedTuple):
    """The generation arguments of one request; no string of ``until`` is empty."""

    sampling: Sampling
    until: list[str]
    max_new_tokens: int


def read_generation_arguments(arguments: dict[str, Any]) -> GenerationArguments:
    """Return the arguments of one request. Arguments of hf's model with neutral values are allowed;
    others raise ArgumentError."""
    stated = {name: value for name, value in arguments.items() if value is not None}
    for name in _LENGTHS & stated.keys():
        positive_integer(name, stated[name])
    numbers = {name: _number(name, stated[name]) for name in _NUMBERS if name in stated}
    do_sample = stated.get("do_sample")
    if do_sample not in (None, True, False):
        raise ArgumentError(f"do_sample must be true or false, found {brief(do_sample)}")
    if do_sample is None or do_sample:
        checked(Sampling(**numbers))
    until = _strings(stated.get("until", []))
    whole = stated | numbers | ({} if do_sample is None else {"do_sample": bool(do_sample)})
    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(whole, DEFAULT_GENERATED_TOKENS))
    numbers.setdefault("temperature", 1.0)
    sampling = Sampling(**numbers) if kwargs["do_sample"] else GREEDY
    supported = {"until", "max_gen_toks", "do_sample", *_NUMBERS}
    unsupported = [
        name
        for name, value in kwargs.items()
        if name not in supported and not is_neutral(value, NEUTRAL.get(name, ()))
    ]
    if unsupported:
        raise ArgumentError(
            f"generation arguments {', '.join(unsupported)} are not supported: expected until, "
            "max_gen_toks, do_sample, temperature, top_k, top_p"
        )
    return GenerationArguments(sampling, until, kwargs["max_gen_toks"])


def _number(name: str, value: Any) -> Any:
    """Return a number; ``top_k`` has to be whole."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (OverflowError, TypeError, ValueError):
        number = math.nan
    if name == "top_k" and number.is_integer():
        return int(number)
    if name == "top_k" or math.isnan(number):
        kind = "a whole number" if name == "top_k" else "a number"
        raise ArgumentError(f"{name} must be {kind}, found {brief(value)}")
    return number


def _strings(until: Any) -> list[str]:
    """Return the non-empty stop strings."""
    each = until if isinstance(until, list | tuple) else [until]
    wrong = [one for one in each if not isinstance(one, str | None)]
    if wrong:
        raise ArgumentError(
            f"until must be a string or a list of strings, found {brief(wrong[0])}: write it in "
            "quotes"
        )
    return [one for one in each if one]
