"""Checksums of chunks, whatever pieces an array comes in and whatever part of it is read."""

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import examples

from griffin_eval.converters.chunk_sums import ChunkSummer, ChunkSums
from griffin_eval.converters.tensors import regions


@st.composite
def summed(draw):
    """An array, and its checksums."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    grid = tuple(draw(st.integers(1, n)) for n in shape)
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    cuts = sorted(draw(st.lists(st.integers(0, shape[0]), max_size=4)))
    summer = ChunkSummer(shape, grid)
    for piece in np.split(array, cuts):
        summer.update(piece)
    return array, summer.result()


@settings(max_examples=examples(30))
@given(summed())
def test_each_chunk_has_the_checksum_of_its_bytes(case):
    array, sums = case
    expected = [xxhash.xxh3_64(array[at].tobytes()).hexdigest() for at in regions(*sums[:2])]
    assert list(sums.sums) == expected
    assert ChunkSums.of_record(list(sums.shape), sums.record()) == sums


@settings(max_examples=examples(30))
@given(summed(), st.data())
def test_a_part_is_checked_as_far_as_chunks_lie_in_it(case, data):
    array, sums = case
    part = []
    for n in array.shape:
        start = data.draw(st.integers(0, n - 1))
        part.append(slice(start, data.draw(st.integers(start + 1, n))))
    at = tuple(data.draw(st.integers(cut.start, cut.stop - 1)) for cut in part)
    assert sums.check(array[tuple(part)], tuple(part))[0] == []
    array[at] ^= 1 << data.draw(st.integers(0, 30))
    inside, number, nbytes = None, 0, 0
    for number, region in enumerate(regions(*sums[:2])):
        if all(c.start <= r.start and r.stop <= c.stop for c, r in zip(part, region, strict=True)):
            nbytes += array[region].nbytes
            if all(r.start <= i < r.stop for i, r in zip(at, region, strict=True)):
                inside = number
    assert sums.check(array[tuple(part)], tuple(part)) == (
        [] if inside is None else [inside],
        nbytes,
    )


@pytest.mark.parametrize(
    ("shape", "record"),
    [
        ([4], {"shape": [2], "xxh3_64": "a"}),
        ([4], {"shape": [0], "xxh3_64": "a"}),
        ([4], {"shape": [2, 2], "xxh3_64": "a b"}),
        (4, {"shape": 4, "xxh3_64": "a"}),
    ],
)
def test_what_is_no_record_is_refused(shape, record):
    with pytest.raises(ValueError):
        ChunkSums.of_record(shape, record)
