"""The hash of all weights of a checkpoint, equal for every format."""

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.output.manifest import added, combined_sha256, mismatch, recorded
from griffin_eval.errors import CheckpointError


def start_hashing(checkpoint: Checkpoint, check: bool) -> Future[str]:
    """Compute `weights_sha256` in a thread that ends with the process. Errors are raised by the
    future."""
    future: Future[str] = Future()
    ending = threading.Event()

    def run() -> None:
        try:
            future.set_result(weights_sha256(checkpoint, check, ending.is_set))
        except BaseException as error:
            future.set_exception(error)
        finally:
            atexit.unregister(end)

    # Python must not stop the thread inside tensorstore's C++ code, which aborts the process.
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
    """Return the hexadecimal SHA-256 of the names, dtypes and SHA-256 of all parameters.

    The SHA-256 of a parameter is that of the manifest: of its bytes in canonical layout. It is
    computed and not read from a manifest, since weights may have changed afterwards. Adapters count
    with their own hashes and weights, so parameters are hashed as they are stored.

    With ``check``, compares with the manifest beside the weights, the container's checksums and the
    hub's hashes of files, as far as there are any; differences raise CheckpointError. Raises
    CancelledError when ``cancelled``, which is called after each piece, returns True.
    """

    def stop_if_cancelled(_: int) -> None:
        if cancelled():
            raise CancelledError

    hashes: dict[str, tuple[str, str]] = {}
    entries = recorded(checkpoint) if check else {}
    if check:
        checkpoint.check_files()
        if problems := added(checkpoint, entries):
            raise CheckpointError(
                f"{problems[0]} (check=False in --model_args, or --no-check, evaluates it as it is)"
            )
    for name, dtype in sorted(checkpoint.dtypes.items()):
        sha = checkpoint.sha256(name, check, stop_if_cancelled)
        if name in entries:
            wrong = mismatch(checkpoint.folder, name, dtype, sha, entries[name])
            if wrong is not None:
                raise CheckpointError(
                    f"{wrong} (check=False in --model_args, or --no-check, evaluates it as it is)"
                )
        hashes[name] = dtype, sha
    total = combined_sha256(hashes)
    for adapter in checkpoint.adapters:
        total.update(f"adapter {adapter.sha256} {adapter.weight!r}\n".encode())
    return total.hexdigest()
