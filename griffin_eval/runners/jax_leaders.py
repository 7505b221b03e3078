"""Communication between the leaders of JAX's replicas while lm-eval runs.

The first leader has a connection to each other leader; values travel over it, and its end shows
that the process has ended.
"""

import contextlib
import os
import pickle
import queue
import sys
import threading
import time
from multiprocessing import connection
from typing import Any

from griffin_eval.errors import ProcessLost

GRACE = 10  # seconds for this process to exit by itself after another one is lost
LEAVING = b""  # message of a process that is about to end


class Leaders:
    """Connections between the leaders of all replicas.

    ``others`` are those to the other leaders in their order; outside the first replica there is
    only the connection to the first. ``names`` are the names of these processes.
    """

    def __init__(self, rank: int, others: list[connection.Connection], names: list[str]):
        self._rank, self._others, self._names = rank, others, names
        self._received: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in others]
        self._ending = False
        for index in range(len(others)):
            threading.Thread(target=self._listen, args=(index,), daemon=True).start()

    def exchange(self, value: Any, to: int | None = None) -> list[Any] | None:
        """Return the picklable values of all replicas in replica ``to`` (None: in all of them), and
        None in the others. Raises ProcessLost if a replica has ended."""
        if self._rank:
            self._send(0, pickle.dumps((value, to)))
            return pickle.loads(self._receive(0))
        told = [(value, to), *(pickle.loads(self._receive(i)) for i in range(len(self._others)))]
        values = [each for each, _ in told]
        for index, (_, wanted) in enumerate(told[1:]):
            self._send(index, pickle.dumps(values if wanted in (None, index + 1) else None))
        return values if to in (None, 0) else None

    def close(self) -> None:
        """Wait until all leaders are about to end, since JAX ends them together."""
        self._ending = True
        if not self._rank:
            # The others may still want to exchange values.
            for index in range(len(self._others)):
                with contextlib.suppress(ProcessLost, OSError):
                    self._send(index, LEAVING)
            return
        with contextlib.suppress(ProcessLost, OSError):
            self._send(0, LEAVING)
            while True:
                self._receive(0)

    def _send(self, index: int, message: bytes) -> None:
        try:
            self._others[index].send_bytes(message)
        except OSError as error:
            raise self._lost(index) from error

    def _receive(self, index: int) -> bytes:
        message = self._received[index].get()
        if message == LEAVING:
            raise self._lost(index)
        return message

    def _lost(self, index: int) -> ProcessLost:
        return ProcessLost(
            f"{self._names[index]} has ended, which evaluates a part of the documents: its "
            "message, if it left one, is with its own output"
        )

    def _listen(self, index: int) -> None:
        try:
            while message := self._others[index].recv_bytes():
                self._received[index].put(message)
            self._received[index].put(LEAVING)
            return
        except (EOFError, OSError):
            self._received[index].put(LEAVING)
        if self._ending:
            return
        # The main thread may compute for hours before it notices.
        time.sleep(GRACE)
        print(f"griffin: {self._lost(index)}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
