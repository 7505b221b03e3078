"""The HTTP server: the completions API, and its other routes."""

import asyncio
import contextlib
import hmac
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as Http
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from griffin_eval.engine.live.requests import Request
from griffin_eval.server.answers import Completion, Waker
from griffin_eval.server.fields import (
    AnswerBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
    check_body,
    read_body,
)
from griffin_eval.server.hosts import Hosts
from griffin_eval.server.model import ServedModel, any_seed
from griffin_eval.server.refused import Refused

MAX_PROMPTS = 2048  # maximum number of answers that a body may request
LONG = 1 << 15  # characters or tokens of prompts that are encoded in a thread
GRACE = 2  # seconds after the timeout in which a client that reads is told about it

logger = logging.getLogger(__name__)


class JSONResponse(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def make_app(model: ServedModel) -> Starlette:
    """Return the server of a model whose scheduler has been started."""
    server = _Server(model)
    routes = [
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
        Route("/generate", server.generate, methods=["POST", "PUT"]),
        Route("/v1/models", server.models),
        Route("/v1/models/{name:path}", server.model),
        Route("/tokenize", server.tokenize, methods=["POST"]),
        Route("/detokenize", server.detokenize, methods=["POST"]),
        Route("/health", server.health),
        Route("/metrics", server.metrics),
    ]
    if model.options.tokenizer_info:
        routes.append(Route("/tokenizer_info", server.tokenizer_info))
    handlers: Any = {Refused: _refused, HTTPException: _http_error, Exception: _failed}
    guard = Middleware(_HostGuard, model.options.hosts)
    return Starlette(routes=routes, exception_handlers=handlers, middleware=[guard])


class _HostGuard:
    """Middleware that refuses unknown values of the headers Host and Origin."""

    def __init__(self, app: ASGIApp, hosts: Hosts):
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self._hosts.check(Headers(scope=scope))
        except Refused as error:
            await _refused(Http(scope), error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _Server:
    def __init__(self, model: ServedModel):
        self._model, self._options = model, model.options
        self._scheduler, self._created = model.scheduler, int(time.time())
        self._warned = False

    # Requests

    async def completions(self, http: Http) -> Response:
        body = check_body(CompletionBody, await self._body(http))
        return await self._answer(http, body, body.prompt, chat=False)

    async def chat(self, http: Http) -> Response:
        body = check_body(ChatBody, await self._body(http))
        prompt = self._model.render(body.messages, self._model.start_of(body.model))
        return await self._answer(http, body, [prompt], chat=True)

    async def generate(self, http: Http) -> Response:
        body = check_body(GenerateBody, await self._body(http))
        async with self._submit(body, body.prompt) as (completions, wake):
            await self._wait(http, completions, wake)
            return JSONResponse({"text": [each.text for each in completions]})

    async def _answer(
        self, http: Http, body: AnswerBody, prompts: list[str | list[int]], chat: bool
    ) -> Response:
        if body.stream:
            # Errors have to be raised before the response begins.
            context = self._submit(body, prompts)
            completions, wake = await context.__aenter__()
            parts = self._parts(http, context, completions, wake, body, chat)
            return StreamingResponse(parts, media_type="text/event-stream")
        async with self._submit(body, prompts) as (completions, wake):
            await self._wait(http, completions, wake)
        head = self._head(body, chat, part=False)

        def response() -> Response:
            choices = [
                {"index": index, "finish_reason": each.finish_reason} | _content(each, chat)
                for index, each in enumerate(completions)
            ]
            return JSONResponse(head | {"choices": choices, "usage": _usage(completions, body.n)})

        # The log-probabilities of long texts take seconds to write; do not block other clients.
        long = sum(len(each.prompt) for each in completions) > LONG
        return await asyncio.to_thread(response) if long else response()

    @contextlib.asynccontextmanager
    async def _submit(
        self, body: AnswerBody, prompts: list[str | list[int]]
    ) -> AsyncIterator[tuple[list[Completion], Waker]]:
        """Add the requests of a body to the scheduler; on exit cancel unfinished ones."""
        most = min(MAX_PROMPTS, self._options.queue)
        if len(prompts) * body.n > most:
            raise Refused(
                f"a body may ask for {most} answers at most, and this one asks for "
                f"{len(prompts) * body.n}: send several, or start the server with more --queue",
                param="prompt",
            )
        start = self._model.start_of(body.model)
        wake, seed = Waker(), any_seed() if body.seed is None else abs(body.seed)

        def ask() -> list[tuple[Request, Completion]]:
            return [
                pair
                for number, prompt in enumerate(prompts)
                for pair in self._model.ask(prompt, number * body.n, body, start, wake, seed)
            ]

        self._check_queue(len(prompts) * body.n)
        # Long texts take seconds to tokenise; do not block other clients.
        long = sum(map(len, prompts)) > LONG
        pairs = await asyncio.to_thread(ask) if long else ask()
        self._check_queue(len(pairs))
        if start is None and not self._warned:
            ids = [
                pair[1].prompt
                for pair, prompt in zip(pairs[:: body.n], prompts, strict=True)
                if isinstance(prompt, list)
            ]
            if any(map(self._model.without_bos, ids)):
                self._warned = True
                logger.warning("token ids without BOS came for a model that was trained with one")
        requests: list[Request] = []

        def cancel() -> None:
            for request, (_, completion) in zip(requests, pairs, strict=False):
                if completion.answer.reason is None:
                    self._scheduler.cancel(request)

        # The other end of a stream may not read, so that nobody would look at the clock.
        late = asyncio.get_running_loop().call_later(self._options.timeout + GRACE, cancel)
        try:
            for request, _ in pairs:
                try:
                    self._scheduler.add(request)
                except RuntimeError as error:
                    raise Refused("the server is ending", 503) from error
                requests.append(request)
            yield [completion for _, completion in pairs], wake
        finally:
            late.cancel()
            cancel()

    def _check_queue(self, more: int) -> None:
        if self._scheduler.unfinished + more > self._options.queue:
            raise Refused("too many requests wait: try again later", 429)

    async def _wait(self, http: Http, completions: list[Completion], wake: Waker) -> None:
        """Wait for answers to end. Failures, the timeout and a disconnected client are refused."""
        deadline = time.monotonic() + self._options.timeout
        while not all(each.answer.reason for each in completions):
            wake.event.clear()
            if all(each.answer.reason for each in completions):
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wake.event.wait(), 0.5)
            if time.monotonic() > deadline:
                raise Refused(f"no answer within {self._options.timeout:g} seconds", 504)
            if await http.is_disconnected():
                raise Refused("the client has gone", 499)
        for each in completions:
            _check(each)

    async def _parts(
        self,
        http: Http,
        context: contextlib.AbstractAsyncContextManager[Any],
        completions: list[Completion],
        wake: Waker,
        body: AnswerBody,
        chat: bool,
    ) -> AsyncIterator[bytes]:
        """Yield the parts of an answer as server-sent events."""
        head, ended = self._head(body, chat, part=True), set[int]()
        deadline = time.monotonic() + self._options.timeout
        try:
            if chat:
                for index in range(len(completions)):
                    delta = {"role": "assistant", "content": ""}
                    choice = {"index": index, "delta": delta, "finish_reason": None}
                    yield _event(head | {"choices": [choice]})
            while len(ended) < len(completions):
                wake.event.clear()
                for index, each in enumerate(completions):
                    reason = each.answer.reason
                    if index in ended or not (each.answer.tokens or reason):
                        continue
                    _check(each)
                    text, logprobs, scored = each.news(chat)
                    if reason:
                        ended.add(index)
                    if not (text or reason or scored):
                        continue
                    choice: dict[str, Any] = {"index": index, "logprobs": logprobs}
                    choice |= {"delta": {"content": text}} if chat else {"text": text}
                    choice["finish_reason"] = each.finish_reason if reason else None
                    yield _event(head | {"choices": [choice]})
                if len(ended) < len(completions):
                    if await http.is_disconnected():
                        return
                    if time.monotonic() > deadline:
                        raise Refused(f"no answer within {self._options.timeout:g} seconds", 504)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(wake.event.wait(), 1)
            if body.usage:
                yield _event(head | {"choices": [], "usage": _usage(completions, body.n)})
            yield b"data: [DONE]\n\n"
        except Refused as error:
            yield _event(_error(error))
        finally:
            await context.__aexit__(None, None, None)

    def _head(self, body: AnswerBody, chat: bool, part: bool) -> dict[str, Any]:
        kind = ("chat.completion" + ".chunk" * part) if chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model or self._options.name,
            "system_fingerprint": None,
        }

    async def _body(self, http: Http) -> Any:
        """Return the JSON object of a body. Refuse a missing key, or a body that is too long, too
        slow, or not JSON."""
        self._check_key(http)
        # A web page can send other content types to any server without a CORS preflight.
        content_type = http.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            raise Refused(f"Content-Type must be application/json, found {content_type!r:.60}", 415)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._options.timeout):
                async for part in http.stream():
                    parts.append(part)
                    size += len(part)
                    if size > self._options.max_body:
                        raise Refused(f"the body has more than {self._options.max_body} bytes", 413)
        except ClientDisconnect:
            raise Refused("the client has gone", 499) from None
        except TimeoutError:
            raise Refused(f"no body within {self._options.timeout:g} seconds", 408) from None
        return read_body(b"".join(parts))

    def _check_key(self, http: Http) -> None:
        if (key := self._options.api_key) is None:
            return
        given = http.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode("latin-1"), key.encode()):  # the bytes as sent
            raise Refused("the API key is missing or wrong", 401)

    # Other routes

    async def models(self, http: Http) -> Response:
        self._check_key(http)
        data = [self._described(name) for name in self._model.models]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, http: Http) -> Response:
        self._check_key(http)
        name = http.path_params["name"]
        self._model.start_of(name)
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        shared = {"object": "model", "created": self._created, "owned_by": "griffin-eval"}
        return {"id": name} | shared | {"max_model_len": self._options.max_tokens}

    async def tokenize(self, http: Http) -> Response:
        body = check_body(TokenizeBody, await self._body(http))
        start = self._model.start_of(body.model)

        def encode() -> list[int]:
            special = body.add_special_tokens
            return self._model.encode(body.prompt, start, special=special).tolist()

        ids = await asyncio.to_thread(encode) if len(body.prompt) > LONG else encode()
        return JSONResponse(
            {"tokens": ids, "count": len(ids), "max_model_len": self._options.max_tokens}
        )

    async def detokenize(self, http: Http) -> Response:
        body = check_body(DetokenizeBody, await self._body(http))
        self._model.start_of(body.model)
        self._model.check_ids(body.tokens, "tokens")
        text = self._model.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text})

    async def tokenizer_info(self, http: Http) -> Response:
        self._check_key(http)
        tokenizer = self._model.tokenizer
        names = ("name", "vocab_size", "bos_token", "eos_token", "pad_token", "chat_template")
        return JSONResponse({name: getattr(tokenizer, name) for name in names})

    async def health(self, http: Http) -> Response:
        if self._scheduler.failed is not None:
            return JSONResponse({"status": "failed"}, 503)
        return JSONResponse({"status": "ready"})

    async def metrics(self, http: Http) -> Response:
        self._check_key(http)
        counts, scheduler = self._scheduler.counts, self._scheduler
        lines = []

        def metric(name: str, kind: str, text: str, values: dict[str, int]) -> None:
            lines.append(f"# HELP griffin_{name} {text}\n# TYPE griffin_{name} {kind}")
            lines.extend(f"griffin_{name}{label} {value}" for label, value in values.items())

        for name, text in (
            ("requests", "Requests received."),
            ("prompt_tokens", "Prompt tokens of the requests that were started."),
            ("tokens_read", "Prompt tokens read by the model."),
            ("tokens_kept", "Prompt tokens not read because their states were on disk."),
            ("tokens_generated", "Tokens generated."),
            ("states_evicted", "States evicted from memory."),
            ("steps", "Calls of the model."),
        ):
            metric(f"{name}_total", "counter", text, {"": getattr(counts, name)})
        finished = {f'{{reason="{key}"}}': value for key, value in [*counts.finished.items()]}
        metric("finished_total", "counter", "Requests finished, by reason.", finished)
        compiled = {"": self._model.runner.compilations}
        metric("compilations_total", "counter", "Shapes compiled.", compiled)
        metric("unfinished", "gauge", "Requests waiting or running.", {"": scheduler.unfinished})
        metric("generating", "gauge", "Requests being decoded.", {"": scheduler.generating})
        metric("states", "gauge", "States in memory.", {"": scheduler.states})
        return PlainTextResponse("\n".join(lines) + "\n")


def _check(completion: Completion) -> None:
    answer = completion.answer
    if answer.reason == "error":
        raise Refused(str(answer.error) or type(answer.error).__name__, 500)
    if answer.reason == "cancelled":
        raise Refused("the server has ended", 503)


def _content(completion: Completion, chat: bool) -> dict[str, Any]:
    """Return text and log-probabilities of an answer."""
    if not chat:
        return {"text": completion.text, "logprobs": completion.logprobs()}
    message = {"role": "assistant", "content": completion.text}
    return {"message": message, "logprobs": completion.chat_logprobs()}


def _usage(completions: list[Completion], n: int) -> dict[str, int]:
    prompt = sum(len(each.prompt) for each in completions[::n])
    new = sum(len(each.answer.tokens) for each in completions)
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


def _error(error: Refused) -> dict[str, Any]:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = str(error).encode(errors="replace").decode()
    told = {"message": message, "type": kind, "param": error.param, "code": error.status}
    return {"error": told}


def _refused(http: Http, error: Refused) -> Response:
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(_error(error), error.status, headers)


def _http_error(http: Http, error: HTTPException) -> Response:
    message = f"{http.method} {http.url.path}: {error.detail}"
    if error.status_code == 404:
        known = ", ".join(route.path_format for route in http.app.routes)
        message = f"there is no address {http.url.path:.200}: expected {known}"
    return _refused(http, Refused(message, error.status_code))


def _failed(http: Http, error: Exception) -> Response:
    return _refused(http, Refused(f"the server failed: {type(error).__name__}", 500))
