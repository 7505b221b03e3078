"""Chains of lazy-tensor functions, read in any region or pieces, give numpy's result."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import examples

from griffin_eval.converters.tensors import (
    Kept,
    LazyTensor,
    by_rows,
    changed,
    cut,
    expanded,
    filled,
    in_memory,
    index,
    regions,
    same_bits,
    stacked,
    together,
    transposed,
)


def in_blocks(array: np.ndarray, grid: tuple[int, ...], reads: list | None = None) -> LazyTensor:
    """Return a lazy tensor of an array that is stored in blocks and not mapped."""

    def read(region):
        if reads is not None:
            reads.append(region)
        return array[region].copy()

    return LazyTensor(array.shape, array.dtype.name, read, grid=grid)


def region(draw, shape):
    ends = (sorted(draw(st.integers(0, n)) for _ in range(2)) for n in shape)
    return tuple(slice(a, b) for a, b in ends)


def step(draw, tensor: LazyTensor, array: np.ndarray) -> tuple[LazyTensor, np.ndarray]:
    """Apply one random function to a lazy tensor and to its expected array."""
    rank = array.ndim
    kinds = ["transposed", "expanded", "stacked", "changed", "kept", "by rows"]
    kinds += ["index", "cut"] * (rank > 1)
    kind = draw(st.sampled_from(kinds))
    axis = draw(st.integers(0, rank - 1))
    if kind == "transposed":
        return transposed(tensor), array.T
    if kind == "expanded":
        return expanded(tensor, axis), np.expand_dims(array, axis)
    if kind == "stacked":
        return stacked([tensor, filled(tensor.shape, tensor.dtype)]), np.stack(
            [array, np.zeros_like(array)]
        )
    if kind == "changed":
        return changed(tensor, lambda x: x + x), array + array
    if kind == "kept":
        return Kept(1)(tensor), array
    if kind == "by rows":
        return by_rows(tensor.shape, tensor.dtype, tensor.rows), array
    at = draw(st.integers(0, array.shape[axis] - 1))
    if kind == "index":
        return index(tensor, at, axis), np.take(array, at, axis)
    stop = draw(st.integers(at + 1, array.shape[axis]))
    return cut(tensor, axis, at, stop), np.take(array, range(at, stop), axis)


@st.composite
def chains(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    array = in_memory(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    array = array.numpy().astype(filled((), dtype).numpy().dtype)
    tensor = in_memory(array)
    if draw(st.booleans()):
        tensor = in_blocks(array, tuple(draw(st.integers(1, n)) for n in shape))
    for _ in range(draw(st.integers(0, 5))):
        tensor, array = step(draw, tensor, array)
        if array.ndim == 0 or array.ndim > 6:
            break
    return tensor, array, region(draw, array.shape), draw(st.integers(1, 2 * array.nbytes + 1))


@settings(max_examples=examples(150))
@given(chains())
def test_a_chain_of_functions_is_what_numpy_makes(case):
    tensor, array, part, nbytes = case
    assert (tensor.shape, tensor.dtype) == (array.shape, array.dtype.name)
    assert tensor.nbytes == array.nbytes
    assert tensor.numpy().tobytes() == array.tobytes()
    found = tensor.read(part)
    assert found.shape == array[part].shape and found.tobytes() == array[part].tobytes()
    pieces = list(tensor.pieces(nbytes))
    assert b"".join(piece.tobytes() for piece in pieces) == array.tobytes()
    assert all(piece.flags.c_contiguous for piece in pieces)
    assert all(not piece.ndim or len(piece) == 1 or piece.nbytes <= nbytes for piece in pieces)
    assert np.array_equal(tensor.torch().float().numpy(), array.astype(np.float32))
    if array.ndim:
        assert same_bits(tensor, in_memory(array))


@settings(max_examples=examples(30))
@given(st.data(), st.integers(1, 9))
def test_pieces_of_two_are_cut_alike(data, rows):
    array = np.arange(3 * rows).reshape(rows, 3)
    cuts = [sorted(data.draw(st.sets(st.integers(1, rows - 1)))) if rows > 1 else [] for _ in "ab"]
    pairs = list(together(*(np.split(array, where) for where in cuts)))
    assert all(np.array_equal(x, y) and len(x) for x, y in pairs)
    assert np.array_equal(np.concatenate([x for x, _ in pairs]), array)


@pytest.mark.parametrize("layout", ["transposed", "rows", "two in a block"])
def test_no_block_is_read_twice(layout):
    """This holds where pieces cross blocks and where two parameters share a block."""
    array, reads = np.arange(240, dtype=np.float32).reshape(2, 6, 20), []
    if layout == "two in a block":
        tensor = in_blocks(array, array.shape, reads)
        kept = Kept()(tensor)
        pairs = [(index(kept, i), array[i]) for i in range(2)]
    elif layout == "transposed":
        pairs = [(transposed(in_blocks(array[0], (2, 20), reads)), array[0].T)]
    else:
        pairs = [(in_blocks(array[0], (4, 20), reads), array[0])]
    for tensor, expected in pairs:
        found = np.concatenate(list(tensor.pieces(8)))
        assert np.array_equal(found, expected)
    seen = np.zeros(array.shape, int)
    for read in reads:
        seen[read if len(read) == 3 else (0, *read)] += 1
    assert seen.max() == 1


def test_a_layer_of_a_stack_is_all_that_is_read():
    array, reads = np.arange(240, dtype=np.float32).reshape(2, 6, 20), []
    layer = index(Kept()(in_blocks(array, (1, 6, 20), reads)), 1)
    assert np.array_equal(layer.numpy(), array[1])
    assert [part[0] for part in reads] == [slice(1, 2)]


def test_what_is_mapped_stays_a_view():
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tensor = transposed(cut(index(in_memory(array), 1), 0, 1, 3))
    assert np.shares_memory(tensor.numpy(), array)
    assert dataclasses.replace(tensor, view=None).numpy().tobytes() == tensor.numpy().tobytes()


def test_regions_cover_an_array_once():
    covered = np.zeros((5, 7), int)
    for part in regions((5, 7), (2, 3)):
        covered[part] += 1
    assert (covered == 1).all()
