"""Who may talk to processes that share a model."""

import os
import socket
import sys
import threading
from multiprocessing import AuthenticationError, connection

import pytest

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.errors import ProcessLost
from griffin_eval.runners import jax_parallel, torch_parallel


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is this machine's on Linux")
def test_the_store_of_own_workers_is_reached_from_this_machine_alone():
    """127.0.0.2 stands for every other address of this machine."""
    store = torch_parallel._open_store(2)
    with socket.create_connection(("127.0.0.1", store.port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)


def test_workers_import_nothing_from_the_folder_that_the_user_is_in(
    checkpoint, tmp_path, monkeypatch
):
    (tmp_path / "planted.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(torch_parallel, "FOLLOWER", "import planted")
    with pytest.raises(ProcessLost, match="process 1 of the 2"):
        torch_parallel.load(Checkpoint(checkpoint), "float32", "cpu", 2)
    assert os.listdir(tmp_path) == ["planted.py"]


def test_a_stranger_without_the_key_is_turned_away(monkeypatch):
    """A stranger comes first, with another key and with none; then the follower."""
    monkeypatch.setenv(jax_parallel.COORDINATOR, "127.0.0.1:1")
    told: list[bytes] = []
    opened = threading.Event()

    def broadcast(message: bytes) -> bytes:
        told.append(message)
        opened.set()
        return message

    monkeypatch.setattr(jax_parallel, "_broadcast", broadcast)
    found: list = []
    leader = threading.Thread(target=lambda: found.extend(jax_parallel._listen(2)), daemon=True)
    leader.start()
    assert opened.wait(20)
    key = told[0][: jax_parallel.KEY]
    host, _, port = told[0][jax_parallel.KEY :].decode().strip().rpartition(":")
    with pytest.raises(AuthenticationError):
        connection.Client((host, int(port)), authkey=b"guessed")
    socket.create_connection((host, int(port)), timeout=5).close()
    follower = connection.Client((host, int(port)), authkey=key)
    follower.send(1)
    leader.join(20)
    assert len(found) == 1 and len(key) == 32
    found[0].send_bytes(b"hello")
    assert follower.recv_bytes() == b"hello"
