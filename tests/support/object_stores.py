"""Emulators of S3 and of Google Cloud Storage on this machine."""

import json
import logging
import socket
from collections.abc import Callable
from urllib.request import Request, urlopen


def start(scheme: str) -> tuple[str, int, Callable[[], None]]:
    """Start the emulator of ``s3`` or ``gs``; return its host, its port and its stop function."""
    if scheme == "s3":
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        return *server.get_host_and_port(), server.stop
    from gcp_storage_emulator.server import create_server

    logging.getLogger("gcp_storage_emulator").setLevel(logging.ERROR)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True)
    server.start()
    return "127.0.0.1", port, server.stop


def environment(scheme: str, address: str) -> dict[str, str]:
    """Return the environment variables that direct griffin-eval to a store at an address."""
    if scheme == "gs":
        return {"TENSORSTORE_GCS_HTTP_URL": address}
    key = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    return {"AWS_ENDPOINT_URL": address, **key}


def make_bucket(scheme: str, address: str, name: str) -> None:
    if scheme == "s3":
        asked = Request(f"{address}/{name}", method="PUT")
    else:
        asked = Request(f"{address}/storage/v1/b?project=p", json.dumps({"name": name}).encode())
        asked.add_header("Content-Type", "application/json")
    urlopen(asked).close()
