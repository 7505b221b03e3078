"""Long run of many clients on one server that checks for lost requests and leaks.

``make soak-serve MINUTES=30`` runs it on ``griffin-eval serve`` in a separate process. Clients
repeat random actions: they continue or score texts, read streams at once, slowly or only partly,
send bodies slowly, send invalid bodies, and ask a question with a known answer. Every few seconds
the server's memory, open files and threads are counted. When all clients have left, nothing of
them may remain.

A server caches millions of tokens and grows until that cache is full. Random tokens fill it before
the clients start, so that later growth has another cause.

The exit code is 0 if no request was lost, every known answer was right, no row or file is left,
nothing was compiled after the start, and nothing grows after the first third; otherwise it is 1.
"""

import argparse
import asyncio
import csv
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import numpy as np
from soak import CHECKPOINT, Sample, verdict

TEXT = "".join(topics[name] for name in sorted(topics))
KINDS = {  # kind of request -> relative frequency
    "continued": 6,
    "scored": 4,
    "streamed": 3,
    "read slowly": 1,
    "left early": 3,
    "sent slowly": 1,
    "no request": 3,
    "reference": 1,
}
REFERENCE = {"prompt": TEXT[:300], "max_tokens": 12, "temperature": 0, "logprobs": 0}
NO_REQUESTS = (
    b"",
    b"\x00\xff\xfe",
    b"[" * 50_000,
    b'{"prompt": ',
    json.dumps({"prompt": {"a": 1}}).encode(),
    json.dumps({"prompt": "a", "max_tokens": -1}).encode(),
    json.dumps({"prompt": [10**12]}).encode(),
    json.dumps({"prompt": "a", "no_such_parameter": 1}).encode(),
    json.dumps({"prompt": "a", "temperature": "hot"}).encode(),
    json.dumps({"prompt": ["a"] * 100_000}).encode(),
)
COMPLETIONS = "/v1/completions"
FILLED = 300  # tokens of each text that fills the cache, about the length of the clients' texts
EVERY = 5  # seconds between two samples


class Server:
    """The server's process, its metrics and its resources."""

    def __init__(self, process: asyncio.subprocess.Process, http: httpx.AsyncClient):
        self.process, self.http = process, http

    async def metric(self, name: str) -> int:
        text = (await self.http.get("/metrics")).text
        found = re.search(rf"^griffin_{name} (\d+)$", text, re.MULTILINE)
        assert found, text
        return int(found[1])

    def sample(self, started: float) -> Sample:
        folder = Path("/proc", str(self.process.pid))
        pages = int((folder / "statm").read_text().split()[1])
        threads = len(os.listdir(folder / "task"))
        memory = pages * os.sysconf("SC_PAGE_SIZE")
        return Sample(time.monotonic() - started, memory, self.files(connections=False), threads)

    def files(self, connections: bool = True) -> int:
        """Return the number of open files, with or without sockets."""
        count = 0
        for entry in Path("/proc", str(self.process.pid), "fd").iterdir():
            with suppress(OSError):  # the file was closed meanwhile
                count += connections or not os.readlink(entry).startswith("socket:")
        return count


class Client:
    """A client that sends one random request after the other until the time is over."""

    def __init__(self, http: httpx.AsyncClient, number: int, counts: Counter[str], expected: Any):
        self.http, self.counts, self.expected = http, counts, expected
        self.rng = np.random.default_rng(number)

    async def run(self, end: float) -> None:
        shares = np.array([*KINDS.values()]) / sum(KINDS.values())
        while time.monotonic() < end:
            kind = str(self.rng.choice([*KINDS], p=shares))
            self.counts[kind] += 1
            try:
                await getattr(self, kind.replace(" ", "_"))()
            except (httpx.HTTPError, AssertionError) as error:
                self.counts[f"LOST {kind}: {type(error).__name__} {str(error)[:100]}"] += 1

    def prompt(self) -> str:
        """Return a piece of text; half of the pieces have the same beginning."""
        length = int(np.exp(self.rng.uniform(0, np.log(2000))))
        begin = int(self.rng.choice([0, self.rng.integers(len(TEXT) - length)]))
        return TEXT[begin : begin + length]

    def body(self, **more: Any) -> dict[str, Any]:
        temperature = float(self.rng.choice([0, 0.8]))
        tokens = int(self.rng.integers(1, 24))
        body = {"prompt": self.prompt(), "max_tokens": tokens, "temperature": temperature}
        return body | {"seed": 1} | more

    async def ask(self, body: Any) -> dict[str, Any]:
        """Return the answer, retrying while the server replies that its queue is full (429)."""
        while True:
            answer = await self.http.post(COMPLETIONS, **body)
            if answer.status_code != 429:
                break
            self.counts["asked again after 429"] += 1
            await asyncio.sleep(float(answer.headers["Retry-After"]))
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def continued(self) -> None:
        answer = await self.ask({"json": self.body(logprobs=int(self.rng.integers(2)))})
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")

    async def scored(self) -> None:
        ids = [*self.prompt().encode()]
        body = self.body(prompt=ids, echo=True, logprobs=1, max_tokens=1)
        found = (await self.ask({"json": body}))["choices"][0]["logprobs"]["token_logprobs"]
        assert len(found) == len(ids) + 1 and all(value <= 0 for value in found[1:]), found

    async def streamed(self, pause: float = 0, max_parts: int | None = None) -> None:
        body = self.body(stream=True, max_tokens=24)
        async with self.http.stream("POST", COMPLETIONS, json=body) as answer:
            if answer.status_code == 429:
                self.counts["refused with 429"] += 1
                return
            assert answer.status_code == 200, await answer.aread()
            parts = 0
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return
                assert "error" not in line[:12], line
                parts += bool(line)
                if parts == max_parts:
                    return
                await asyncio.sleep(pause)
        raise AssertionError("a stream ended without [DONE]")

    async def read_slowly(self) -> None:
        await self.streamed(pause=0.2)

    async def left_early(self) -> None:
        if self.rng.random() < 0.5:
            await self.streamed(max_parts=int(self.rng.integers(1, 5)))
            return
        try:
            async with asyncio.timeout(float(self.rng.uniform(0, 1))):
                await self.http.post(COMPLETIONS, json=self.body(max_tokens=200))
        except TimeoutError:
            return

    async def sent_slowly(self) -> None:
        body = json.dumps(self.body()).encode()

        async def parts() -> AsyncIterator[bytes]:
            for first in range(0, len(body), 1 + len(body) // 5):
                yield body[first : first + 1 + len(body) // 5]
                await asyncio.sleep(0.2)

        answer = await self.http.post(COMPLETIONS, content=parts())
        assert answer.status_code in (200, 429), answer.text

    async def no_request(self) -> None:
        body = NO_REQUESTS[int(self.rng.integers(len(NO_REQUESTS)))]
        answer = await self.http.post(COMPLETIONS, content=body)
        assert 400 <= answer.status_code < 500, (answer.status_code, body[:60])
        assert "error" in answer.json()

    async def reference(self) -> None:
        assert is_expected(await self.answer_to_reference(), self.expected)

    async def answer_to_reference(self) -> tuple[str, list[float]]:
        choice = (await self.ask({"json": REFERENCE}))["choices"][0]
        return choice["text"], choice["logprobs"]["token_logprobs"]


def is_expected(answer: tuple[str, list[float]], expected: tuple[str, list[float]]) -> bool:
    """Return whether an answer is as expected; numbers depend slightly on the step's batch."""
    return answer[0] == expected[0] and np.allclose(answer[1], expected[1], atol=1e-3)


async def soak(arguments: argparse.Namespace, folder: Path) -> list[tuple[bool, str]]:
    """Start a server, run the clients, and return the checks as pairs of success and sentence."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("griffin-eval")
    options = ("--framework", arguments.framework, "--port", port, "--dtype", "float32")
    with (folder / "log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *map(str, (program, "serve", CHECKPOINT, *options, "--timeout", 600)), stderr=log
        )
    async with connected(f"http://127.0.0.1:{port}") as http:
        while True:
            if process.returncode is not None:
                sys.exit((folder / "log").read_text())
            try:
                await http.get("/health")
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.2)
        checks = await with_clients(arguments, Server(process, http))
    process.send_signal(signal.SIGINT)
    code = await asyncio.wait_for(process.wait(), 60)
    said = (folder / "log").read_text()
    checks.append((code == 0, f"exit code {code} after Ctrl-C"))
    checks.append(("Traceback" not in said, "no traceback in the server's log"))
    if "Traceback" in said:
        print(said[-3000:])
    return checks


def connected(address: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    headers = {"Content-Type": "application/json"}
    return httpx.AsyncClient(base_url=address, timeout=600, limits=limits, headers=headers)


async def fill(client: Client, tokens: int) -> None:
    """Send random tokens to the server to fill its prefix cache."""
    for first in range(0, tokens, FILLED):
        ids = client.rng.integers(3, 259, min(FILLED, tokens - first)).tolist()
        await client.ask({"json": {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1}})


async def with_clients(arguments: argparse.Namespace, server: Server) -> list[tuple[bool, str]]:
    counts = Counter[str]()
    alone = Client(server.http, 0, counts, None)
    await alone.answer_to_reference()  # fills the cache, so that later answers read from it
    expected = await alone.answer_to_reference()
    await fill(alone, arguments.fill)
    started, samples = time.monotonic(), list[Sample]()
    idle, compiled = server.files(), await server.metric("compilations_total")
    end = started + 60 * arguments.minutes
    with (arguments.out / f"serve_{arguments.framework}.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(Sample._fields)
        async with connected(str(server.http.base_url)) as theirs:
            clients = [Client(theirs, 1 + n, counts, expected) for n in range(arguments.clients)]
            tasks = [asyncio.create_task(client.run(end)) for client in clients]
            while (left := end - time.monotonic()) > 0:
                await asyncio.sleep(min(EVERY, left))
                samples.append(server.sample(started))
                table.writerow(samples[-1])
                file.flush()
            await asyncio.gather(*tasks)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        unfinished, generating = [await server.metric(n) for n in ("unfinished", "generating")]
        files = server.files()
        if not unfinished and not generating and files <= idle:
            break
        await asyncio.sleep(0.5)
    lost = {name: count for name, count in counts.items() if name.startswith("LOST")}
    sent = {name: count for name, count in counts.items() if name not in lost}
    line, flat = verdict(samples)
    now = await server.metric("compilations_total")
    same = is_expected(await alone.answer_to_reference(), expected)
    return [
        (not lost, f"lost {sum(lost.values())} of {sum(sent[n] for n in KINDS)}: {lost or sent}"),
        (not unfinished and not generating, f"left: {unfinished} requests, {generating} rows"),
        (files <= idle, f"open files: {files}, {idle} before the clients came"),
        (now == compiled, f"compiled after the start: {now - compiled} shapes"),
        (same, "the known answer came, also in the end"),
        (flat, line),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--fill", type=int, default=4 << 20, help="tokens read before they come")
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="folder for a table")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        checks = asyncio.run(soak(given, Path(folder)))
    for good, line in checks:
        print(f"{'ok' if good else 'NOT OK'}: {line}")
    return 0 if all(good for good, _ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
