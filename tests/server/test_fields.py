"""Every field that a client may send, by the tables of docs/serve.md and the types of openai."""

import json
import re
from pathlib import Path

import openai
import pytest
from openai.types import chat
from openai.types import completion_create_params as params
from openai.types.chat import completion_create_params as chat_params

from griffin_eval.server import fields
from griffin_eval.server.fields import Refused, read_fields, read_messages, read_prompts

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text().partition("## Fields")[2]
SUPPORTED, IGNORED, MESSAGES = (
    [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in table.splitlines()[2:]]
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.M)[:3]
)
SAID = [{"role": "user", "content": "a"}]
REQUESTS = {
    "completions": (fields.COMPLETION, {"prompt": "a"}),
    "chat": (fields.CHAT, {"messages": SAID}),
    "generate": (fields.GENERATE, {"prompt": "a"}),
}
# A later version of the package may have fields that the tables lack.
NEWER = tuple(map(int, openai.__version__.split(".")[:2])) > (3, 54)
WITH = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}}


def read(request, **more):
    """Return what a request asks for."""
    known, body = REQUESTS[request]
    body = body | more
    texts = (
        read_messages(body["messages"]) if request == "chat" else read_prompts(body["prompt"], 9)
    )
    return read_fields(body, known, 5), texts


def refused(request, name, value):
    with pytest.raises(Refused) as error:
        read(request, **WITH.get(name, {}) | {name: value})
    assert error.value.status == 400 and error.value.param == name, (request, name, value)
    assert name in str(error.value) or name == "prompt" and "token ids" in str(error.value)


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


@pytest.mark.parametrize("row", SUPPORTED, ids=lambda row: f"{row[0]} {row[1]}")
def test_supported_fields(row):
    [name] = names(row[0])
    for request in row[1].split(", "):
        for value in [*values(row[2]), None] if name != "messages" else []:
            read(request, **WITH.get(name, {}) | {name: value})
        for value in values(row[3]):
            refused(request, name, value)


@pytest.mark.parametrize("row", IGNORED, ids=lambda row: row[0][:30])
@pytest.mark.parametrize("request_", REQUESTS)
def test_fields_that_are_ignored_or_refused(row, request_):
    known, _ = REQUESTS[request_]
    for name in set(names(row[0])) - set(known):
        ignored = ["x", 7, {"a": []}] if row[1] == "any value" else values(row[1])
        for value in (*ignored, None):
            assert read(request_, **{name: value}) == read(request_), (name, value)
        for value in values(row[2]):
            refused(request_, name, value)
    assert read(request_, n=3, best_of=3) == read(request_, n=3)


@pytest.mark.parametrize("row", MESSAGES, ids=lambda row: row[0])
def test_fields_of_messages(row):
    for name in names(row[0]):
        for value in values(row[1]):
            [found] = read_messages([SAID[0] | {name: value}])
            assert found["content"] == "a" and found.keys() - SAID[0].keys() <= {"name"}
            assert found["role"] == {"role": value}.get(name, "user").replace("developer", "system")
        for value in values(row[2]):
            with pytest.raises(Refused, match=rf"messages\[0\].*{name}") as error:
                read_messages([SAID[0] | {name: value}])
            assert error.value.param == "messages"


def test_the_tables_have_every_field():
    supported = {name for row in SUPPORTED for name in names(row[0])}
    assert supported == {name for known, _ in REQUESTS.values() for name in known}
    ignored = [name for row in IGNORED for name in names(row[0])]
    assert sorted(ignored) == sorted(fields.IGNORED)
    own = [name for row in MESSAGES for name in names(row[0])]
    assert sorted(own) == sorted([*fields.IN_MESSAGES, *fields.IGNORED_IN_MESSAGES])


@pytest.mark.parametrize(
    ("request_", "types"),
    [
        ("completions", params.CompletionCreateParamsStreaming),
        ("chat", chat_params.CompletionCreateParamsStreaming),
    ],
)
def test_every_field_of_the_openai_package(request_, types):
    asked = types.__annotations__.keys()
    unknown = asked - {*REQUESTS[request_][0], *fields.IGNORED}
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
    assert found <= {*fields.IN_MESSAGES, *fields.IGNORED_IN_MESSAGES} or NEWER


def test_a_message_comes_back_as_the_openai_package_dumps_it():
    answer = {"role": "assistant", "content": "b"}
    dumped = chat.ChatCompletionMessage.model_validate(answer | {"annotations": []}).model_dump()
    assert {"refusal", "tool_calls"} <= dumped.keys()
    assert read_messages([*SAID, dumped, *SAID]) == [*SAID, answer, *SAID]
    part = {"type": "text", "text": "b", "prompt_cache_breakpoint": {"mode": "explicit"}}
    several = [part, {"type": "text", "text": " c", "annotations": None}]
    assert read_messages([answer | {"content": several}]) == [answer | {"content": "b c"}]
