"""Request bodies, validated by pydantic; unsupported fields and values are refused by name."""

import json
import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from griffin_eval.engine.live.requests import MAX_TOP
from griffin_eval.engine.neutral import NEUTRAL, is_neutral
from griffin_eval.engine.sampling import Sampling
from griffin_eval.messages import brief
from griffin_eval.server.refused import Refused

MAX_STOPS, MAX_STOP_LENGTH = 64, 1000  # strings, and characters of one
COMPLETION_TOKENS, CHAT_TOKENS = 16, 256  # defaults of max_tokens, or the rest of a shorter limit

# Neutral values of unsupported fields; None if every value is neutral. docs/serve.md has the same
# table.
IGNORED: dict[str, tuple[Any, ...] | None] = NEUTRAL | {
    # Labels and hints that never change an answer
    **dict.fromkeys(("user", "safety_identifier", "metadata", "prediction"), None),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), None),
    # Choices among no tools
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


class Fields(BaseModel):
    """A JSON object whose fields are checked strictly; null means the default."""

    model_config = ConfigDict(strict=True)
    ignored: ClassVar[dict[str, tuple[Any, ...] | None]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        known = cls.model_fields
        others = {n: v for n, v in body.items() if n not in known and v is not None}
        unknown = [name for name in others if name not in cls.ignored]
        if unknown:
            names = ", ".join(map(brief, unknown[:10]))
            expected = ", ".join(known)
            raise Refused(f"unknown parameter {names}: expected {expected}", param=unknown[0][:100])
        neutral = cls.ignored | {"best_of": (body.get("n") or 1,)}
        wrong = [name for name, value in others.items() if not is_neutral(value, neutral[name])]
        if wrong:
            values = ", ".join(f"{name}={brief(others[name]):.60}" for name in wrong)
            raise Refused(f"not supported: {values}; leave it out", param=wrong[0])
        stated = {name: value for name, value in body.items() if value is not None}
        if "prompt" in body:
            stated["prompt"] = body["prompt"]
        return {name: value for name, value in stated.items() if name not in others}


def _several(value: Any) -> Any:
    """Wrap a single text or list of token ids in a list; null is the empty text."""
    ids = isinstance(value, list) and value and isinstance(value[0], int)
    return [value or ""] if ids or isinstance(value, str | None) else value


Count = Annotated[int, Field(ge=0, le=1 << 31)]
Top = Annotated[int, Field(ge=0, le=MAX_TOP)]
# Fail at the first error, since a body can hold millions of wrong items.
Prompts = Annotated[
    list[str | Annotated[list[int], Field(min_length=1, fail_fast=True)]],
    Field(
        min_length=1,
        fail_fast=True,
        description="a text, a list of texts, a list of token ids, or a list of such lists",
    ),
    BeforeValidator(_several),
]
Stops = Annotated[
    list[Annotated[str, Field(max_length=MAX_STOP_LENGTH)]],
    Field(
        max_length=MAX_STOPS,
        fail_fast=True,
        description=f"a string or at most {MAX_STOPS} of at most {MAX_STOP_LENGTH} characters",
    ),
    BeforeValidator(_several),
]


class _Request(Fields):
    """Fields of every request for text."""

    ignored = IGNORED
    model: str | None = None
    max_tokens: Count = CHAT_TOKENS
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=1 << 31)
    seed: int | None = Field(None, ge=-(1 << 63), le=1 << 63)
    stop: Stops = []
    n: int = Field(1, ge=1, le=128)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)


class GenerateBody(_Request):
    """A body of ``/generate``."""

    prompt: Prompts
    stream: ClassVar[bool] = False
    usage: ClassVar[bool] = False
    echo: ClassVar[bool] = False
    top: ClassVar[int | None] = None


class StreamOptions(Fields):
    # Obfuscation would pad the events of a stream to one size.
    ignored = {"include_obfuscation": (False,)}
    include_usage: bool = False


class _Streamed(_Request):
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @property
    def usage(self) -> bool:
        """Whether the last event of a stream has the token counts."""
        return self.stream_options.include_usage

    @model_validator(mode="after")
    def _check_stream(self) -> "_Streamed":
        if self.usage and not self.stream:
            raise Refused("stream_options needs stream=true", param="stream_options")
        return self


class CompletionBody(_Streamed):
    """A body of ``/v1/completions``."""

    prompt: Prompts
    max_tokens: Count = COMPLETION_TOKENS
    echo: bool = False
    logprobs: Top | None = None

    @property
    def top(self) -> int | None:
        """Number of most likely tokens for each token; None for no log-probabilities."""
        return self.logprobs


class TextPart(Fields):
    ignored = {"prompt_cache_breakpoint": None}  # a hint
    type: Literal["text"]
    text: str


def _parts(content: Any) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not content:
        raise Refused(f"must be a string or text parts, found {brief(content):.60}")
    return content


class Message(Fields):
    """A chat message; text parts are joined, and the role developer means system."""

    ignored = IGNORED_IN_MESSAGES
    role: Annotated[str, AfterValidator(lambda role: "system" if role == "developer" else role)]
    content: Annotated[list[TextPart], Field(fail_fast=True), BeforeValidator(_parts)]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """Return the message in the form of chat templates."""
        message = {"role": self.role, "content": "".join(part.text for part in self.content)}
        return message if self.name is None else message | {"name": self.name}


class ChatBody(_Streamed):
    """A body of ``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Top = 0
    echo: ClassVar[bool] = False

    @property
    def top(self) -> int | None:
        """Number of most likely tokens for each token; None for no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def _check_names(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise Refused("top_logprobs needs logprobs=true", param="top_logprobs")
        if self.max_completion_tokens is not None:
            if (
                self.max_tokens != self.max_completion_tokens
                and "max_tokens" in self.model_fields_set
            ):
                raise Refused(
                    "max_tokens and max_completion_tokens are two names of one number: leave one "
                    "out",
                    param="max_tokens",
                )
            self.max_tokens = self.max_completion_tokens
        return self


class TokenizeBody(Fields):
    """A body of ``/tokenize``."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeBody(Fields):
    """A body of ``/detokenize``."""

    model: str | None = None
    tokens: list[int] = Field(fail_fast=True)


AnswerBody = CompletionBody | ChatBody | GenerateBody
Body = TypeVar("Body", bound=Fields)


def check_body(kind: type[Body], body: dict[str, Any]) -> Body:
    """Return the validated fields of a body, or raise Refused with the name of a wrong one."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(kind, body, error) from None


def _refusal(kind: type[Fields], body: dict[str, Any], error: ValidationError) -> Refused:
    """Return the refusal of a body for the first of its errors."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")  # a Refused of a validator in this file
    if cause and not first["loc"]:
        return Refused(f"{cause}", param=cause.param)
    name, *inner = first["loc"]
    place = f"{name}" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in inner)
    if first["type"] == "missing":
        return Refused(f"{place} is missing", param=f"{name}")
    if cause:
        return Refused(f"{place}: {cause}", param=f"{name}")
    expected, found = re.sub(r"^\w+ should", "must", first["msg"]), first["input"]
    if first["type"] == "model_type":
        expected = "must be an object"
    if description := kind.model_fields[f"{name}"].description:
        place, expected, found = name, f"must be {description}", body[f"{name}"]
    return Refused(f"{place} {expected}, found {brief(found):.60}", param=f"{name}")


def read_body(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a body, or raise Refused."""
    try:
        text = content.decode()
        body = json.loads(text)
        if "\\ud" in text.lower():  # maybe half of a surrogate pair
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refused("the body has halves of characters: a text must be Unicode") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON: {str(error)[:100]}") from None
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    return body
