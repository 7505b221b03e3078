"""A server of S3 or of Google Cloud Storage that fails one request, for `remote.py`.

    python store.py s3|gs

It prints its address. Requests go to the emulator that tests use. ``PUT /-/fault`` arms a fault as
`Fault` has it, in JSON, and sets the count of requests to 0; ``GET /-/count`` is that count.
"""

import dataclasses
import json
import logging
import os
import signal
import sys
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import object_stores

CONTROL = "/-/"
NOT_FORWARDED = {"connection", "content-length", "date", "server", "transfer-encoding"}


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to the ``at``-th request, counted from 0.

    Attributes:
        at: number of the request; -1 for none.
        stays: whether it happens to all later ones too.
        status: status of the answer, for a request that does not reach the store; None for none.
        half: whether half of the answer is sent, and then the connection is closed.
        lost: whether the request is carried out and the connection is closed without an answer.
        kill: process that is killed: before the request is carried out, after it with ``lost``.
    """

    at: int = -1
    stays: bool = False
    status: int | None = None
    half: bool = False
    lost: bool = False
    kill: int | None = None


class Proxy(ThreadingHTTPServer):
    """Hands requests on to ``store``, a pair of host and port."""

    daemon_threads = True

    def handle_error(self, *_):
        """Nothing: a client that went away is no news."""

    def __init__(self, store: tuple[str, int]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.store, self.fault, self.count = store, Fault(), 0
        self.lock = threading.Lock()

    def strikes(self) -> Fault | None:
        """Counts a request; the fault, if it happens to this one."""
        with self.lock:
            number, self.count = self.count, self.count + 1
            fault = self.fault
        hit = fault.at >= 0 and (number >= fault.at if fault.stays else number == fault.at)
        return fault if hit else None


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    server: Proxy
    protocol_version = "HTTP/1.1"

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith(CONTROL):
            self.control(body)
            return
        fault = self.server.strikes()
        if fault is not None and fault.kill is not None and not fault.lost:
            os.kill(fault.kill, signal.SIGKILL)
            self.close_connection = True
            return
        if fault is not None and fault.status is not None:
            self.answer(fault.status, {}, b"failed on purpose")
            return
        connection = HTTPConnection(*self.server.store)
        headers = {name: value for name, value in self.headers.items() if name != "Connection"}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if fault is not None and fault.lost:
            if fault.kill is not None:
                os.kill(fault.kill, signal.SIGKILL)
            self.close_connection = True
            return
        kept = {n: v for n, v in answer.getheaders() if n.lower() not in NOT_FORWARDED}
        self.answer(answer.status, kept, content, half=fault is not None and fault.half)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = handle_any

    def control(self, body: bytes):
        if self.command == "PUT":
            with self.server.lock:
                self.server.fault, self.server.count = Fault(**json.loads(body)), 0
        self.answer(200, {}, str(self.server.count).encode())

    def answer(self, status: int, headers: dict[str, str], content: bytes, half: bool = False):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if half else content)
        if half:
            self.close_connection = True

    def log_message(self, *_):
        """Nothing: the clients say what went wrong."""


def main() -> None:
    logging.disable(logging.CRITICAL)
    host, port, _ = object_stores.start(sys.argv[1])
    proxy = Proxy((host, port))
    print(f"http://127.0.0.1:{proxy.server_port}", flush=True)
    proxy.serve_forever()


if __name__ == "__main__":
    main()
