"""Every field that a client may send, by the tables of docs/serve.md and the types of openai."""

import contextlib
import gc
import json
import re
import weakref
from pathlib import Path

import openai
import pytest
from openai.types import chat
from openai.types import completion_create_params as params
from openai.types.chat import completion_create_params as chat_params

from griffin_eval.server import fields
from griffin_eval.server.fields import ChatBody, CompletionBody, GenerateBody, check_body
from griffin_eval.server.refused import Refused

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text().partition("## Fields")[2]
SUPPORTED, IGNORED, MESSAGES = (
    [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table.splitlines()[2:]]
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.M)[:3]
)
SAID = [{"role": "user", "content": "a"}]
REQUESTS = {
    "completions": (CompletionBody, {"prompt": "a"}),
    "chat": (ChatBody, {"messages": SAID}),
    "generate": (GenerateBody, {"prompt": "a"}),
}
# A later version of the package may have fields that the tables lack.
NEWER = tuple(map(int, openai.__version__.split(".")[:2])) > (3, 54)
WITH = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}}


def read(request, **more):
    kind, body = REQUESTS[request]
    return check_body(kind, body | more)


def read_messages(messages):
    return [one.for_template() for one in read("chat", messages=messages).messages]


def refused(request, name, value):
    with pytest.raises(Refused) as error:
        read(request, **WITH.get(name, {}) | {name: value})
    assert error.value.status == 400 and error.value.param == name, (request, name, value)
    assert name in str(error.value)


def names(cell):
    return re.findall("`(\\w+)`", cell)


def values(cell):
    """Return the values of a cell that are JSON."""
    found = []
    for text in re.findall("`([^`]+)`", cell):
        try:
            found.append(json.loads(text))
        except ValueError:
            assert text.isidentifier() or "/" in text, text
    return found


def test_supported_fields():
    for field, requests, accepted, wrong in SUPPORTED:
        [name] = names(field)
        for request in requests.split(", "):
            for value in [*values(accepted), None] if name != "messages" else []:
                read(request, **WITH.get(name, {}) | {name: value})
            for value in values(wrong):
                refused(request, name, value)


@pytest.mark.parametrize("request_", REQUESTS)
def test_fields_that_are_ignored_or_refused(request_):
    kind, _ = REQUESTS[request_]
    for ignored_fields, accepted, wrong in IGNORED:
        for name in set(names(ignored_fields)) - kind.model_fields.keys():
            ignored = ["x", 7, {"a": []}] if accepted == "any value" else values(accepted)
            for value in (*ignored, None):
                assert read(request_, **{name: value}) == read(request_), (name, value)
            for value in values(wrong):
                refused(request_, name, value)
    assert read(request_, n=3, best_of=3) == read(request_, n=3)


def test_fields_of_messages():
    said = [(name, row) for row in MESSAGES for name in names(row[0])]
    for name, (_, accepted, wrong) in said:
        for value in values(accepted):
            [found] = read_messages([SAID[0] | {name: value}])
            assert found["content"] == "a" and found.keys() - SAID[0].keys() <= {"name"}
            assert found["role"] == {"role": value}.get(name, "user").replace("developer", "system")
        for value in values(wrong):
            with pytest.raises(Refused, match=rf"messages\[0\].*{name}") as error:
                read_messages([SAID[0] | {name: value}])
            assert error.value.param == "messages"


@pytest.mark.parametrize(
    "wrong", [{"top_logprobs": 3}, {"no_such_parameter": 1}, {"temperature": "hot"}]
)
def test_a_refused_body_is_freed_without_the_garbage_collector(wrong):
    class Body(dict):  # a class of its own allows weak references
        pass

    body = Body({"messages": SAID} | wrong)
    freed = weakref.ref(body)
    gc.disable()
    try:
        with contextlib.suppress(Refused):
            check_body(ChatBody, body)
        del body
        assert freed() is None
    finally:
        gc.enable()


def test_the_tables_have_every_field():
    supported = {name for row in SUPPORTED for name in names(row[0])}
    assert supported == {name for kind, _ in REQUESTS.values() for name in kind.model_fields}
    ignored = [name for row in IGNORED for name in names(row[0])]
    assert sorted(ignored) == sorted(fields.IGNORED)
    own = [name for row in MESSAGES for name in names(row[0])]
    assert sorted(own) == sorted([*fields.Message.model_fields, *fields.IGNORED_IN_MESSAGES])


@pytest.mark.parametrize(
    ("request_", "types"),
    [
        ("completions", params.CompletionCreateParamsStreaming),
        ("chat", chat_params.CompletionCreateParamsStreaming),
    ],
)
def test_every_field_of_the_openai_package(request_, types):
    asked = types.__annotations__.keys()
    unknown = asked - {*REQUESTS[request_][0].model_fields, *fields.IGNORED}
    assert len(asked) > 15 and (NEWER or not unknown)
    for name in unknown:
        refused(request_, name, "x")


def test_every_field_of_the_openai_packages_messages():
    found = {
        name
        for kind in ("Assistant", "Developer", "Function", "System", "Tool", "User")
        for name in getattr(chat, f"ChatCompletion{kind}MessageParam").__annotations__
    } | chat.ChatCompletionMessage.model_fields.keys()
    assert found > {"role", "content", "tool_calls"}
    assert found <= {*fields.Message.model_fields, *fields.IGNORED_IN_MESSAGES} or NEWER


def test_a_message_comes_back_as_the_openai_package_dumps_it():
    answer = {"role": "assistant", "content": "b"}
    dumped = chat.ChatCompletionMessage.model_validate(answer | {"annotations": []}).model_dump()
    assert {"refusal", "tool_calls"} <= dumped.keys()
    assert read_messages([*SAID, dumped, *SAID]) == [*SAID, answer, *SAID]
    part = {"type": "text", "text": "b", "prompt_cache_breakpoint": {"mode": "explicit"}}
    several = [part, {"type": "text", "text": " c", "annotations": None}]
    assert read_messages([answer | {"content": several}]) == [answer | {"content": "b c"}]
