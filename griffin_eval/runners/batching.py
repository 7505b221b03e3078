"""Sizes of steps and of blocks of logits, rows of a pool, and the memory of this machine."""

from collections.abc import Iterator

import numpy as np

LOGITS_AT_A_TIME = 1 << 25  # numbers of a block of logits, 128 MiB in float32


def logit_blocks(
    positions: np.ndarray, position_of: np.ndarray, vocab_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Splits scored positions so that the logits of one block stay small.

    Yields:
        The positions of a block, and the indices of the targets (of ``position_of``) in it.
    """
    rows = max(1, LOGITS_AT_A_TIME // vocab_size)
    order = np.argsort(position_of, kind="stable")
    for first in range(0, len(positions), rows):
        low, high = np.searchsorted(position_of[order], [first, first + rows])
        yield positions[first : first + rows], order[low:high]


def rows_or_start(sources: np.ndarray, pool_rows: int) -> np.ndarray:
    """Rows of a pool to continue from. The last row stays at a document's start: it is for -1."""
    return np.where(sources < 0, pool_rows - 1, sources)


def query_block(tokens: int, rows: int) -> int:
    """Queries that attention works on together in a packed step, 8 to 128: about half an average
    row, since the rest of a row's last block is wasted."""
    return int(np.clip(1 << max(tokens // (2 * rows), 1).bit_length() - 1, 8, 128))


def step_tokens(device: str) -> int:
    """Tokens that a step should read: 512 fill a processor, an accelerator takes more."""
    return 512 if device.startswith("cpu") else 4096


def step_rows(device: str) -> int:
    """Documents that a step should read from: on a processor every token may be of another."""
    return 512 if device.startswith("cpu") else 256


def decode_rows(device: str) -> int:
    """Documents that should be continued at a time: 64 hide the cost of a step, and an accelerator
    takes more."""
    return 64 if device.startswith("cpu") else 256


def peak_host_memory() -> int:
    """Most bytes that this process has had in memory."""
    import resource
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def host_memory() -> int:
    """Free bytes of memory on this machine."""
    import psutil

    return psutil.virtual_memory().available
