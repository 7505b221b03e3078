"""Matrices in 4 and 8 bits that stay so, against what they are dequantised to."""

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_matrices import DTYPES, blocks_of
from slow import examples

from griffin_eval.kernels.cpu import compiled
from griffin_eval.kernels.linear.cpu_torch import linear
from griffin_eval.kernels.linear.packed_torch import PACKINGS, Blocks, PackedMatrix


def matrix(packing, dtype, outputs, inputs, seed=0, run=None, readable=True):
    """A packed matrix, and what it is dequantised to by numpy."""
    blocks, dense = blocks_of(packing, dtype, outputs, inputs, seed)

    def read(start, stop):
        assert readable, "the kernel should have run"
        return dense[start:stop]

    return PackedMatrix((outputs, inputs), run or DTYPES[dtype], read, blocks), dense


def unrounded(packed):
    """The values of a matrix in 8 bits, computed in float64."""
    blocks = packed._blocks
    if blocks.packing == "int8":
        return blocks.elements.view(torch.int8).double() * blocks.scales.double() / 127
    numbers = blocks.elements.double().unflatten(1, (-1, 64))
    scales, shifts = blocks.scales.double()[..., None], blocks.shifts.double()[..., None]
    return (numbers * scales + shifts).flatten(1)


def test_the_compiled_kernel_is_there():
    assert compiled.library() is not None


@pytest.mark.parametrize("packing", PACKINGS)
@settings(max_examples=examples(10))
@given(
    dtype=st.sampled_from(["float32", "bfloat16"]),
    run=st.sampled_from([torch.float32, None]),
    outputs=st.integers(1, 300),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 1 << 30),
)
def test_every_value_is_that_which_is_read(packing, dtype, run, outputs, blocks, seed):
    packed, dense = matrix(packing, dtype, outputs, 64 * blocks, seed, run, readable=False)
    assert packed.shape == dense.shape and len(packed) == outputs
    expected = dense.to(packed.dtype)
    assert torch.equal(packed.dense(), expected)
    start, stop = sorted(map(int, np.random.default_rng(seed).integers(0, outputs + 1, 2)))
    assert torch.equal(packed.dense(start, stop), expected[start:stop])
    rows = torch.from_numpy(np.random.default_rng(seed).integers(0, outputs, (2, 3)))
    assert torch.equal(packed.chosen(rows), expected[rows])


@pytest.mark.parametrize("packing", PACKINGS)
@settings(max_examples=examples(10))
@given(
    dtype=st.sampled_from(["float32", "bfloat16"]),
    rows=st.integers(1, 50),
    outputs=st.integers(1, 700),
    blocks=st.integers(1, 5),
    then=st.sampled_from(["none", "gelu_pytorch_tanh", "gelu", "silu", "mul"]),
    bias=st.booleans(),
)
def test_products_of_few_rows(packing, dtype, rows, outputs, blocks, then, bias):
    packed, dense = matrix(packing, dtype, outputs, 64 * blocks, readable=False)
    torch.manual_seed(rows)
    dtype = packed.dtype
    x = torch.randn(rows, 1, 64 * blocks).to(dtype)
    b = torch.randn(outputs).to(dtype) if bias else None
    other = torch.randn(rows, 1, outputs).to(dtype) if then == "mul" else None
    found = linear(x, packed, b, then, other)
    y = x.double() @ dense.double().T + (0 if b is None else b.double())
    scale = (x.double().abs() @ dense.double().abs().T).max() + (0 if b is None else b.abs().max())
    if then.startswith("gelu"):
        y = torch.nn.functional.gelu(y, approximate="none" if then == "gelu" else "tanh")
    if then == "silu":
        y = torch.nn.functional.silu(y)
    if other is not None:
        y, scale = y * other.double(), scale * other.double().abs().max()
    assert found.dtype == dtype and found.shape == y.shape
    assert (found.double() - y).abs().max() < (2e-2 if dtype == torch.bfloat16 else 1e-6) * scale


@pytest.mark.parametrize("packing", PACKINGS)
@settings(max_examples=examples(10))
@given(
    dtype=st.sampled_from(["float32", "bfloat16"]),
    rows=st.integers(1, 20),
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
def test_products_with_unit_rows_are_the_values(packing, dtype, rows, outputs, blocks, seed):
    packed, dense = matrix(packing, dtype, outputs, 64 * blocks, seed, readable=False)
    units = torch.from_numpy(np.random.default_rng(seed).integers(0, 64 * blocks, rows))
    x = torch.eye(64 * blocks)[units].to(packed.dtype)
    found, values = packed.logits(x), dense.to(packed.dtype)[:, units].T.float()
    if dtype == "bfloat16" and packing in ("affine-8", "int8"):  # before they are rounded
        exact = unrounded(packed)[:, units].T
        assert ((found - exact).abs() <= 1e-6 * unrounded(packed).abs().max(1).values).all()
        packed, _ = matrix(packing, dtype, outputs, 64 * blocks, seed, run=torch.float32)
        found, values = packed.logits(x.float()), dense[:, units].T.float()  # as they are read
    assert torch.equal(found, values)


@pytest.mark.parametrize("packing", ("affine-8", "int8"))
def test_every_element_of_8_bits_counts(packing):
    """Those that no encoder writes, too, as -128 of int8."""
    elements = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    scales, shifts = torch.full((2, 2), 0.5), None
    if packing == "int8":
        scales = scales[:, :1]
    else:
        scales, shifts = scales.bfloat16(), torch.full((2, 2), -3).bfloat16()
    blocks = Blocks(packing, elements, scales, shifts, torch.bfloat16)
    packed = PackedMatrix((2, 128), torch.bfloat16, lambda start, stop: None, blocks)
    for rows in (torch.eye(128)[:1], torch.eye(128).roll(5, 0)[:64]):  # of a tile and of all
        found, expected = packed.logits(rows.bfloat16()), unrounded(packed) @ rows.double().T
        assert (found - expected.T).abs().max() < 1e-4


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("rows", (3, 13, 90))
def test_products_are_those_of_the_dequantised_matrix(packing, rows):
    packed, dense = matrix(packing, "bfloat16", 96, 128, run=torch.float32)
    x = torch.randn(rows, 128)

    def close(found, x, dense):
        error = (found.double() - x.double() @ dense.double().T).abs().max()
        assert error < 1e-6 * (x.double().abs() @ dense.double().abs().T).max()

    close(linear(x, packed), x, dense)
    close(packed.logits(x), x, dense)
    packed, dense = matrix(packing, "bfloat16", 96, 128)
    found = packed.logits(x.bfloat16())
    assert found.dtype == torch.float32
    few = rows < 90 and packing in ("affine-8", "int8")
    close(found, x.bfloat16(), unrounded(packed) if few else dense.bfloat16())


@pytest.mark.parametrize("packing", PACKINGS)
def test_what_the_kernel_cannot_compute_is_read(packing, monkeypatch):
    """Other dtypes, where rounding would not be the same, and no compiler."""
    for run in (torch.float16, torch.float64):
        packed, dense = matrix(packing, "float32", 40, 64, run=run)
        assert torch.equal(packed.dense(), dense.to(run))
        x = torch.randn(2, 64).to(run)
        torch.testing.assert_close(
            linear(x, packed), linear(x, dense.to(run)), rtol=1e-2, atol=1e-2
        )
    monkeypatch.setattr(compiled, "library", lambda: None)
    packed, dense = matrix(packing, "float32", 40, 64)
    rows = torch.tensor([[3, 1], [3, 39]])
    assert torch.equal(packed.chosen(rows), dense[rows])
    x = torch.randn(2, 64)
    torch.testing.assert_close(linear(x, packed), x @ dense.T, rtol=1e-5, atol=1e-4)


def test_an_x_of_another_width_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for packing in PACKINGS:
        packed, _ = matrix(packing, "float32", 40, 64)
        for multiply in (packed.logits, lambda x, packed=packed: linear(x, packed)):
            with pytest.raises(ValueError, match="the 64 inputs .* found 96 in an x of .2, 96."):
                multiply(torch.zeros(2, 96))


def test_others_are_read_as_they_are(monkeypatch):
    """A bias and a factor that lie apart, and those of another dtype, which PyTorch refuses."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    packed, _ = matrix("nf4", "bfloat16", 40, 64)
    x, bias, other = (torch.randn(shape).bfloat16() for shape in ((2, 64), (80,), (2, 40)))
    right = linear(x, packed, bias[::2].contiguous(), "mul", other)
    assert torch.equal(linear(x, packed, bias[::2], "mul", other.T.contiguous().T), right)
    for wrong in (bias[::2].float(), bias[:39], bias[::2].to("meta")):
        assert packed.linear(x, wrong, "none", None) is None
        if not wrong.is_meta:
            with pytest.raises(RuntimeError):
                linear(x, packed, wrong)
    for wrong in (other.float(), other[:1], other.to("meta")):
        assert packed.linear(x, bias[::2], "mul", wrong) is None
    assert packed.linear(x.to("meta"), None, "none", None) is None
    wide = linear(x, packed, bias[::2], "mul", other.float())
    torch.testing.assert_close(wide, right.float(), rtol=2e-2, atol=2e-2)


def test_gradients_reach_what_comes_before():
    packed, dense = matrix("nf4", "float32", 40, 64)
    x = torch.randn(2, 64, requires_grad=True)
    linear(x, packed).square().sum().backward()
    y = x.detach().clone().requires_grad_()
    (y @ dense.T).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-3)
