"""Files of an lm-eval run with this package's model: the ``--use_cache`` file and results.

lm-eval pickles cached answers, and reading a pickle can run any code. This package stores answers
as JSON instead, so the worst that a file from somebody else can hold is wrong answers.
"""

import contextlib
import functools
import json
import logging
import math
import os
import signal
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lm_eval.api.model import CachingLM
from lm_eval.loggers.evaluation_tracker import EvaluationTracker, eval_logger
from lm_eval.utils import make_table

from griffin_eval.errors import ArgumentError, BadInput
from griffin_eval.lm.token_sums import TokenScores

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from sqlitedict import SqliteDict

WAIT = 60  # seconds to wait for another process that writes
TABLES = "griffin-json-"


@functools.cache
def guard_files() -> None:
    """Make lm-eval check ``--use_cache`` files before it opens them, and write results atomically,
    for this package's model only."""
    opening = CachingLM.__init__

    @functools.wraps(opening)
    def __init__(self: CachingLM, lm: Any, cache_db: str) -> None:
        if type(lm).__module__.startswith("griffin_eval."):
            check_cache(cache_db)
        opening(self, lm, cache_db)

    setattr(CachingLM, "__init__", __init__)  # noqa: B010, since types forbid an assignment
    for name in ("save_results_aggregated", "save_results_samples"):
        setattr(EvaluationTracker, name, whole_or_absent(getattr(EvaluationTracker, name)))


# The cache of answers


def check_cache(path: str | Path) -> None:
    """Refuse a cache file that cannot be read and written, or is of an earlier version.

    Sqlite rolls back what a killed process left half-written.
    """
    if not Path(path).exists():
        return
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=WAIT)) as file:
            file.text_factory = lambda text: text.decode(errors="replace")  # for damaged files
            file.execute("BEGIN IMMEDIATE")
            # On a damaged page, sqlitedict's thread would end and its caller wait for ever.
            [(state,)] = file.execute("PRAGMA integrity_check(1)")
            names = [name for (name,) in file.execute("SELECT name FROM sqlite_master")]
    except (sqlite3.Error, UnicodeDecodeError) as error:
        state, names = str(error), []
    if state != "ok":
        raise ArgumentError(
            f"--use_cache: {path} cannot be used ({' '.join(state.split())}): expected a cache of "
            "lm-eval that may be written; name another file, or delete this one"
        )
    if any(name.startswith("griffin-") and not name.startswith(TABLES) for name in names):
        raise ArgumentError(
            f"--use_cache: {path} has answers of an earlier version of griffin-eval: name another "
            "file, or delete this one"
        )


def use_table(cache: "SqliteDict", fingerprint: str) -> None:
    """Make an open cache store answers as JSON, in a table of its own for each fingerprint."""
    connection, path = cache.conn, str(cache.filename)
    assert connection is not None
    connection.execute(f"PRAGMA busy_timeout = {WAIT * 1000}")
    cache.tablename = TABLES + fingerprint
    connection.execute(
        f'CREATE TABLE IF NOT EXISTS "{cache.tablename}" (key TEXT PRIMARY KEY, value BLOB)'
    )
    connection.commit()
    cache.encode, cache.decode = _encode, functools.partial(_decode, path)
    # These methods put work into a queue for a thread.
    connection.execute = _uninterrupted(connection.execute)
    connection.select_one = _uninterrupted(connection.select_one)


def _encode(answer: Any) -> bytes:
    value = {"tokens": answer.tokens.tolist()} if isinstance(answer, TokenScores) else answer
    return json.dumps(value).encode()


def _decode(path: str, content: bytes) -> Any:
    """Return an answer: (log-likelihood, greedy), a log-likelihood, or text. Other content raises
    ArgumentError."""
    with contextlib.suppress(ValueError, RecursionError):
        match json.loads(content):
            case [float(total), bool(greedy)] if math.isfinite(total):
                return total, greedy
            case {"tokens": list(tokens)} if all(isinstance(token, float) for token in tokens):
                scores = np.array(tokens, np.float64)
                if np.isfinite(scores).all():
                    return TokenScores(scores)
            case str() as text:
                return text
            case float(total) if math.isfinite(total):
                return total
    raise ArgumentError(
        f"--use_cache: {path} holds {content[:60]!r}, which is no answer of a model: name another "
        "file, or delete this one"
    )


def _uninterrupted(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that Ctrl-C takes effect only when it returns.

    KeyboardInterrupt can be raised between taking and releasing the lock of a `queue.Queue`, which
    would block the next user of the queue for ever. Only the main thread is interrupted.
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


# Results


def whole_or_absent(save: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of lm-eval's EvaluationTracker so that its files appear atomically.

    The files are written to a hidden folder first, synced to disk and then renamed. The method
    raises `BadInput` if they cannot be written, after printing the table of results; lm-eval would
    only log the error. Runs of other models are unchanged.
    """

    @functools.wraps(save)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        source = self.general_config_tracker.model_source
        if not self.output_path or not str(source).startswith("griffin"):
            return save(self, *args, **kwargs)
        chosen = self.output_path
        is_file = Path(chosen).suffix == ".json"  # lm-eval adds the time to a file's name
        final = Path(chosen).parent if is_file else Path(chosen)
        there = next(folder for folder in (final, *final.absolute().parents) if folder.is_dir())
        try:
            with (
                tempfile.TemporaryDirectory(prefix=".griffin-eval-", dir=there) as folder,
                _Failures() as failures,
            ):
                self.output_path = str(Path(folder, Path(chosen).name)) if is_file else folder
                try:
                    save(self, *args, **kwargs)
                finally:
                    self.output_path = chosen
                files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
                # An upload to the hub may fail after the files are whole.
                if failures.errors and (failures.of_disk or not files):
                    raise failures.errors[0]
                for file in files:
                    _appear(file, final / file.relative_to(folder))
                    if file.name.startswith("results_"):
                        logger.info("saved: %s", final / file.relative_to(folder))
        except OSError as error:
            _print_table(kwargs.get("results", args[0] if args else None))
            reason = error.strerror or error
            raise BadInput(f"{chosen}: the results are not saved: {reason}") from error

    return wrapper


class _Failures(logging.Handler):
    """Collects the errors that lm-eval's tracker catches and logs while it writes."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.errors: list[BaseException] = []

    @property
    def of_disk(self) -> bool:
        """Whether the operating system raised one of the errors; network errors have no errno."""
        return any(isinstance(error, OSError) and error.errno for error in self.errors)

    def emit(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if error is not None and error not in self.errors:
            self.errors.append(error)

    def __enter__(self) -> "_Failures":
        eval_logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        eval_logger.removeHandler(self)


def _appear(source: Path, destination: Path) -> None:
    """Sync a file to disk and move it to its final name."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    destination.parent.mkdir(parents=True, exist_ok=True)
    source.replace(destination)


def _print_table(results: Any) -> None:
    """Print aggregated results that cannot be saved; samples are not printed."""
    if isinstance(results, dict) and "results" in results:
        print(make_table(results))
