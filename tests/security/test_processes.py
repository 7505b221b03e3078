"""Access to the processes that share a model."""

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
    """127.0.0.2 represents all other addresses of this machine."""
    store = torch_parallel._open_store(2)
    with socket.create_connection(("127.0.0.1", store.port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)


@pytest.mark.ci
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
    """A stranger connects with a wrong key and without a key before the follower does."""
    monkeypatch.setenv(jax_parallel.COORDINATOR, "127.0.0.1:1")
    key, found = b"k" * jax_parallel.KEY, {}
    with jax_parallel._listener(key) as listener:
        host, port = listener.address
        assert host == "127.0.0.1"
        leader = threading.Thread(
            target=lambda: found.update(jax_parallel._accepted(listener, [1])), daemon=True
        )
        leader.start()
        with pytest.raises(AuthenticationError):
            connection.Client((host, port), authkey=b"guessed")
        socket.create_connection((host, port), timeout=5).close()
        follower = connection.Client((host, port), authkey=key)
        follower.send(1)
        leader.join(20)
    assert list(found) == [1]
    found[1].send_bytes(b"hello")
    assert follower.recv_bytes() == b"hello"
