"""`griffin-eval serve`, as a process of its own, asked by the clients that people have."""

import asyncio
import json
import math
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from adapters import load_adapted, load_base, logits, write_adapter
from programs import griffin_eval

import griffin_eval as package
from griffin_eval.checkpoints import folder

pytestmark = pytest.mark.slow

MODEL = folder("bytes_griffin")
BOOK = "Judith Hoffman: 8118401194\nIsaac Li: 6247546817\nConnie Mason: 9309456671\n"


class Server:
    """A server at a free port, and plain requests to it."""

    def __init__(self, *options, key=None, model=MODEL):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.key = f"http://127.0.0.1:{port}", key
        program = Path(sys.executable).with_name("griffin-eval")
        command = [program, "serve", model, "--port", port, "--served-model-name", "bytes"]
        self.process = subprocess.Popen(
            [*map(str, command), *map(str, options)], stderr=subprocess.PIPE, text=True
        )
        while True:
            assert self.process.poll() is None, self.process.stderr.read()
            try:
                if self.get("/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.1)

    def get(self, path, body=None, method=None):
        """Status and content, JSON if it is that."""
        data = None if body is None else (body if isinstance(body, bytes) else json.dumps(body))
        data = data.encode() if isinstance(data, str) else data
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        return status, json.loads(text) if text.startswith("{") else text

    def metric(self, name):
        return int(re.search(rf"^griffin_{name} (\d+)$", self.get("/metrics")[1], re.M)[1])

    def wait_for(self, name, value):
        deadline = time.monotonic() + 60
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.05)

    def close(self):
        self.process.send_signal(signal.SIGINT)
        _, said = self.process.communicate(timeout=60)
        return said


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    file = tmp_path_factory.mktemp("state") / "book.state"
    package.Evaluator(MODEL, framework="torch", device="cpu").read(BOOK).save(file)
    return file


@pytest.fixture(scope="module")
def server(state):
    server = Server("--framework", "torch", "--device", "cpu", "--state", state, "--tokenizer-info")
    yield server
    server.close()


@pytest.fixture(scope="module")
def evaluator():
    return package.Evaluator(MODEL, framework="torch", device="cpu")


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


# The openai package


def test_completions_continue_as_the_evaluator_does(client, evaluator):
    prompts = [BOOK + "\nIsaac Li:", BOOK + "\nConnie Mason:", "import o"]
    expected = [each.text for each in evaluator.generate(prompts, max_new_tokens=11)]
    answer = client.completions.create(model="bytes", prompt=prompts, max_tokens=11, temperature=0)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 33 and answer.choices[0].finish_reason == "length"
    parts = client.completions.create(
        model="bytes",
        prompt=prompts,
        max_tokens=11,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    streamed = ["", "", ""]
    for part in parts:
        for choice in part.choices:
            streamed[choice.index] += choice.text
    assert streamed == expected and part.usage.completion_tokens == 33


def test_log_probabilities_of_a_prompt_are_the_evaluators(client, evaluator):
    [score] = evaluator.score([BOOK])
    answer = client.completions.create(
        model="bytes", prompt=BOOK, max_tokens=1, temperature=0, echo=True, logprobs=3
    )
    found = answer.choices[0].logprobs
    assert found.token_logprobs[0] is found.top_logprobs[0] is None
    np.testing.assert_allclose(found.token_logprobs[1:-1], score.logprobs, atol=1e-4)
    assert len(found.tokens) == len(found.text_offset) == len(score.tokens) + 1
    likeliest = [max(each.values()) for each in found.top_logprobs[1:]]
    greedy = np.equal(likeliest, found.token_logprobs[1:])
    assert (greedy[:-1] == score.greedy).all() and greedy[-1]
    for value, top in zip(found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
        assert value in top.values() and len(top) in (3, 4)
    again = client.completions.create(
        model="bytes", prompt=score.tokens.tolist(), max_tokens=0, echo=True, logprobs=1
    )
    assert again.choices[0].logprobs.token_logprobs == found.token_logprobs[:-1]


def test_processes_that_share_the_model_answer_as_one():
    exact = {"framework": "torch", "device": "cpu", "dtype": "float32"}
    evaluator = package.Evaluator(MODEL, **exact)
    options = [word for name, value in exact.items() for word in (f"--{name}", value)]
    server = Server(*options, "--tensor-parallel-size", 2)
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    test_completions_continue_as_the_evaluator_does(client, evaluator)
    test_log_probabilities_of_a_prompt_are_the_evaluators(client, evaluator)
    server.close()
    assert server.process.returncode == 0


def test_no_two_byte_tokens_share_a_key(client, evaluator):
    vocabulary = evaluator.config.vocab_size
    answer = client.completions.create(
        model="bytes", prompt=[1, 200, 130], max_tokens=1, logprobs=20, echo=True, temperature=0
    )
    assert vocabulary > 128
    for top in answer.choices[0].logprobs.top_logprobs[1:]:
        assert len(top) in (20, 21)


def test_seeds_and_samples(client):
    def sample(**arguments):
        arguments = {"model": "bytes", "prompt": "The", "max_tokens": 12, "seed": 5} | arguments
        return [choice.text for choice in client.completions.create(**arguments).choices]

    several = sample(n=3)
    assert sample(n=3) == several and len(set(several)) > 1
    assert sample(seed=6) != sample()
    assert sample(top_p=0.0) == sample(temperature=0) == sample(extra_body={"top_k": 1})


def test_stop_strings_end_the_text(client):
    whole = dict(model="bytes", prompt=BOOK + "\nIsaac Li:", max_tokens=11, temperature=0)
    text = client.completions.create(**whole).choices[0].text
    for stream in (False, True):
        answer = client.completions.create(**whole, stop=[text[4:6], "never"], stream=stream)
        parts = [part.choices[0] for part in (answer if stream else [answer])]
        assert "".join(part.text for part in parts) == text[:4]
        assert parts[-1].finish_reason == "stop"


def test_async_clients_share_what_they_ask_about(server):
    async def ask():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            return await asyncio.gather(
                *(
                    client.completions.create(
                        model="bytes", prompt=f"{BOOK * 5}\n{n}", max_tokens=4, temperature=0
                    )
                    for n in range(20)
                )
            )

    before = server.metric("tokens_read_total")
    answers = asyncio.run(ask())
    assert len(answers) == 20
    read, asked = server.metric("tokens_read_total") - before, answers[0].usage.prompt_tokens * 20
    assert read < asked / 4


def test_a_saved_state_is_a_model_of_its_own(client, server, evaluator, state):
    assert [model.id for model in client.models.list()] == ["bytes", "bytes:book"]
    behind = package.Evaluator(MODEL, framework="torch", device="cpu", state=state)
    [expected] = behind.generate(["\nIsaac Li:"], max_new_tokens=11)
    answer = client.completions.create(
        model="bytes:book", prompt="\nIsaac Li:", max_tokens=11, temperature=0
    )
    assert answer.choices[0].text == expected.text == " 6247546817"
    with pytest.raises(openai.BadRequestError, match="without a chat template"):
        client.chat.completions.create(
            model="bytes:book", messages=[{"role": "user", "content": "a"}]
        )
    with pytest.raises(openai.NotFoundError, match="expected bytes, bytes:book"):
        client.completions.create(model="other", prompt="a")


# lm-eval


def instances(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


def local(server, **arguments):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=server.url + "/v1/completions",
        model="bytes",
        tokenizer_backend="huggingface",
        tokenizer=str(MODEL),
        max_length=10_000_000,
        tokenized_requests=True,
        **arguments,
    )


@pytest.fixture(scope="module")
def griffin():
    from griffin_eval.lm.model import GriffinLM

    return GriffinLM(str(MODEL), "torch", device="cpu")


CHOICES = [
    (context, choice)
    for context in (BOOK + "\nIsaac Li:", "The paragraph above is about", "import")
    for choice in (" 6247546817", " 9", " sys", " é")
]


@pytest.mark.parametrize("concurrent", [1, 4])
def test_local_completions_scores_choices_as_griffin_does(server, griffin, concurrent):
    requests = instances("loglikelihood", CHOICES)
    found = local(server, add_bos_token=True, num_concurrent=concurrent).loglikelihood(requests)
    expected = griffin.loglikelihood(requests)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], rtol=1e-4)


def test_local_completions_reads_documents_as_griffin_does(server, griffin):
    requests = instances("loglikelihood_rolling", [(BOOK,), ("é and more\n" * 9,)])
    found = local(server).loglikelihood_rolling(requests)
    np.testing.assert_allclose(found, griffin.loglikelihood_rolling(requests), rtol=1e-5)


def test_local_completions_generates_as_griffin_does(server, griffin):
    arguments = {"until": ["\n"], "max_gen_toks": 15, "temperature": 0}
    requests = instances(
        "generate_until",
        [(f"{BOOK}\n{name}:", dict(arguments)) for name in ("Isaac Li", "Connie Mason", "Nobody")],
    )
    found = local(server, add_bos_token=True).generate_until(requests)
    assert found == griffin.generate_until(requests)


def test_chat_of_a_model_without_a_template(tmp_path, griffin):
    from lm_eval.models.api_models import JsonChatStr
    from lm_eval.models.openai_completions import LocalChatCompletion

    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    server = Server("--framework", "torch", "--chat-template", template, "--system-role", "merge")
    try:
        question = {"role": "user", "content": BOOK + "\nIsaac Li:"}
        arguments = {"until": ["\n"], "max_gen_toks": 15, "temperature": 0}
        chat = LocalChatCompletion(base_url=server.url + "/v1/chat/completions", model="bytes")
        asked = JsonChatStr(json.dumps([question]))
        found = chat.generate_until(instances("generate_until", [(asked, dict(arguments))]))
        plain = instances("generate_until", [(question["content"], dict(arguments))])
        assert found == griffin.generate_until(plain)
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        messages = [{"role": "system", "content": "Look it up."}, question]
        whole = dict(
            model="bytes",
            messages=messages,
            max_tokens=11,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
        )
        answer = client.chat.completions.create(**whole).choices[0]
        prompt = "Look it up.\n\n" + question["content"]
        same = client.completions.create(model="bytes", prompt=prompt, max_tokens=11, temperature=0)
        assert answer.message.content == same.choices[0].text
        assert len(answer.logprobs.content) == 11
        assert all(len(token.top_logprobs) == 2 for token in answer.logprobs.content)
        assert_helmet_is_answered(client, messages)
        parts = client.chat.completions.create(**whole, stream=True)
        assert "".join(p.choices[0].delta.content or "" for p in parts) == answer.message.content
    finally:
        server.close()


def assert_helmet_is_answered(client, messages):
    """As ``TgiVllmModel`` of HELMET's model_utils.py asks (``--use_tgi_or_vllm_serving``), from 32
    threads, and the fields that it reads."""

    def ask(stop):
        return client.chat.completions.create(
            model="bytes",
            messages=messages,
            max_tokens=12,
            temperature=0.0,
            top_p=1.0,
            stop=stop,
            seed=42,
        )

    with ThreadPoolExecutor(32) as threads:
        answers = [*threads.map(ask, [None, ["\n", "\n\n"]] * 16)]
    for number, answer in enumerate(answers):
        text = answer.choices[0].message.content
        assert text.rstrip("\n") == " 6247546817" and ("\n" in text) is not number % 2
        assert answer.usage.prompt_tokens == 1 + len(
            "".join(f"\n\n{one['content']}" for one in messages).strip().encode()
        )
        assert answer.usage.completion_tokens in (11, 12) and answer.usage.total_tokens
        assert answer.system_fingerprint is None


# Other addresses


def test_generate_as_rulers_client_asks(server):
    body = {"prompt": BOOK + "\nIsaac Li:", "max_tokens": 11, "temperature": 0.0, "top_k": 32}
    body |= {"top_p": 1.0, "stop": ["\n"]}
    for method in ("POST", "PUT"):
        status, answer = server.get("/generate", body, method)
        assert (status, answer) == (200, {"text": [" 6247546817"]})


def test_tokens_and_what_the_server_is(server, evaluator):
    [score] = evaluator.score(["a é"])
    status, found = server.get("/tokenize", {"prompt": "a é"})
    assert status == 200 and found["tokens"] == score.tokens.tolist()
    assert server.get("/detokenize", {"tokens": found["tokens"][1:]}) == (200, {"prompt": "a é"})
    assert server.get("/tokenizer_info")[1]["vocab_size"] <= evaluator.config.vocab_size
    assert server.get("/health") == (200, {"status": "ready"})


# Bad input


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"prompt": "a", "colour": 1}, 400, "colour"),
        ({"prompt": "a", "best_of": 2}, 400, "best_of=2"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"prompt": "a", "temperature": math.nan}, 400, "temperature"),
        ({"prompt": "a", "max_tokens": "5"}, 400, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, 400, "echo"),
        ({"prompt": "a", "logprobs": 21}, 400, "logprobs"),
        ({"prompt": "a", "stream": 1}, 400, "stream"),
        ({"prompt": "a", "stop": [1]}, 400, "stop"),
        ({"prompt": [1, 10**9]}, 400, "token ids"),
        ({"prompt": [[1], []]}, 400, "prompt"),
        ({"prompt": {}}, 400, "prompt"),
        ({}, 400, "prompt"),
        ([], 400, "object"),
        (b"{", 400, "JSON"),
        (b"[" * 100_000, 400, "JSON"),
        (b"\xff\xfe", 400, "JSON"),
    ],
)
def test_bad_input_is_refused_by_name(server, body, status, named):
    found, answer = server.get("/v1/completions", body)
    assert found == status and named in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_unknown_addresses(server):
    assert server.get("/v1/nothing")[0] == 404
    assert server.get("/v1/completions")[0] == 405
    assert server.get("/v1/chat/completions", {"messages": []})[0] == 400


def test_limits(state):
    server = Server(
        *("--framework", "torch", "--max-length", 40, "--queue", 2, "--max-body", 2000),
        *("--api-key", "a secret"),
        key="a secret",
    )
    try:
        status, answer = server.get("/v1/completions", {"prompt": "a" * 30, "max_tokens": 30})
        assert status == 400 and "40" in answer["error"]["message"]
        assert server.get("/v1/completions", {"prompt": "a" * 3000})[0] == 413
        status, answer = server.get("/v1/completions", {"prompt": ["a"] * 3})
        assert status == 429 and answer["error"]["type"] == "rate_limit_error"
        with pytest.raises(openai.RateLimitError) as limited:
            openai.OpenAI(
                base_url=f"{server.url}/v1", api_key="a secret", max_retries=0
            ).completions.create(model="bytes", prompt=["a"] * 3)
        assert int(limited.value.response.headers["Retry-After"]) > 0
        server.key = "another"
        assert server.get("/v1/models")[0] == 401
        assert server.get("/v1/completions", {"prompt": "a"})[0] == 401
        server.key = "a secret"
        assert server.get("/v1/completions", {"prompt": "a"})[0] == 200
    finally:
        server.close()
    refused = griffin_eval("serve", MODEL, "--host", "0.0.0.0")
    assert refused.returncode == 2 and "--api-key" in refused.stderr


def test_a_request_that_takes_too_long():
    server = Server("--framework", "torch", "--timeout", 0.3)
    try:
        body = {"prompt": "a", "max_tokens": 10**6}
        status, answer = server.get("/v1/completions", body)
        assert status == 504 and answer["error"]["type"] == "api_error"
        assert "0.3 seconds" in answer["error"]["message"]
        streamed = server.get("/v1/completions", body | {"stream": True})[1]
        last = [line for line in streamed.splitlines() if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 504
        server.wait_for("unfinished", 0)
    finally:
        server.close()


def test_an_adapter_is_merged(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    assert griffin_eval("convert", MODEL, base, "--to", "hf").returncode == 0
    write_adapter(adapter, base, r=4, target_modules=["linear_y", "q_proj"])
    ids = [257, *b"abcab"]
    server = Server("--framework", "torch", "--dtype", "float32", "--adapter", adapter, model=base)
    try:
        body = {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1}
        choice = server.get("/v1/completions", body)[1]["choices"][0]
    finally:
        server.close()
    places, tokens = np.arange(len(ids) - 1), np.array([ids])
    found = choice["logprobs"]["token_logprobs"][1 : len(ids)]
    adapted, plain = (
        logits(model, tokens)[0]
        for model in (load_adapted(base, adapter, torch.float32), load_base(base, torch.float32))
    )
    # The merged weights are in the base's bfloat16.
    np.testing.assert_allclose(found, normalised(adapted)[places, ids[1:]], atol=1e-2)
    assert np.abs(normalised(plain)[places, ids[1:]] - found).max() > 0.1


def normalised(scores):
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


# Those who leave


def test_a_client_that_goes_away_frees_its_row(server):
    host, port = server.url.removeprefix("http://").split(":")
    for stream in (True, False):
        body = json.dumps({"prompt": "a", "max_tokens": 10**6, "stream": stream}).encode()
        with socket.create_connection((host, int(port))) as connection:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            server.wait_for("generating", 1)
        server.wait_for("generating", 0)
        server.wait_for("unfinished", 0)


def test_a_client_that_goes_away_before_its_body_has_come():
    server = Server("--framework", "torch")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n"
        connection.sendall(head.encode() + b'{"prompt"')
        time.sleep(0.5)
    assert server.get("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
    assert "Traceback" not in server.close()


def test_an_interrupt_names_what_was_cut():
    server = Server("--framework", "torch")
    with ThreadPoolExecutor() as threads:
        body = {"prompt": "a", "max_tokens": 10**6}

        def ask():
            try:
                return server.get("/v1/completions", body)
            except OSError:
                return None

        asked = threads.submit(ask)
        server.wait_for("generating", 1)
        said = server.close()
        assert asked.result() is None or asked.result()[0] >= 500
    assert re.search(r"cut off: 1 requests .*\(2 tokens, \d+ of 1000000 new\)", said), said
    assert "Traceback" not in said


def test_the_benchmark_measures_both():
    sizes = ("--requests", 4, "--clients", 2, "--new-tokens", 3, "--rounds", 1)
    done = griffin_eval("bench", "serve", MODEL, *sizes)
    assert done.returncode == 0, done.stderr
    rows = [
        line for line in done.stdout.splitlines() if "continuations" in line or "choices" in line
    ]
    assert len(rows) == 2 and "seconds to the first token" in done.stdout


def test_the_benchmark_says_why_a_server_did_not_start(tmp_path):
    done = griffin_eval("bench", "serve", tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
