"""How commands end: the exit codes, and one sentence for bad input."""

import atexit
import gc
import sys
from collections.abc import Callable

from griffin_eval.errors import BadInput, MissingExtraError, ProcessLost, unreachable_data
from griffin_eval.messages import printable
from griffin_eval.process import share_processor


def run_command(command: Callable[[], None]) -> None:
    """Run a command; bad input ends with one sentence on stderr and exit code 2."""
    share_processor()
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
