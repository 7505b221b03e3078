"""Hostile requests to a server in this process: every answer has the API's form."""

import asyncio
import dataclasses
import itertools
import json
import time

import httpx
import numpy as np
import pytest
from fake_runner import FakeRunner, continuation_alone, scores_alone
from slow import slow

from griffin_eval import Evaluator
from griffin_eval.checkpoints import folder
from griffin_eval.errors import ArgumentError
from griffin_eval.model_arguments import parse_arguments
from griffin_eval.opened import open_model
from griffin_eval.server import app as server_app
from griffin_eval.server.fields import ChatBody, CompletionBody, GenerateBody
from griffin_eval.server.model import ServedModel, ServerOptions

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
POSTED = [COMPLETIONS, CHATS, "/generate", "/tokenize", "/detokenize"]
SAID = [{"role": "user", "content": "a"}]
STRANGE = [
    *(True, -1, 0.5, 2**31, 2**63, -(2**63), 10**30, 1e308, -0.1, float("nan"), float("inf")),
    *("", "x" * 5000, "\ud800", "\0", "é", [], {}, [[]], [None], [[1], "a"], [-1], [10**12]),
    *([1.0], [True], {"a": {"b": []}}, ["a"] * 10_000, [["a"]], [{}], {"include_usage": 1}),
]


@pytest.fixture(scope="module")
def model():
    """Serve the fake model under the tokenizer of a checkpoint."""
    arguments = {"pretrained": str(folder("bytes_griffin")), "framework": "torch", "device": "cpu"}
    options = ServerOptions(
        name="bytes", chat_template="plain", max_tokens=64, queue=40, max_body=1 << 20, timeout=30
    )
    opened = open_model(parse_arguments(arguments))
    opened.runners = [FakeRunner(opened.checkpoint.config.vocab_size)]
    model = ServedModel(opened, options)
    model.scheduler.start()
    yield model
    model.scheduler.close()


@pytest.fixture(scope="module")
def ask(model):
    app, loop = server_app.make_app(model), asyncio.new_event_loop()

    async def asked(path, body, method, headers):
        transport = httpx.ASGITransport(app)  # raises what the server does not catch
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, content=body, headers=headers)

    def ask(path, body, method="POST", **headers):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode("utf-8", "surrogatepass")
        headers = {"Content-Type": "application/json"} | headers
        return loop.run_until_complete(asked(path, body, method, headers))

    yield ask
    loop.close()


def refused(answer):
    """Return the error of an answer, after a check that it has the API's form."""
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert 400 <= answer.status_code < 500 and error["code"] == answer.status_code
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 1000
    return error


def test_a_stream_that_nobody_reads_ends_at_the_timeout(model, monkeypatch):
    monkeypatch.setattr(model, "options", dataclasses.replace(model.options, timeout=0.2))
    monkeypatch.setattr(server_app, "GRACE", 0)
    runner, steps = model.scheduler._runner, []
    step = runner.decode_step
    monkeypatch.setattr(
        runner, "decode_step", lambda *given: time.sleep(0.05) or steps.append(0) or step(*given)
    )
    app = server_app.make_app(model)
    body = json.dumps({"prompt": "a", "max_tokens": 60, "stream": True}).encode()
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "asgi": {}}
    sent = iter([{"type": "http.request", "body": body}])

    async def receive():
        for message in sent:
            return message
        await asyncio.Event().wait()

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def run():
        task = asyncio.create_task(app(scope, receive, send))
        while not steps or model.scheduler.unfinished:
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(run())
    assert 0 < len(steps) < 50


def test_answers_without_max_tokens_fit_into_the_limit(ask):
    for path, body, tokens in (
        (CHATS, {"messages": SAID}, 256),
        ("/generate", {"prompt": "a" * 60}, 256),
        (COMPLETIONS, {"prompt": "a" * 60}, 16),
    ):
        assert ask(path, body | {"temperature": 0}).status_code == 200
        said = refused(ask(path, body | {"max_tokens": tokens}))["message"]
        assert f"and {tokens} new ones are asked for (max_tokens)" in said
        assert "asks for nothing" in refused(ask(path, body | {"max_tokens": 0}))["message"]


@pytest.mark.parametrize(
    ("path", "known", "whole"),
    [
        (COMPLETIONS, CompletionBody.model_fields, {"prompt": "a", "max_tokens": 1}),
        slow(CHATS, ChatBody.model_fields, {"messages": SAID, "max_tokens": 1}),
        slow("/generate", GenerateBody.model_fields, {"prompt": "a", "max_tokens": 1}),
        ("/tokenize", ("prompt", "add_special_tokens"), {"prompt": "a"}),
        ("/detokenize", ("tokens",), {"tokens": [1]}),
    ],
)
def test_any_value_of_any_field_is_answered_or_refused_by_name(ask, path, known, whole):
    asked = whole.keys() - {"max_tokens"}
    for field in (*known, "best_of", "logit_bias", "response_format", "tools", "no_such_field"):
        for value in STRANGE:
            answer = ask(path, whole | {field: value})
            if answer.status_code != 200:
                error = refused(answer)
                named = {field, "Unicode", "(max_tokens),"} & {
                    error["param"],
                    *error["message"].split(),
                }
                assert named or field in asked or field in error["message"], (field, value)
            elif answer.headers["content-type"] == "application/json":
                answer.json()


NO_REQUESTS = [
    b"",
    b"\x00",
    b"\xff\xfe{}",
    b'{"prompt": "\xc3"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "a", "\\ud800": 1}',
    b'{"model": "\\ud800", "prompt": "a"}',
    b'{"prompt": "a", "a\\nb": 1}',
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"tools": ' + b'{"a":' * 960 + b"1" + b"}" * 960 + b"}",
    b'{"max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": "a"} x',
    b"null",
    b'"text"',
    b"1e999",
    b"x" * (1 << 21),
    "{}".encode("utf-16"),
]


def test_what_is_no_request_is_refused(ask):
    for path in POSTED:
        for body in NO_REQUESTS:
            refused(ask(path, body))


def test_ids_and_numbers_out_of_all_bounds(ask):
    for ids in ([-1], [2**31], [2**64], [10**400], [1, -(2**63)], [[1], [999999]], [True, False]):
        assert refused(ask(COMPLETIONS, {"prompt": ids}))["param"] == "prompt"
    for name, value in (
        *(("max_tokens", 10**400), ("temperature", 10**400), ("seed", 2**64), ("n", 10**9)),
        *(("logprobs", 10**400), ("top_k", -(10**400)), ("top_p", float("nan"))),
    ):
        assert refused(ask(COMPLETIONS, {"prompt": "a", name: value}))["param"] == name
    assert ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "seed": -(2**63)}).status_code == 200


def test_stop_strings_have_bounds(ask):
    body = {"prompt": "a", "max_tokens": 1}
    for stop in (["a"] * 10_000, "a" * 10_000, ["a" * 1001], [["a"]]):
        assert refused(ask(COMPLETIONS, body | {"stop": stop}))["param"] == "stop"
    assert ask(COMPLETIONS, body | {"stop": ["", "a" * 1000, "\0"] * 20}).status_code == 200


def test_what_are_no_messages(ask):
    for messages in (
        *(None, [], {}, "a", [[]], [{}], [{"role": "user"}], [{"content": "a"}], ["a"]),
        *([{"role": 1, "content": "a"}], [{"role": "user", "content": 1}]),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
        *([{"role": "user", "content": "a", "name": 1}], [{"role": "user", "content": "\ud800"}]),
        [{"role": "user", "content": "a", "tool_calls": [{}]}],
    ):
        refused(ask(CHATS, {"messages": messages}))


TEMPLATES = ["{{ 1 / 0 }}", "{{ messages[9]['role'] }}", "{% for", "{{ [] + 1 }}", "{{ raise(1) }}"]


def test_templates_that_fail_are_said(model, ask, monkeypatch):
    for template in TEMPLATES:
        options = dataclasses.replace(model.options, chat_template=template)
        monkeypatch.setattr(model, "options", options)
        error = refused(ask(CHATS, {"messages": SAID}))
        assert "the chat template refuses these messages" in error["message"]


def test_addresses_methods_and_headers(ask):
    for path in ("/", "/v1", "/v1/completions/", "/v1/models/a", "/%ff%00", "/v1/completions/../x"):
        assert ask(path, b"").status_code in (404, 405, 307)
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"):
        assert refused(ask(COMPLETIONS, b"{}", method))["code"] == 405
    headers = {"Content-Encoding": "gzip", "Authorization": b"\xff"}
    assert ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, **headers).status_code == 200


SIMPLE = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "a,b"]


@pytest.mark.parametrize("path", POSTED)
def test_bodies_that_a_page_may_send_without_asking_are_refused(ask, path):
    body = {"prompt": "a", "max_tokens": 1}
    for given in (*SIMPLE, "text/plain; application/json", "application/json-patch+json"):
        error = refused(ask(path, body, **{"Content-Type": given}))
        assert error["code"] == 415 and repr(given) in error["message"]
    for given in ("application/json; charset=utf-8", "Application/JSON ;x=y"):
        assert ask(COMPLETIONS, body, **{"Content-Type": given}).status_code == 200


@pytest.mark.parametrize("path", [*POSTED, "/v1/models", "/health", "/metrics", "/none"])
def test_other_hosts_and_pages_are_refused_at_every_address(ask, path):
    method = "POST" if path in POSTED else "GET"
    for status, header in ((421, {"Host": "evil.example"}), (403, {"Origin": "http://10.0.0.1"})):
        error = refused(ask(path, {"prompt": "a"}, method, **header))
        assert error["code"] == status and "--allowed-host NAME" in error["message"]


def test_keys_are_compared_whatever_they_are(model, monkeypatch):
    options = dataclasses.replace(model.options, api_key="a sécret")
    monkeypatch.setattr(model, "options", options)
    for given in (b"", b"Bearer", b"Bearer \xff\xfe", b"Bearer a secret", b"a" * 9999):
        found = asyncio.run(_with_key(model, given))
        assert refused(found)["type"] == "authentication_error"
    assert asyncio.run(_with_key(model, b"Bearer a s\xc3\xa9cret")).status_code == 200


async def _with_key(model, given):
    transport = httpx.ASGITransport(server_app.make_app(model))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get("/v1/models", headers={"Authorization": given})


def test_characters_and_stop_strings_split_over_tokens_arrive_whole(ask):
    """With random bytes, half of them no characters, a stream has the text of the whole answer."""
    for seed in range(2):
        body = {"prompt": "é", "max_tokens": 20, "temperature": 50.0, "seed": seed, "logprobs": 1}
        whole = ask(COMPLETIONS, body).json()["choices"][0]
        expected = whole["text"], whole["finish_reason"]
        assert streamed(ask(COMPLETIONS, body | {"stream": True})) == expected
        stop = whole["text"].replace("\ufffd", "")[2:4] or "none"
        cut = ask(COMPLETIONS, body | {"stop": [stop, "never"]}).json()["choices"][0]
        assert cut["text"] == whole["text"].partition(stop)[0]
        assert cut["finish_reason"] == "stop" or stop not in whole["text"]
        again = streamed(ask(COMPLETIONS, body | {"stop": stop, "stream": True}))
        assert again == (cut["text"], cut["finish_reason"])


def test_log_probabilities_and_continuations_are_the_models(model, ask):
    text, tokenizer, size = "Isaac Li: 6247546817", model.tokenizer, model.vocab_size
    body = {"prompt": text, "max_tokens": 9, "temperature": 0, "echo": True, "logprobs": 1}
    choice = ask(COMPLETIONS, body).json()["choices"][0]
    ids = [tokenizer.bos_token_id, *tokenizer.encode(text)]
    new = continuation_alone(ids, 9, vocab_size=size)
    assert choice["text"] == text + tokenizer.decode(new, skip_special_tokens=True)
    found, (expected, _) = choice["logprobs"]["token_logprobs"], scores_alone([*ids, *new], size)
    assert found[0] is None
    np.testing.assert_allclose(found[1:], expected, atol=1e-5)


def test_a_token_that_ends_a_text_is_in_every_list(model, ask):
    for seed in itertools.count():
        body = {"prompt": "é", "max_tokens": 40, "temperature": 50.0, "seed": seed, "logprobs": 2}
        answer = ask(COMPLETIONS, body).json()
        choice, usage = answer["choices"][0], answer["usage"]
        lists = choice["logprobs"]
        assert {len(one) for one in lists.values()} == {usage["completion_tokens"]}
        for value, top in zip(lists["token_logprobs"], lists["top_logprobs"], strict=True):
            assert value in top.values()
        if choice["finish_reason"] == "stop":
            eos = model.names.text(model.tokenizer.eos_token_id)
            assert lists["tokens"][-1] == eos and eos not in choice["text"]
            break


def test_ids_without_bos_get_one_warning(model, caplog):
    app, bos = server_app.make_app(model), model.tokenizer.bos_token_id

    async def ask(prompts):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for prompt in prompts:
                body = {"prompt": prompt, "max_tokens": 1}
                assert (await client.post(COMPLETIONS, json=body)).status_code == 200

    asyncio.run(ask(["a", [bos, 97], [[bos, 97], [bos]]]))
    assert not caplog.records
    asyncio.run(ask([[97], [[bos], [97]], [98]]))
    assert caplog.text.count("token ids without BOS came") == 1


def test_a_model_whose_state_grows_needs_a_length():
    path = folder("induction_heads_mqa")
    arguments = {"pretrained": str(path), "framework": "torch", "device": "cpu"}
    with pytest.raises(ArgumentError, match="--max-length"):
        ServedModel(open_model(parse_arguments(arguments)), ServerOptions(name="model"))
    model = ServedModel(
        open_model(parse_arguments(arguments)), ServerOptions(name="model", max_tokens=40)
    )
    model.scheduler.start()
    ids = [3, 4, 5, 6, 3, 4]
    body = {"prompt": ids, "max_tokens": 9, "temperature": 0, "logprobs": 0}

    async def ask(body):
        transport = httpx.ASGITransport(server_app.make_app(model))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(COMPLETIONS, json=body)

    found = asyncio.run(ask(body)).json()["choices"][0]["logprobs"]["tokens"]
    [expected] = Evaluator(path, framework="torch", device="cpu").generate([ids], max_new_tokens=9)
    tokens = [model.names.text(token) for token in expected.tokens.tolist()]
    assert found[: len(tokens)] == tokens and len(found) - len(tokens) <= 1  # EOS
    assert "this server's 40" in refused(asyncio.run(ask(body | {"max_tokens": 35})))["message"]
    model.scheduler.close()


def streamed(answer):
    """Return the text of a stream with one answer, and its finish reason."""
    *events, last, nothing = answer.text.split("\n\n")
    assert last == "data: [DONE]" and nothing == ""
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
