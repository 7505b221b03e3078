"""What a request body may say, checked; whatever else it says is refused by name."""

import json
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

from griffin_eval.engine.live.requests import MOST_TOP
from griffin_eval.engine.neutral import NEUTRAL, is_neutral
from griffin_eval.engine.sampling import Sampling
from griffin_eval.errors import BadInput
from griffin_eval.messages import brief
from griffin_eval.text.bounded import refusal_of
from griffin_eval.text.tokenizer import Tokenizer

MOST_STOPS, LONGEST_STOP = 64, 1000  # strings, and characters of one


class Refused(BadInput):
    """A request that is answered with an error of the API.

    Args:
        message: one sentence.
        status: of HTTP.
        param: name of the field, if it is one.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param


class Asked(NamedTuple):
    """A body of ``/v1/completions``, ``/v1/chat/completions`` or ``/generate``.

    Attributes:
        model: its name, None for the server's first.
        max_tokens: most tokens to generate.
        sampling: how they are chosen.
        seed: of the random numbers; None for others every time.
        stop: strings that end the text.
        n: number of answers to each prompt.
        stream: whether the answer comes in parts.
        usage: whether the last of these says how many tokens there were.
        echo: whether the answer begins with the prompt.
        top: number of likeliest tokens beside each token; None for no log-probabilities.
    """

    model: str | None
    max_tokens: int
    sampling: Sampling
    seed: int | None
    stop: list[str]
    n: int
    stream: bool
    usage: bool
    echo: bool
    top: int | None


# Values at which fields that are not supported ask for nothing; None where no value asks for
# anything. docs/serve.md has the same table.
IGNORED: dict[str, tuple[Any, ...] | None] = NEUTRAL | {
    # Labels and hints, which no answer depends on
    **dict.fromkeys(("user", "safety_identifier", "metadata", "prediction"), None),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), None),
    # Tools: how to choose one of none
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "parallel_tool_calls": None,
    # Defaults
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    **dict.fromkeys(("audio", "moderation", "web_search_options"), ()),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    # Fields that other requests support
    **dict.fromkeys(("echo", "logprobs", "stream"), (False,)),
}
IGNORED_IN_MESSAGES: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("annotations", "tool_calls"), ([],)),
    **dict.fromkeys(("audio", "function_call", "refusal", "tool_call_id"), ()),
}
IN_MESSAGES = ("role", "content", "name")
_SHARED = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n")
_STREAM = ("stream", "stream_options")
COMPLETION = ("prompt", "echo", "logprobs", *_SHARED, *_STREAM)
CHAT = ("messages", "max_completion_tokens", "logprobs", "top_logprobs", *_SHARED, *_STREAM)
GENERATE = ("prompt", *_SHARED)


def read_fields(body: Any, known: tuple[str, ...], default_tokens: int) -> Asked:
    """What a body asks for.

    Args:
        body: from JSON.
        known: names of the fields that this kind of request has.
        default_tokens: most tokens to generate where it does not say.

    Raises:
        Refused: naming the fields that are unknown, or that have an unsupported value.
    """
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    given = stated(body)
    check_names(given, known, IGNORED)
    ignored = IGNORED | {"best_of": (given.get("n", 1),)}
    wrong = [n for n, v in given.items() if n not in known and not is_neutral(v, ignored[n])]
    if wrong:
        values = ", ".join(f"{name}={brief(given[name]):.60}" for name in wrong)
        raise Refused(f"not supported: {values}; leave it out", param=wrong[0])
    given = {name: value for name, value in given.items() if name in known}

    def value(name: str, default: Any, check: Callable[[Any], bool], expected: str) -> Any:
        found = given.get(name, default)
        if name in given and not check(found):
            raise Refused(f"{name} must be {expected}, found {brief(found):.60}", param=name)
        return found

    def whole(name: str, default: Any, least: int, most: int = 1 << 31) -> Any:
        expected = f"a whole number from {least} to {most}"
        return value(name, default, lambda v: _whole(v) and least <= v <= most, expected)

    def number(name: str, default: float, most: float) -> float:
        expected = f"a number from 0 to {most:g}"
        return float(value(name, default, lambda v: _number(v) and 0 <= v <= most, expected))

    def flag(name: str) -> bool:
        return value(name, False, lambda v: isinstance(v, bool), "true or false")

    if "logprobs" in known and "top_logprobs" in known:  # of chat
        top = whole("top_logprobs", 0, 0, MOST_TOP) if flag("logprobs") else None
        if top is None and given.get("top_logprobs"):
            raise Refused("top_logprobs needs logprobs=true", param="top_logprobs")
    else:
        top = whole("logprobs", None, 0, MOST_TOP)
    stops = f"a string or at most {MOST_STOPS} strings, each of at most {LONGEST_STOP} characters"
    stop = value("stop", [], _strings, stops)
    expected = "an object with include_usage, true or false"
    usage = bool(value("stream_options", {}, _stream_options, expected).get("include_usage"))
    if usage and not given.get("stream"):
        raise Refused("stream_options needs stream=true", param="stream_options")
    top_k = whole("top_k", 0, -1)
    sampling = Sampling(number("temperature", 1.0, 100.0), top_k, number("top_p", 1.0, 1.0))
    most = whole("max_tokens", default_tokens, 0)
    longest = whole("max_completion_tokens", most, 0)
    if longest != most and "max_tokens" in given:
        raise Refused(
            "max_tokens and max_completion_tokens are two names of one number: leave one out",
            param="max_tokens",
        )
    model = value("model", None, lambda v: isinstance(v, str), "a string")
    asked = Asked(
        model,
        longest,
        sampling,
        whole("seed", None, -(1 << 63), 1 << 63),
        [s for s in ([stop] if isinstance(stop, str) else stop) if s],
        whole("n", 1, 1, 128),
        flag("stream"),
        usage,
        flag("echo"),
        top,
    )
    if not asked.max_tokens and not asked.echo and "echo" in known:
        raise Refused("max_tokens=0 asks for nothing: add echo=true", param="max_tokens")
    return asked


def stated(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null, which means the same as their absence."""
    return {name: value for name, value in fields.items() if value is not None}


def check_names(body: dict[str, Any], known: Sequence[str], neutral: Container[str] = ()) -> None:
    """Checks that a body has no other fields.

    Raises:
        Refused: naming those.
    """
    wrong = [name for name in body if name not in known and name not in neutral]
    if wrong:
        names = ", ".join(map(brief, wrong[:10]))
        raise Refused(
            f"unknown parameter {names}: expected {', '.join(known)}", param=wrong[0][:100]
        )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _stream_options(value: Any) -> bool:
    # Obfuscation would pad the parts of a stream to one size.
    return isinstance(value, dict) and all(
        isinstance(one, bool)
        if name == "include_usage"
        else name == "include_obfuscation" and not one
        for name, one in stated(value).items()
    )


def _strings(value: Any) -> bool:
    each = [value] if isinstance(value, str) else value
    return (
        isinstance(each, list)
        and len(each) <= MOST_STOPS
        and all(isinstance(one, str) and len(one) <= LONGEST_STOP for one in each)
    )


def read_body(content: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        Refused: it is none.
    """
    try:
        text = content.decode()
        body = json.loads(text)
        if "\\ud" in text.lower():  # which can be half of a character
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refused("the body has halves of characters: a text must be Unicode") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON: {str(error)[:100]}") from None
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    return body


def read_model(body: dict[str, Any]) -> str | None:
    """The name of the model in a body without the fields of a completion.

    Raises:
        Refused: it is no text.
    """
    name = body.get("model")
    if name is not None and not isinstance(name, str):
        raise Refused(f"model must be a string, found {brief(name):.60}", param="model")
    return name


def read_ids(value: Any, vocab_size: int) -> list[int]:
    """The token ids of a body of ``/detokenize``.

    Raises:
        Refused: they are no list of tokens of the model.
    """
    if value != [] and not _ids(value):
        raise Refused(
            f"tokens must be a list of token ids, found {brief(value):.60}", param="tokens"
        )
    _check_ids(value, vocab_size, "tokens")
    return value


def _check_ids(
    ids: list[int], vocab_size: int, name: str, tokenizer: Tokenizer | None = None
) -> None:
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        said = f"token ids must be from 0 to {vocab_size - 1}, found {wrong}"
        raise Refused(refusal_of(ids, tokenizer) or said, param=name)


def read_prompts(
    value: Any, vocab_size: int, tokenizer: Tokenizer | None = None
) -> list[str | list[int]]:
    """The prompts of a body: a text, texts, token ids, or lists of token ids; None for no text.

    Args:
        value: the field of the body.
        vocab_size: number of tokens of the model.
        tokenizer: tokenizer that names tokens which the model lacks.

    Raises:
        Refused: it is none of these.
    """
    if value is None:
        return [""]
    several = value if isinstance(value, list) and not _ids(value) else [value]
    if not several or not all(isinstance(p, str) or (_ids(p) and p) for p in several):
        raise Refused(
            "prompt must be a text, a list of texts, a list of token ids, or a list of such lists, "
            f"found {brief(value):.60}",
            param="prompt",
        )
    for prompt in several:
        if not isinstance(prompt, str):
            _check_ids(prompt, vocab_size, "prompt", tokenizer)
    return several


def read_messages(messages: Any) -> list[dict[str, str]]:
    """Return the messages of a chat, each with ``role``, ``content`` and perhaps ``name``.

    Parts of a content are joined, and a developer is the system.

    Raises:
        Refused: naming the first message that is none, or a field of it.
    """
    if not isinstance(messages, list) or not messages:
        expected = "messages must be a list of objects with role and content, each a string"
        raise Refused(f"{expected}, found {brief(messages):.60}", param="messages")
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: Any, place: str) -> dict[str, str]:
    if not isinstance(message, dict):
        expected = f"{place} must be an object with role and content"
        raise Refused(f"{expected}, found {brief(message):.60}", param="messages")
    given = stated(message)
    wrong = [
        name
        for name, value in given.items()
        if name not in IN_MESSAGES and not is_neutral(value, IGNORED_IN_MESSAGES.get(name, ()))
    ]
    if wrong:
        names = ", ".join(map(brief, sorted(wrong)[:10]))
        expected = "expected role, content and name"
        raise Refused(f"{place}: {names} is not supported: {expected}", param="messages")
    if isinstance(parts := given.get("content"), list) and parts:
        texts = [_text(part, f"{place}.content[{number}]") for number, part in enumerate(parts)]
        given["content"] = "".join(texts)
    for name in ("role", "content", *({"name"} & given.keys())):
        if not isinstance(given.get(name), str):
            expected = f"{place}.{name} must be a string" + " or text parts" * (name == "content")
            raise Refused(f"{expected}, found {brief(given.get(name)):.60}", param="messages")
    if given["role"] == "developer":
        given["role"] = "system"
    return {name: given[name] for name in IN_MESSAGES if name in given}


def _text(part: Any, place: str) -> str:
    """Return the text of one part of a content."""
    given = stated(part) if isinstance(part, dict) else {}
    given.pop("prompt_cache_breakpoint", None)  # a hint
    text = given.get("text")
    if given.keys() != {"type", "text"} or given["type"] != "text" or not isinstance(text, str):
        expected = f'{place} must be a text part, {{"type": "text", "text": …}}'
        raise Refused(f"{expected}, found {brief(part):.60}", param="messages")
    return text


def _ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_whole, value))
