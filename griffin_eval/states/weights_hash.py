"""One hash for all weights of a checkpoint, the same in every format."""

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.output.manifest import added, combined_sha256, mismatch, recorded
from griffin_eval.converters.source.hub import check_files
from griffin_eval.errors import CheckpointError


def start_hashing(checkpoint: Checkpoint, check: bool) -> Future[str]:
    """`weights_sha256` of a checkpoint, computed in a thread that ends with the process, after the
    piece that it reads. What is wrong is raised where the result is asked for."""
    future: Future[str] = Future()
    ending = threading.Event()

    def run() -> None:
        try:
            future.set_result(weights_sha256(checkpoint, check, ending.is_set))
        except BaseException as error:
            future.set_exception(error)
        finally:
            atexit.unregister(end)

    # A thread that Python stops within tensorstore's C++ aborts the process.
    def end() -> None:
        ending.set()
        thread.join()

    thread = threading.Thread(target=run, daemon=True)
    atexit.register(end)
    thread.start()
    return future


def weights_sha256(
    checkpoint: Checkpoint, check: bool = True, cancelled: Callable[[], bool] = lambda: False
) -> str:
    """SHA-256 over the names, dtypes and SHA-256 of all parameters, in hexadecimal digits.

    The SHA-256 of a parameter is the manifest's: of its bytes in canonical layout. It is computed
    and not read from a manifest, since weights may have changed after one was written. Adapters
    count with their own hashes and weights: what is hashed of a parameter is as it is stored.

    Args:
        check: whether each is compared with the manifest that lies beside the weights, with the
            checksum of its container and the hub's of its file, as far as there are such.
        cancelled: asked after each piece whether to give up.

    Raises:
        CancelledError: it was given up.
        CheckpointError: a parameter is not what the manifest says, or not in it; or this is
            damaged.
    """

    def stop_if_cancelled(_: int) -> None:
        if cancelled():
            raise CancelledError

    hashes: dict[str, tuple[str, str]] = {}
    entries = recorded(checkpoint) if check else {}
    if check:
        check_files(checkpoint.container.files())
        if problems := added(checkpoint, entries):
            raise CheckpointError(
                f"{problems[0]} (check=False or --no-check evaluates it as it is)"
            )
    for name, dtype in sorted(checkpoint.dtypes.items()):
        sha = checkpoint.sha256(name, check, stop_if_cancelled)
        if name in entries:
            wrong = mismatch(checkpoint.folder, name, dtype, sha, entries[name])
            if wrong is not None:
                raise CheckpointError(f"{wrong} (check=False or --no-check evaluates it as it is)")
        hashes[name] = dtype, sha
    total = combined_sha256(hashes)
    for adapter in checkpoint.adapters:
        total.update(f"adapter {adapter.sha256} {adapter.weight!r}\n".encode())
    return total.hexdigest()
