"""Arrays over mapped files: pages are dropped, and read again where they are needed."""

import mmap

import numpy as np
import pytest

from griffin_eval.converters.tensors import drop_pages


def resident(path) -> int:
    """Bytes of the mapping of a file that are in this process's memory."""
    with open("/proc/self/smaps") as smaps:
        lines = iter(smaps)
        for line in lines:
            if line.rstrip().endswith(str(path)):
                return next(int(s.split()[1]) * 1024 for s in lines if s.startswith("Rss:"))
    return 0


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="this system has no madvise")
def test_pages_are_dropped_and_read_again(tmp_path):
    path, values = tmp_path / "weights", np.arange(1 << 20, dtype=np.int32)
    values.tofile(path)
    with open(path, "rb") as handle:
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    array = np.frombuffer(mapped, np.int32, offset=0)[3:-5].reshape(-1, 4)
    total = int(array.sum(dtype=np.int64))
    before = resident(path)
    assert before >= array.nbytes
    drop_pages(array[:1])  # less than a page
    drop_pages(array[:, 1])  # not contiguous
    assert resident(path) == before
    drop_pages(array)
    assert resident(path) < before / 100
    assert int(array.sum(dtype=np.int64)) == total


def test_memory_that_is_the_process_s_own_stays():
    array = np.ones(1 << 16)
    drop_pages(array)
    private = mmap.mmap(-1, 1 << 16)
    copy = np.frombuffer(private, np.uint8)
    copy[:] = 7
    drop_pages(copy)
    assert array.all() and (copy == 7).all()
