"""A server of S3 or of Google Cloud Storage that fails one request, for `remote.py`.

    python store.py s3|gs

It prints its address and passes requests on to the emulator that tests use. ``PUT /-/fault`` arms a
`Fault`, given as JSON, and sets the request count to 0. ``GET /-/count`` returns the count.
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
    """The fault of the ``at``-th request, counted from 0.

    Attributes:
        at: Number of the request; -1 for no fault.
        stays: Whether all later requests fail, too.
        status: HTTP status returned instead of passing the request on, or None.
        half: Whether the connection is closed after half of the answer.
        lost: Whether the request is carried out and the connection is closed without an answer.
        kill: Process to kill before the request is carried out (with ``lost``: after it).
    """

    at: int = -1
    stays: bool = False
    status: int | None = None
    half: bool = False
    lost: bool = False
    kill: int | None = None


class Proxy(ThreadingHTTPServer):
    """A server that passes requests on to ``store``, a pair of host and port."""

    daemon_threads = True

    def handle_error(self, *_):
        """Ignore clients that have closed their connection."""

    def __init__(self, store: tuple[str, int]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.store, self.fault, self.count = store, Fault(), 0
        self.lock = threading.Lock()

    def strikes(self) -> Fault | None:
        """Count a request and return the fault if this request has it."""
        with self.lock:
            number, self.count = self.count, self.count + 1
            fault = self.fault
        hit = fault.at >= 0 and (number >= fault.at if fault.stays else number == fault.at)
        return fault if hit else None


class Handler(BaseHTTPRequestHandler):
    """A connection of a client."""

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
        """Print nothing, since the clients report errors."""


def main() -> None:
    logging.disable(logging.CRITICAL)
    host, port, _ = object_stores.start(sys.argv[1])
    proxy = Proxy((host, port))
    print(f"http://127.0.0.1:{proxy.server_port}", flush=True)
    proxy.serve_forever()


if __name__ == "__main__":
    main()
