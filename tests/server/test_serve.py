"""`griffin-eval serve` in a process of its own, with requests by common clients."""

import json
import re
import shutil
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
from programs import griffin_eval

import griffin_eval as package
from griffin_eval.checkpoints import folder

pytestmark = pytest.mark.slow

MODEL = folder("bytes_griffin")
POST = (
    b"POST /v1/completions HTTP/1.%d\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"%s\r\n\r\n"
)
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
        """Return the status and content of an answer; parse the content if it is a JSON object."""
        data = None if body is None else (body if isinstance(body, bytes) else json.dumps(body))
        data = data.encode() if isinstance(data, str) else data
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        headers["Content-Type"] = "application/json"
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


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Write a chat template and the state of a book to a folder."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "template.jinja").write_text(TEMPLATE)
    package.Evaluator(MODEL, framework="torch", device="cpu").read(BOOK).save(folder / "book.state")
    return folder


@pytest.fixture(scope="module")
def state(files):
    return files / "book.state"


@pytest.fixture(scope="module")
def server(files):
    server = Server(
        *("--framework", "torch", "--device", "cpu", "--tokenizer-info"),
        *("--state", files / "book.state"),
        *("--chat-template", files / "template.jinja", "--system-role", "merge"),
    )
    yield server
    assert "Traceback" not in server.close()


@pytest.fixture(scope="module")
def evaluator():
    return package.Evaluator(MODEL, framework="torch", device="cpu")


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


# The openai package


@pytest.mark.ci
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


@pytest.mark.ci
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


def test_seeds_and_samples(client):
    def sample(**arguments):
        arguments = {"model": "bytes", "prompt": "The", "max_tokens": 12, "seed": 5} | arguments
        return [choice.text for choice in client.completions.create(**arguments).choices]

    several = sample(n=3)
    assert sample(n=3) == several and len(set(several)) > 1
    assert sample(seed=6) != sample()
    assert sample(top_p=0.0) == sample(temperature=0) == sample(extra_body={"top_k": 1})


def test_text_offsets_are_those_of_the_text(client, server):
    text = "é東 x🙂 end"
    ids = server.get("/tokenize", {"prompt": text})[1]["tokens"]
    for prompt in (text, ids):
        choice = client.completions.create(
            model="bytes", prompt=prompt, max_tokens=0, echo=True, logprobs=1
        ).choices[0]
        found = choice.logprobs
        assert choice.text == text and found.text_offset[:2] == [0, 0]
        whole = zip(found.tokens, found.text_offset, strict=True)
        assert all(
            text[at : at + len(token)] == token
            for token, at in list(whole)[1:]
            if not token.startswith("bytes:")
        )
        ended = [*found.text_offset[1:], len(text)]
        assert ended == sorted(ended) and len(found.tokens) == len(text.encode()) + 1


def test_a_saved_state_is_a_model_of_its_own(client, server, evaluator, state):
    listed = [model.id for model in client.models.list()]
    assert listed == ["bytes", "bytes:book"]
    assert [client.models.retrieve(name).id for name in listed] == listed
    with pytest.raises(openai.NotFoundError, match="there is no model 'a/b': expected bytes"):
        client.models.retrieve("a/b")
    behind = package.Evaluator(MODEL, framework="torch", device="cpu", state=state)
    [expected] = behind.generate(["\nIsaac Li:"], max_new_tokens=11)
    answer = client.completions.create(
        model="bytes:book", prompt="\nIsaac Li:", max_tokens=11, temperature=0
    )
    assert answer.choices[0].text == expected.text == " 6247546817"
    # Echoed tokens are only those that the client sent; the first has a log-probability, too.
    ids = server.get("/tokenize", {"model": "bytes:book", "prompt": "\nIsaac Li:"})[1]["tokens"]
    [score] = behind.score(["\nIsaac Li:"])
    for prompt in ("\nIsaac Li:", ids):
        answer = client.completions.create(
            model="bytes:book", prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=1
        )
        choice = answer.choices[0]
        assert answer.usage.prompt_tokens == len(ids) == len(score.logprobs)
        assert choice.text == "\nIsaac Li: " and "".join(choice.logprobs.tokens) == choice.text
        np.testing.assert_allclose(choice.logprobs.token_logprobs[:-1], score.logprobs, atol=1e-4)
        assert choice.logprobs.text_offset == list(range(len(ids) + 1))
    requests = instances("loglikelihood", [("\nIsaac Li:", choice) for choice in (" 62", " 9")])
    found = local(server, model="bytes:book").loglikelihood(requests)
    expected = [
        behind.score(["\nIsaac Li:" + choice])[0].logprobs[-len(choice) :].sum()
        for choice in (" 62", " 9")
    ]
    np.testing.assert_allclose([x for x, _ in found], expected, rtol=1e-4)
    assert server.get("/tokenize", {"model": "none", "prompt": "a"})[0] == 404
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


def local(server, model="bytes", **arguments):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=server.url + "/v1/completions",
        model=model,
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


def check_local_completions(server, griffin):
    """Check all kinds of requests with lm-eval's own client."""
    requests = instances("loglikelihood", CHOICES)
    found = local(server, add_bos_token=True, num_concurrent=4).loglikelihood(requests)
    expected = griffin.loglikelihood(requests)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    np.testing.assert_allclose([x for x, _ in found], [x for x, _ in expected], rtol=1e-4)
    requests = instances("loglikelihood_rolling", [(BOOK,), ("é and more\n" * 9,)])
    found = local(server).loglikelihood_rolling(requests)
    np.testing.assert_allclose(found, griffin.loglikelihood_rolling(requests), rtol=1e-5)
    arguments = {"until": ["\n"], "max_gen_toks": 15, "temperature": 0}
    names = ("Isaac Li", "Connie Mason", "Nobody")
    asked = [(f"{BOOK}\n{name}:", dict(arguments)) for name in names]
    requests = instances("generate_until", asked)
    found = local(server, add_bos_token=True).generate_until(requests)
    assert found == griffin.generate_until(requests)


@pytest.mark.ci
def test_local_completions_answers_as_griffin_does(server, griffin):
    check_local_completions(server, griffin)


QUESTION = {"role": "user", "content": BOOK + "\nIsaac Li:"}
SYSTEM = {"role": "system", "content": "Look it up."}


def test_local_chat_completions_generates_as_griffin_does(server, griffin):
    from lm_eval.models.api_models import JsonChatStr
    from lm_eval.models.openai_completions import LocalChatCompletion

    arguments = {"until": ["\n"], "max_gen_toks": 15, "temperature": 0}
    chat = LocalChatCompletion(base_url=server.url + "/v1/chat/completions", model="bytes")
    asked = JsonChatStr(json.dumps([QUESTION]))
    found = chat.generate_until(instances("generate_until", [(asked, dict(arguments))]))
    plain = instances("generate_until", [(QUESTION["content"], dict(arguments))])
    assert found == griffin.generate_until(plain)


@pytest.mark.ci
def test_chats_are_completions_of_their_prompt(client):
    whole = dict(
        model="bytes",
        messages=[SYSTEM, QUESTION],
        max_completion_tokens=11,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    chat = client.chat.completions.create(**whole)
    answer = chat.choices[0]
    prompt = f"Look it up.\n\n{QUESTION['content']}"
    same = client.completions.create(
        model="bytes", prompt=prompt, max_tokens=11, temperature=0, logprobs=2
    )
    assert answer.message.role == "assistant" and chat.object == "chat.completion"
    assert answer.message.content == same.choices[0].text
    assert answer.finish_reason == "length" and chat.usage == same.usage
    logprobs = same.choices[0].logprobs
    assert [token.token for token in answer.logprobs.content] == logprobs.tokens
    found = [token.logprob for token in answer.logprobs.content]
    np.testing.assert_allclose(found, logprobs.token_logprobs, atol=1e-4)
    for token in answer.logprobs.content:
        assert bytes(token.bytes).decode() == token.token
        first, second = token.top_logprobs
        assert first.token == token.token and first.logprob == token.logprob >= second.logprob
    noise = client.chat.completions.create(**whole | {"temperature": 50.0, "seed": 3}).choices[0]
    written = b"".join(bytes(token.bytes or b"") for token in noise.logprobs.content)
    assert written.decode(errors="replace") == noise.message.content
    parts = [*client.chat.completions.create(**whole, stream=True)]
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[0].object == "chat.completion.chunk" and len({part.id for part in parts}) == 1
    deltas = [choice.delta.content or "" for part in parts for choice in part.choices]
    assert "".join(deltas) == answer.message.content
    tokens = [one for p in parts for c in p.choices if c.logprobs for one in c.logprobs.content]
    assert [token.token for token in tokens] == logprobs.tokens
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs logprobs"):
        client.chat.completions.create(model="bytes", messages=[QUESTION], top_logprobs=2)


def test_chats_with_several_answers_stop_strings_and_usage(client):
    whole = dict(model="bytes", messages=[QUESTION], max_tokens=9, seed=3, n=3, stop=["24", "17"])
    answers = client.chat.completions.create(**whole, temperature=0.9)
    assert [choice.index for choice in answers.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in answers.choices]
    assert not any(stop in text for stop in whole["stop"] for text in texts)
    assert {choice.finish_reason for choice in answers.choices} <= {"stop", "length"}
    usage = {"include_usage": True}
    streamed, ends, last = ["", "", ""], [None, None, None], None
    for last in client.chat.completions.create(
        **whole, temperature=0.9, stream=True, stream_options=usage
    ):
        for choice in last.choices:
            streamed[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason
    assert streamed == texts and ends == [choice.finish_reason for choice in answers.choices]
    assert last.choices == [] and last.usage == answers.usage
    cut = client.chat.completions.create(**whole, temperature=0)
    assert cut.choices[0].message.content == " 6" and cut.choices[0].finish_reason == "stop"


# Other addresses


def test_generate_as_rulers_client_asks(server):
    """Send requests from threads as RULER's ``VLLMClient`` (client_wrappers.py) does, with the
    defaults of call_api.py; check the fields that it reads."""
    import requests

    def ask(stop):
        body = {"prompt": BOOK + "\nIsaac Li:", "max_tokens": 11, "temperature": 0.0, "top_k": 32}
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body | {"top_p": 1.0, "stop": stop})
        return requests.put(url=f"{server.url}/generate", data=data, headers=headers).json()

    with ThreadPoolExecutor(4) as threads:
        answers = [*threads.map(ask, [[], ["\n"], ["4754", "\n"], []])]
    assert [answer["text"] for answer in answers] == [
        [text] for text in (" 6247546817", " 6247546817", " 62", " 6247546817")
    ]
    body = {"prompt": BOOK + "\nIsaac Li:", "max_tokens": 11, "temperature": 0.0}
    assert server.get("/generate", body) == (200, {"text": [" 6247546817"]})


def test_tokens_and_what_the_server_is(server, evaluator):
    [score] = evaluator.score(["a é"])
    status, found = server.get(
        "/tokenize", {"prompt": "a é", "add_special_tokens": None, "x": None}
    )
    assert status == 200 and found["tokens"] == score.tokens.tolist()
    assert server.get("/detokenize", {"tokens": found["tokens"][1:]}) == (200, {"prompt": "a é"})
    assert server.get("/tokenizer_info")[1]["vocab_size"] <= evaluator.config.vocab_size
    assert server.get("/health") == (200, {"status": "ready"})


# Bad input


def test_an_address_that_is_taken_is_named_before_the_model_is_loaded(server, tmp_path):
    port = server.url.rpartition(":")[2]
    hosts = (["--host", name, "--api-key", "k"] for name in ("256.1.1.1", "a..b"))
    for options in (["--port", port], *hosts):
        refused = griffin_eval("serve", tmp_path, *options)
        assert refused.returncode == 2 and "cannot listen at" in refused.stderr


def test_the_url_that_it_prints_answers_at_every_address():
    host = "localhost"
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    program = Path(sys.executable).with_name("griffin-eval")
    command = [program, "serve", MODEL, "--host", host, "--port", "0", "--framework", "torch"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = next(line for line in process.stderr if "listening at" in line)
            url = said.split()[-1]
            port = int(url.rpartition(":")[2])
            assert url == f"http://localhost:{port}"
            addresses = {found[4][0] for found in socket.getaddrinfo(host, port)}
            urls = [f"http://{f'[{each}]' if ':' in each else each}:{port}" for each in addresses]
            for each in (url, *urls):
                with urllib.request.urlopen(f"{each}/health") as answer:
                    assert answer.status == 200
        finally:
            process.send_signal(signal.SIGINT)


def test_limits(state):
    server = Server(
        *("--framework", "torch", "--max-length", 20_000, "--queue", 2, "--max-body", 2000),
        *("--api-key", "a secret"),
        key="a secret",
    )
    try:
        status, answer = server.get("/v1/completions", {"prompt": "a" * 30, "max_tokens": 19_990})
        assert status == 400 and "20000" in answer["error"]["message"]
        assert server.get("/v1/completions", {"prompt": "a" * 3000})[0] == 413
        status, answer = server.get("/v1/completions", {"prompt": ["a"] * 3})
        assert status == 400 and "2 answers at most" in answer["error"]["message"]
        assert "asks for 3" in answer["error"]["message"]
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="a secret", max_retries=0)
        full = client.completions.create(
            model="bytes", prompt=["a", "b"], max_tokens=19_000, stream=True, temperature=0
        )
        next(iter(full))
        with pytest.raises(openai.RateLimitError, match="try again later") as limited:
            client.completions.create(model="bytes", prompt="a")
        assert int(limited.value.response.headers["Retry-After"]) > 0
        full.close()
        server.wait_for("unfinished", 0)
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


def test_two_saved_states_need_two_names(state, tmp_path):
    shutil.copy(state, tmp_path / "book.state")
    options = ("--framework", "torch", "--state", state, "--state", tmp_path / "book.state")
    done = griffin_eval("serve", MODEL, *options)
    assert done.returncode == 2 and "two saved states have the name" in done.stderr


# Clients that disconnect


@pytest.mark.ci
def test_a_client_that_goes_away_frees_its_row(server):
    host, port = server.url.removeprefix("http://").split(":")
    for stream in (True, False):
        body = json.dumps({"prompt": "a", "max_tokens": 10**6, "stream": stream}).encode()
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(POST % (1, b"Content-Length: %d" % len(body)) + body)
            server.wait_for("generating", 1)
        server.wait_for("generating", 0)
        server.wait_for("unfinished", 0)


def test_a_client_that_goes_away_before_its_body_has_come():
    server = Server("--framework", "torch")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(POST % (1, b"Content-Length: 99") + b'{"prompt"')
        time.sleep(0.5)
    assert server.get("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
    assert "Traceback" not in server.close()


def test_states_are_found_on_disk(tmp_path, evaluator):
    """A second server does not read what the first one has read."""
    book = "".join(f"{n}. {BOOK}" for n in range(12))
    prompts = [f"{book}\n{name}:" for name in ("Isaac Li", "Connie Mason", "Judith Hoffman")]
    expected = [each.text for each in evaluator.generate(prompts, max_new_tokens=11)]
    options = ("--state-cache", tmp_path, "--state-cache-size", "1GB", "--dtype", "float32")
    scored = []  # echoed prompt tokens with log-probabilities, by server
    for kept in (0, len(book) - 32):
        server = Server("--framework", "torch", *options)
        try:
            body = {"max_tokens": 0, "echo": True, "logprobs": 1}
            for prompt in prompts:
                [found] = server.get("/v1/completions", body | {"prompt": prompt})[1]["choices"]
                scored.append(found["logprobs"])
            for prompt, text in zip(prompts, expected, strict=True):
                body = {"prompt": prompt, "max_tokens": 11, "temperature": 0}
                assert server.get("/v1/completions", body)[1]["choices"][0]["text"] == text
            assert server.metric("tokens_kept_total") >= kept
            assert bool(server.metric("tokens_kept_total")) == bool(kept)
            assert (server.metric("tokens_read_total") < len(book)) == bool(kept)
        finally:
            assert "Traceback" not in server.close()
    assert len([*tmp_path.glob("*.state")]) == len([*tmp_path.glob("*.scores")]) == 1
    for first, again in zip(scored[:3], scored[3:], strict=True):
        assert first["tokens"] == again["tokens"] and len(first["tokens"]) > len(book)
        found, expected = (each["token_logprobs"][1:] for each in (again, first))
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_jax_answers_as_griffin_does():
    """Choices, documents and texts are equal, and the requests compile nothing."""
    from griffin_eval.lm.model import GriffinLM

    griffin = GriffinLM(str(MODEL), "torch", device="cpu", dtype="float32")
    server = Server("--framework", "jax", "--rows", 4, "--dtype", "float32")
    try:
        compiled = server.metric("compilations_total")
        check_local_completions(server, griffin)
        assert server.metric("compilations_total") == compiled
    finally:
        assert "Traceback" not in server.close()


@pytest.mark.parametrize("again", [None, 0, 0.2])  # seconds until a second one
def test_an_interrupt_names_what_was_cut(again):
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
        if again is not None:
            server.process.send_signal(signal.SIGINT)
            time.sleep(again)
        said = server.close()
        assert asked.result() is None or asked.result()[0] >= 500
    assert re.search(r"cut off: 1 requests .*\(2 tokens, \d+ of 1000000 new\)", said), said
    assert "Traceback" not in said
