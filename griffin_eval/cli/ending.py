"""Exit codes of commands, and one sentence for bad input."""

import atexit
import gc
import io
import os
import sys
from collections.abc import Callable
from typing import Any

from griffin_eval.errors import BadInput, MissingExtraError, ProcessLost, unreachable_data
from griffin_eval.messages import printable
from griffin_eval.process import share_processor


def run_command(command: Callable[[], None]) -> None:
    """Run a command; bad input ends with one sentence on stderr and exit code 2."""
    share_processor()
    _outlive_reader()
    # Freeze the GC so that interpreter shutdown does not traverse all of torch and JAX.
    atexit.register(gc.freeze)
    try:
        command()
    except (BadInput, MissingExtraError) as error:
        print(f"griffin-eval: {printable(str(error))}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        unreachable = unreachable_data(error)
        if unreachable is not None:
            print(f"griffin-eval: {unreachable}", file=sys.stderr)
            sys.exit(1)
        if error.filename is None:
            raise
        print(f"griffin-eval: {error.filename}: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, ProcessLost) as error:  # the engine's message names the request
        print(f"griffin-eval: {error or 'out of memory'}", file=sys.stderr)
        sys.exit(1)


class _DroppingWhenClosed(io.FileIO):
    """A file that ignores writes after its reader has closed the pipe."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            return len(data)


def _outlive_reader() -> None:
    """Keep a command's exit code if `head` or `less` stops reading stdout."""
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.flush()
        raw = _DroppingWhenClosed(sys.stdout.fileno(), "w", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            line_buffering=sys.stdout.line_buffering or sys.stdout.write_through,
        )
