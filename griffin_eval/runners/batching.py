"""Sizes of steps and of blocks of logits, rows of a pool, and memory of the host."""

from collections.abc import Iterator

import numpy as np

LOGITS_AT_A_TIME = 1 << 25  # elements of a block of logits, 128 MiB in float32


def logit_blocks(
    positions: np.ndarray, position_of: np.ndarray, vocab_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Split scored positions so that the logits of one block stay small. Yields the positions of
    each block, and the indices in ``position_of`` of the targets that they predict."""
    rows = max(1, LOGITS_AT_A_TIME // vocab_size)
    order = np.argsort(position_of, kind="stable")
    for first in range(0, len(positions), rows):
        low, high = np.searchsorted(position_of[order], [first, first + rows])
        yield positions[first : first + rows], order[low:high]


def rows_or_start(sources: np.ndarray, pool_rows: int) -> np.ndarray:
    """Return the rows of a pool to continue from. A source of -1 becomes the last row, which holds
    the state at the start of a document."""
    return np.where(sources < 0, pool_rows - 1, sources)


def query_block(tokens: int, rows: int) -> int:
    """Return the block size of queries in packed attention, 8 to 128: about half an average row,
    since the rest of a row's last block is wasted."""
    return int(np.clip(1 << max(tokens // (2 * rows), 1).bit_length() - 1, 8, 128))


def step_tokens(device: str) -> int:
    """Return the number of tokens that a step should read to keep the device busy."""
    return 512 if device.startswith("cpu") else 4096


def step_rows(device: str) -> int:
    """Return the number of documents that a step should read from."""
    return 512 if device.startswith("cpu") else 256


def decode_rows(device: str) -> int:
    """Return the number of documents that should be decoded together to amortise a step."""
    return 64 if device.startswith("cpu") else 256


def peak_host_memory() -> int:
    """Return the maximum bytes that this process has had in memory."""
    import resource
    import sys

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def host_memory() -> int:
    """Return the free bytes of memory on this machine."""
    import psutil

    return psutil.virtual_memory().available
