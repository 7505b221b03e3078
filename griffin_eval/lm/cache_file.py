"""The ``--use_cache`` file of lm-eval: damage is noticed, and never becomes an answer.

lm-eval pickles what it keeps, and a pickle may run any code as it is read. Answers of this package
are JSON instead, so that a file of somebody else's gives wrong answers at worst.
"""

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import signal
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sqlitedict import SqliteDict

from griffin_eval.errors import ArgumentError
from griffin_eval.lm.token_sums import TokenScores

WAIT = 60  # seconds for another process that writes
DIGEST = 8  # bytes, before each answer
BESIDE = ("-journal", "-wal", "-shm")  # files of sqlite that belong to the one before

logger = logging.getLogger(__name__)


def move_damaged_aside(path: str | Path) -> None:
    """Renames a cache file that sqlite cannot read, so that a run begins with an empty one.

    What a killed process left half written is not damage: sqlite undoes it here.

    Args:
        path: of the file, which may be missing.

    Raises:
        ArgumentError: it cannot be opened or written.
    """
    path = Path(path)
    if not path.exists():
        return
    if reason := _damage(path):
        aside = _unused(path)
        for end in ("", *BESIDE):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{end}").rename(f"{aside}{end}")
        logger.warning(
            "the cache %s is damaged (%s): it is kept as %s, and an empty one takes its place",
            path,
            reason,
            aside.name,
        )
    elif not os.access(path, os.W_OK):
        raise ArgumentError(f"--use_cache: {path} may not be written: name another file")


def use_table(cache: SqliteDict, table: str) -> None:
    """Makes a cache keep its answers in a table of their own, each with a checksum.

    Answers whose bytes have changed, or that are NaN or infinite, are removed and named.

    Args:
        cache: that is open, as lm-eval opened it.
        table: its name; made if it is missing.
    """
    path, connection = str(cache.filename), cache.conn
    assert connection is not None
    with contextlib.closing(_opened(path)) as file:
        file.execute(f'CREATE TABLE IF NOT EXISTS "{table}" (key TEXT PRIMARY KEY, value BLOB)')
        rows = file.execute(f'SELECT rowid, CAST(key AS BLOB), value FROM "{table}"')
        bad = [(row,) for row, key, value in rows if not (_is_text(key) and _is_answer(value))]
        file.executemany(f'DELETE FROM "{table}" WHERE rowid = ?', bad)
        file.commit()
    cache.tablename, cache.encode, cache.decode = table, _checked, _read
    connection.execute(f"PRAGMA busy_timeout = {WAIT * 1000}")
    # These put into a queue what a thread writes.
    connection.execute = _whole(connection.execute)
    connection.select_one = _whole(connection.select_one)
    if bad:
        logger.warning(
            "%d answers in the cache %s are damaged, NaN or infinite: they are computed again",
            len(bad),
            cache.filename,
        )


def _damage(path: Path) -> str:
    """What sqlite finds wrong with a file; empty if that is nothing.

    Raises:
        ArgumentError: it cannot be opened.
    """
    try:
        with contextlib.closing(_opened(path)) as file:
            found = [str(line) for (line,) in file.execute("PRAGMA integrity_check(1)")]
            file.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        raise ArgumentError(f"--use_cache: {path} cannot be opened: {error}") from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        return str(error)
    return "" if found == ["ok"] else " ".join(found[0].split())


def _opened(path: str | Path) -> sqlite3.Connection:
    file = sqlite3.connect(path, timeout=WAIT)
    file.text_factory = lambda content: content.decode(errors="replace")  # damage may be no UTF-8
    return file


def _unused(path: Path) -> Path:
    number = 0
    while True:
        number += 1
        aside = path.with_name(f"{path.name}.damaged{number if number > 1 else ''}")
        if not aside.exists():
            return aside


def _whole(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, during which Ctrl-C waits for its end.

    Python may raise KeyboardInterrupt after a lock is taken and before it would be released. That
    of a `queue.Queue` is then nobody's, and whoever uses the queue next waits for ever. Threads
    other than the main one are never interrupted.
    """

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(before):
            return call(*args, **kwargs)
        came: list[int] = []
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
        try:
            return call(*args, **kwargs)
        finally:
            signal.signal(signal.SIGINT, before)
            if came:
                signal.raise_signal(signal.SIGINT)

    return wrapped


def _checked(answer: Any) -> Any:
    value = {"tokens": answer.tokens.tolist()} if isinstance(answer, TokenScores) else answer
    content = json.dumps(value).encode()
    return sqlite3.Binary(_digest(content) + content)


def _read(value: bytes) -> Any:
    """An answer: (log-likelihood, greedy), a log-likelihood, or text.

    Raises:
        ValueError, RecursionError: it is none of them.
    """
    match json.loads(bytes(value)[DIGEST:]):
        case [float(total), bool(greedy)]:
            return total, greedy
        case {"tokens": list(tokens), **rest} if not rest and all(
            isinstance(token, float) for token in tokens
        ):
            return TokenScores(np.array(tokens, np.float64))
        case float() | str() as answer:
            return answer
    raise ValueError("it is no answer of a model")


def _is_text(key: Any) -> bool:
    try:
        return bool(key.decode())
    except (AttributeError, UnicodeDecodeError):
        return False


def _is_answer(value: Any) -> bool:
    if not isinstance(value, bytes) or _digest(value[DIGEST:]) != value[:DIGEST]:
        return False
    try:
        answer = _read(value)
    except (ValueError, RecursionError):
        return False
    number = answer[0] if isinstance(answer, tuple) else answer
    return not isinstance(number, float) or math.isfinite(number)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST).digest()
