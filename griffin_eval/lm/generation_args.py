"""lm_eval's arguments of generation (``--gen_kwargs``, and those of a task)."""

from typing import Any, NamedTuple

from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
)

from griffin_eval.engine.sampling import GREEDY, Sampling, checked
from griffin_eval.errors import ArgumentError

DEFAULT_GENERATED_TOKENS = 256  # hf's default


class GenerationArguments(NamedTuple):
    """How one request is continued.

    Attributes:
        sampling: how tokens are chosen.
        until: strings that end the text, none of them empty.
        max_new_tokens: most tokens to generate.
    """

    sampling: Sampling
    until: list[str]
    max_new_tokens: int


def read_generation_arguments(given: dict[str, Any]) -> GenerationArguments:
    """The arguments of one request; those of hf's model that ask for nothing are accepted.

    Raises:
        ArgumentError: naming those that are not supported.
    """
    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(given, DEFAULT_GENERATED_TOKENS))
    until = [s for s in handle_stop_sequences(kwargs.pop("until", None), eos=None) if s]
    max_new_tokens = kwargs.pop("max_gen_toks")
    sampled = kwargs.pop("do_sample", False)
    asked = {name: kwargs.pop(name, None) for name in ("temperature", "top_k", "top_p")}
    asked = {"temperature": 1.0} | {k: float(v) for k, v in asked.items() if v is not None}
    top_k = int(asked.pop("top_k", 0))
    sampling = checked(Sampling(**asked, top_k=top_k)) if sampled else GREEDY
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "num_return_sequences": 1}
    unsupported = [k for k, v in kwargs.items() if v is not None and v != neutral.get(k)]
    if unsupported:
        raise ArgumentError(
            f"generation arguments {', '.join(unsupported)} are not supported: expected until, "
            "max_gen_toks, do_sample, temperature, top_k, top_p"
        )
    return GenerationArguments(sampling, until, max_new_tokens)
