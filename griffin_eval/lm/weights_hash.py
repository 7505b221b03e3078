"""One hash for all weights of a checkpoint, the same in every format."""

import hashlib
import threading
from concurrent.futures import Future

import numpy as np

from griffin_eval.converters.arrays.pieces import drop_pages
from griffin_eval.converters.checkpoint import Checkpoint


def start_hashing(checkpoint: Checkpoint) -> Future[str]:
    """`weights_sha256` of a checkpoint, computed in a thread that does not delay the end of the
    process."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(weights_sha256(checkpoint))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def weights_sha256(checkpoint: Checkpoint) -> str:
    """SHA-256 over the names, dtypes and SHA-256 of all parameters, in hexadecimal digits.

    The SHA-256 of a parameter is the manifest's: of its bytes in canonical layout. It is computed
    and not read from a manifest, since weights may have changed after one was written.
    """
    total = hashlib.sha256()
    for name, dtype in sorted(checkpoint.dtypes.items()):
        one = hashlib.sha256()
        for piece in checkpoint.pieces(name):
            one.update(piece.view(np.uint8).data)
            drop_pages(piece)  # the model has a mapping of its own, or a copy
        total.update(f"{name} {dtype} {one.hexdigest()}\n".encode())
    return total.hexdigest()
