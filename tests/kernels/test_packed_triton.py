"""The Triton kernels of matrices in 4 and 8 bits, against what numpy dequantises them to.

Interpreted on the CPU; those marked ``gpu`` run the same on a CUDA device.
"""

import importlib

import pytest
import torch
from packed_matrices import DTYPES, blocks_of
from slow import fast, slow
from triton_builds import compile_for, usage
from triton_interpreter import interpreted_kernels

from griffin_eval.errors import ArgumentError
from griffin_eval.kernels.linear import cuda_torch
from griffin_eval.kernels.linear.cpu_torch import linear, product
from griffin_eval.kernels.linear.cuda_torch import DevicePackedMatrix
from griffin_eval.kernels.linear.packed_torch import PACKINGS, Blocks

pytest.importorskip("triton")

KERNELS = "griffin_eval.kernels.linear.triton_kernels"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where tensors go so that the kernels run."""
    if request.param == "cpu":
        monkeypatch.setattr(cuda_torch, "_kernels", lambda: interpreted_kernels(KERNELS))
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


def matrix(packing, dtype, outputs, inputs, device, run=None):
    blocks, dense = blocks_of(packing, dtype, outputs, inputs)
    return DevicePackedMatrix(blocks.to(device), run or DTYPES[dtype]), dense


def tolerance(device, dtype):
    """Of products, over the sum of magnitudes. The interpreter cuts numbers of 16 bits off."""
    if dtype == torch.float32:
        return 2e-6
    return (2e-3 if dtype == torch.float16 else 8e-3) * (2 if device.type == "cpu" else 1)


@pytest.mark.parametrize("packing", fast(["nf4"], PACKINGS))
@pytest.mark.parametrize(
    ("dtype", "run"),
    [
        ("float32", None),
        slow("bfloat16", torch.float32),
        slow("bfloat16", None),
        slow("float16", None),
    ],
)
def test_every_value_is_that_which_is_read(packing, dtype, run, device):
    packed, dense = matrix(packing, dtype, 37, 192, device, run)
    expected = dense.to(packed.dtype).to(device)
    assert packed.shape == dense.shape and len(packed) == 37

    def same(found, wanted):
        if device.type == "cuda" or packed.dtype == dense.dtype == torch.float32:
            assert torch.equal(found, wanted)
        else:
            bits = 2**-9 if dtype == "float16" else 2**-6
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(found, wanted, rtol=bits, atol=bits * wanted.abs().max())

    same(packed.dense(), expected)
    same(packed.dense(5, 30), expected[5:30])
    assert packed.dense(3, 3).shape == (0, 192)
    rows = torch.tensor([[3, 1], [3, 36]], device=device)
    same(packed.chosen(rows), expected[rows])


@pytest.mark.parametrize("packing", [slow(packing) for packing in PACKINGS])
@pytest.mark.parametrize(
    ("dtype", "rows", "then", "parts"),
    [
        ("float32", 12, "gelu_pytorch_tanh", 3),
        slow("float32", 1, "none", 1),
        slow("float32", 30, "mul", 1),  # by the dequantised matrix
        slow("float32", 16, "mul", 2),
        slow("bfloat16", 3, "gelu", 3),
        slow("bfloat16", 16, "mul", 1),
        slow("bfloat16", 16, "mul", 3),
        slow("float16", 2, "silu", 2),
    ],
)
def test_products(packing, dtype, rows, then, parts, device, monkeypatch):
    monkeypatch.setattr(DevicePackedMatrix, "_parts", lambda self: parts)
    packed, dense = matrix(packing, dtype, 90, 320, device)
    torch.manual_seed(rows)

    def draw(*shape):
        return torch.randn(shape).to(DTYPES[dtype])

    x, bias, other = draw(rows, 1, 320), draw(90), draw(rows, 1, 90) if then == "mul" else None
    y = x.double() @ dense.double().T + bias.double()
    scale = (x.double().abs() @ dense.double().abs().T).max() + bias.abs().max()
    if then.startswith("gelu"):
        y = torch.nn.functional.gelu(y, approximate="none" if then == "gelu" else "tanh")
    if then == "silu":
        y = torch.nn.functional.silu(y)
    if other is not None:
        y, scale = y * other.double(), scale * other.double().abs().max()
    x, bias, other = (None if t is None else t.to(device) for t in (x, bias, other))
    found = linear(x, packed, bias, then, other)
    assert found.dtype == DTYPES[dtype] and found.shape == y.shape
    assert (found.cpu().double() - y).abs().max() < tolerance(device, packed.dtype) * scale


@pytest.mark.parametrize("rows", fast([5], [5, 200]))
@pytest.mark.parametrize("dtype", fast(["bfloat16"], ["float32", "bfloat16"]))
@pytest.mark.parametrize("packing", fast(["affine-4"], PACKINGS))
def test_logits_are_in_float32(packing, dtype, rows, device, monkeypatch):
    monkeypatch.setattr(cuda_torch, "ROWS", 32)  # rows of the matrix that are dequantised at a time
    packed, dense = matrix(packing, dtype, 70, 128, device)
    x = torch.randn(rows, 128).to(packed.dtype)
    dense = dense.to(packed.dtype).double()
    found, y = packed.logits(x.to(device)), x.double() @ dense.T
    scale = (x.double().abs() @ dense.abs().T).max()
    assert found.dtype == torch.float32
    exact = torch.float32 if device.type == "cuda" else packed.dtype
    assert (found.cpu().double() - y).abs().max() < tolerance(device, exact) * scale


@pytest.mark.parametrize("processors", [1, 4, 132])
def test_inputs_are_cut_where_outputs_are_few(processors, monkeypatch):
    monkeypatch.setattr(cuda_torch, "multiprocessors", lambda device: processors)
    monkeypatch.setattr(cuda_torch, "_kernels", lambda: interpreted_kernels(KERNELS))

    def packed(outputs):
        elements, scales = torch.empty(outputs, 1280, dtype=torch.uint8), torch.empty(outputs, 40)
        return DevicePackedMatrix(
            Blocks("nf4", elements, scales, None, torch.float32), torch.float32
        )

    assert packed(20_000)._parts() == 1
    assert packed(64)._parts() == {1: 2, 4: 8, 132: 10}[processors]


def test_gradients_reach_what_comes_before(device):
    packed, dense = matrix("nf4", "float32", 40, 64, device)
    x = torch.randn(2, 64, device=device, requires_grad=True)
    linear(x, packed).square().sum().backward()
    y = x.detach().clone().requires_grad_()
    (y @ dense.to(device).T).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-3)


def test_what_cannot_be_is_said(device, monkeypatch):
    blocks, _ = blocks_of("affine-4", "bfloat16", 8, 64)
    with pytest.raises(ArgumentError, match="of torch.bfloat16 in that dtype or in torch.float32"):
        DevicePackedMatrix(blocks.to(device), torch.float16)
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="need a CUDA device, and the matrix is on cpu"):
        DevicePackedMatrix(blocks, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_16_bits_are_in_float32(dtype):
    x, weight = torch.randn(3, 2, 96).to(dtype), torch.randn(50, 96).to(dtype)
    found = product(x.cuda(), weight.cuda())
    torch.testing.assert_close(found.cpu(), x.float() @ weight.float().T, rtol=1e-5, atol=1e-4)
    assert product(x.cuda().requires_grad_(), weight.cuda()) is None


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("packing", PACKINGS)
def test_kernels_build_without_a_device(packing, capability, tmp_path):
    """In every configuration, with no register spilled."""
    kernels = importlib.import_module(KERNELS)
    blocks, _ = blocks_of(packing, "bfloat16", 64, 128)
    blocks = blocks.run_in(torch.bfloat16)
    kind, bits = cuda_torch.KINDS[packing]
    x = torch.zeros(3, 128, dtype=torch.bfloat16)
    common = {name: getattr(blocks, name) for name in ("elements", "scales", "shifts", "code")}
    common |= {"KIND": kind, "BITS": bits, "ROUNDED": kernels.tl.bfloat16, "y": x}
    common |= {"rows": 3, "outputs": 64, "inputs": 128, "x": x, "bias": x[0], "other": x}
    common |= {"THEN": "mul", "products": x.float(), "parts": 2}
    launches = [(kernels.multiply.fn, c.kwargs, c.num_warps, c.num_stages) for c in kernels.CONFIGS]
    launches += [(kernels.finish, {"BLOCK": 256}, 4, 3)]
    launches += [(kernels.unpack, {"BLOCK": 4, "GROUPS": 8}, 4, 3)]
    for kernel, sizes, warps, stages in launches:
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
        built = compile_for(kernel, common | sizes, options, capability, ["outputs", "inputs"])
        taken = usage(built.asm["cubin"], tmp_path)
        assert (taken["LOCAL"], taken["STACK"]) == (0, 0), (sizes, taken)
