"""The Triton kernels: interpreted on the CPU against the reference, and built for two devices.

Those marked ``gpu`` run the same on a CUDA device.
"""

import importlib.util
import math
import re
import sys
from importlib.metadata import version

import numpy as np
import pytest
import torch
from packaging.version import Version
from parity import relative_error
from rglru_cases import Case, exact, expected, run
from slow import ci, slow
from triton_interpreter import KERNELS, interpreted_kernels

from benchmarks.scan import gpu_compiler
from griffin_eval.errors import ArgumentError, MissingExtraError
from griffin_eval.kernels.rglru import reference, triton_torch
from griffin_eval.kernels.rglru.reference import Gates

triton = pytest.importorskip("triton")

DEVICES = ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)]
# Largest error over largest value. The backward pass reads an h that was rounded to bfloat16.
TOLERANCES = {
    "float32": 1e-6,
    "bfloat16": 2**-8,
    "gradients, float32": 1e-6,
    "gradients, bfloat16": 2**-7,
}
OLDER_HOOK = pytest.mark.skipif(
    Version(version("jaxtyping")) < Version("0.3.11"),
    reason="its hook, which checks shapes in tests, hides a kernel's names from Triton",
)
CUT_OFF = 2  # times more in bfloat16, which the interpreter does not round to


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """Where tensors go so that the kernels run."""
    if request.param == "interpreter":
        monkeypatch.setattr(triton_torch, "_kernels", interpreted_kernels)
        return "cpu"
    return request.param


ARRANGEMENTS = [
    (op, layout, dtype, chunks)
    for op in ("scan", "rglru")
    for layout, dtype, chunks in [
        ("rows", "float32", 1),
        ("ragged", "float32", 3),
        ("packed, resets", "float32", 2),
        ("packed, resets", "bfloat16", 1),
        ("ragged", "bfloat16", 2),
    ]
]
CHOSEN = [("scan", "rows", "float32", 1), ("scan", "packed, resets", "bfloat16", 1)]


@pytest.mark.parametrize(
    ("op", "layout", "dtype", "chunks"),
    [one if one in CHOSEN else slow(*one) for one in ARRANGEMENTS],
)
def test_kernels_equal_the_reference(op, layout, dtype, chunks, device, record_parity):
    case = Case(layout, width=70, gates=5)  # more columns than a program has
    case.round_to_bfloat16()
    kernels = {"module": triton_torch, "chunks": chunks, "device": device}
    found = run("torch", "triton", op, case, dtype, gradients=True, **kernels)
    wanted = exact(op, case)
    quantities = [dtype, "float32", *[f"gradients, {dtype}"] * (len(found) - 2)]
    for quantity, ours, right in zip(quantities, found, wanted, strict=True):
        coarse = CUT_OFF if device == "cpu" and "bfloat16" in quantity else 1
        tolerance = coarse * TOLERANCES[quantity]
        error = relative_error(ours, right)
        record_parity(f"triton {op} - reference", quantity, error, tolerance)


@pytest.mark.parametrize("op", ["scan", "rglru"])
def test_smallest_shapes(op, device):
    case = Case({"batch": 2, "time": 1}, width=1, gates=1)
    found = run("torch", "triton", op, case, "float32", module=triton_torch, device=device)
    for ours, right in zip(found, expected(op, case), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunks", [None, 2])
def test_no_token_leaves_the_state(chunks, device):
    a, h0 = torch.zeros(2, 0, 3, device=device), torch.ones(2, 3, device=device, requires_grad=True)
    h, last = triton_torch.linear_scan(a, a, h0, chunks=chunks)
    assert h.shape == (2, 0, 3)
    (gradient,) = torch.autograd.grad(last.sum(), h0)
    assert torch.equal(last, h0) and torch.equal(gradient, h0)


def test_slow_decays_are_exact_and_their_gradients_bounded(device):
    """Where 1 - a² is 1e-12 to 1: the multiplier in float32, its derivative at most 1000."""
    slopes = torch.linspace(-30, 2, 33, dtype=torch.float64, requires_grad=True)
    x = torch.linspace(-2, 2, 33, dtype=torch.float64)[None, None].requires_grad_()
    zeros = torch.zeros(1, 33, 33), torch.zeros(1, 33)
    log_a = -8 * torch.nn.functional.softplus(slopes) * 0.5
    y = -torch.expm1(2 * log_a)
    slope = y.detach().clamp(min=1e-6 / 4).mul(4).rsqrt()  # slope of the square root
    multiplier = y.detach().sqrt() + slope * (y - y.detach())
    wanted = multiplier * 0.5 * x
    wanted_gradients = torch.autograd.grad(wanted.sum(), (slopes, x))
    found_inputs = [v.detach().float().to(device).requires_grad_() for v in (slopes, x)]
    gates = Gates(found_inputs[0], *(z.to(device) for z in zeros * 2))
    found, _ = triton_torch.rglru(found_inputs[1], gates)
    gradients = torch.autograd.grad(found.sum(), found_inputs)
    np.testing.assert_allclose(found.detach().cpu(), wanted.detach(), rtol=1e-6)
    for g, w in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(g.cpu(), w, rtol=1e-5, atol=1e-12)


def test_what_cannot_be_is_said(device):
    x = torch.zeros(2, 3, 4, device=device)
    h0, reset = torch.zeros(3, 4, device=device), torch.zeros(2, 3, dtype=torch.bool, device=device)
    with pytest.raises(ArgumentError, match=r"h0 must have the shape \[2, 4\].*found \[3, 4\]"):
        triton_torch.linear_scan(x, x, h0, resets=reset)
    with pytest.raises(ArgumentError, match="one row and have lengths"):
        triton_torch.linear_scan(x, x, starts=torch.zeros(2, dtype=torch.int64, device=device))
    with pytest.raises(NotImplementedError, match="a is torch.float64"):
        triton_torch.linear_scan(x.double(), x)
    weight, bias = torch.zeros(1, 4, 4, device=device), torch.zeros(1, 4, device=device)
    complex_gates = Gates(bias[0], weight, bias, weight, bias, bias[0])
    with pytest.raises(NotImplementedError, match="complex gates"):
        triton_torch.rglru(x, complex_gates)


def test_no_device_and_no_triton_are_said(monkeypatch):
    x = torch.zeros(1, 1, 1)
    with pytest.raises(NotImplementedError, match="need a CUDA device, and x is on cpu"):
        triton_torch.linear_scan(x, x)
    assert "need a CUDA device" in triton_torch.unsupported(x, None, None)
    triton_torch._kernels.cache_clear()
    monkeypatch.delitem(sys.modules, KERNELS)
    monkeypatch.delattr("griffin_eval.kernels.rglru.triton_kernels")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingExtraError, match="triton is not installed"):
        triton_torch.linear_scan(x, x)


FAR = 2**31  # elements, more than an offset of 32 bits can express


def far_tensor(folder, shape, dtype):
    """Return a tensor of zeros in a sparse file, before whose first element lie others.

    An offset that overflows is -FAR or a few rows less, and then reads zeros of the same file.
    """
    path, before = folder / "elements", FAR + 2**16
    size = before + math.prod(shape)
    elements = torch.from_file(str(path), shared=True, size=size, dtype=dtype)
    path.unlink()
    return elements[before:].view(shape)


def launched_at(first, tokens, op, case, folder):
    """Launch the forward and backward kernels interpreted, with one segment in an array of more
    tokens that starts at ``first``. Return the results of its tokens and its states."""
    kernels, inputs = interpreted_kernels(), case.arrays
    blocks, size = inputs["input_bias"].shape
    length, width = case.read.shape[1], blocks * size
    here = slice(first, first + length)

    def put(values=0.0, dtype=torch.bfloat16, gates=False):
        """Return an array of all tokens with these values of the segment."""
        array = far_tensor(folder, (blocks, tokens, 2 * size) if gates else (tokens, width), dtype)
        array[..., here, :] = torch.as_tensor(values, dtype=dtype)
        return array

    def state(values=0.0):
        return torch.as_tensor(values, dtype=torch.float32).expand(1, width).clone()

    x = torch.tensor(inputs["x"][0])
    step = dict.fromkeys(("gates", "slope", "recurrent_bias", "input_bias"))
    results = {"da": put(), "dx": put()}
    results |= dict.fromkeys(("dgates", "dslope", "drecurrent_bias", "dinput_bias"))
    if op == "scan":
        step |= {"a": put(inputs["a"][0]), "GATE": 1}
    else:
        weights = [torch.tensor(inputs[f"{name}_weight"]) for name in ("recurrent", "input")]
        products = x.view(length, blocks, size).transpose(0, 1) @ torch.cat(weights, -1)
        step |= {"a": None, "GATE": size, "gates": put(products, torch.float32, gates=True)}
        step["slope"] = state(np.exp(inputs["recurrent_param"]))
        for name in ("recurrent_bias", "input_bias"):
            step[name], results[f"d{name}"] = state(inputs[name].flatten()), state()
        results |= {"da": None, "dslope": state(), "dgates": put(0.0, torch.float32, gates=True)}
    resets = torch.zeros(tokens, dtype=torch.uint8)
    resets[first + length // 2] = 1
    common = step | {
        "h0": state(inputs["h0"]),
        "resets": resets,
        "starts": torch.tensor([first]),
        "lengths": torch.tensor([length]),
        "tokens": tokens,
        "rows": tokens,
        "width": width,
        "chunk": length,
        "bucket": 0,
    }
    grid = (1, -(-width // 64), 1)
    h, last, before = put(), state(), state()
    kernels.forward[grid](x=put(x), h=h, last=last, product=None, **common)
    dh, after = put(case.dh[0]), state(case.dlast)
    inputs = {"x": None if op == "scan" else put(x), "h": h, "dh": dh, "after": after}
    kernels.backward[grid](**inputs, before=before, product=None, **results, **common)
    found = {"h": h, "last": last, "before": before, **results}
    return {
        name: (array[..., here, :] if array.shape[-2] == tokens else array).float()
        for name, array in found.items()
        if array is not None
    }


@pytest.mark.parametrize("op", ["scan", "rglru"])
def test_offsets_beyond_31_bits(op, tmp_path):
    """A segment whose tokens lie on both sides of the limit has the results of the first tokens."""
    length, width = 10, 70  # more columns than a program has
    case = Case({"batch": 1, "time": length}, width=width, gates=5)
    near = launched_at(0, length, op, case, tmp_path)
    first = FAR // width - length // 2
    far = launched_at(first, first + length, op, case, tmp_path)
    assert near.keys() == far.keys()
    for name, wanted in near.items():
        assert wanted.abs().max() > 0, name
        assert torch.equal(far[name], wanted), name


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [None, 1])
@pytest.mark.parametrize("op", ["scan", "rglru"])
def test_more_elements_than_31_bits_express(op, chunks, record_parity):
    """Rows of RecurrentGemma 2B's width on both sides of the limit, beside a reference that starts
    300 tokens earlier, of which the decays leave nothing."""
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("needs a device with 40 GB of memory")
    width, blocks, compared, forgotten = 2560, 10, 64, 300
    boundary = FAR // width  # token in which the limit lies
    tokens, first = boundary + compared, boundary - compared
    generator = torch.Generator("cuda").manual_seed(0)
    like = {"dtype": torch.bfloat16, "device": "cuda"}
    x = torch.empty(1, tokens, width, **like).normal_(generator=generator)
    if op == "scan":
        a = torch.empty_like(x).uniform_(0, 0.9, generator=generator)
        h, last = triton_torch.linear_scan(a, x, chunks=chunks)
        exact, exact_last = reference.linear_scan(
            *(wide(v[:, first - forgotten :]) for v in (a, x))
        )
    else:
        case = Case({"batch": 1, "time": 1}, width=width, gates=blocks)
        case.arrays["recurrent_param"] = np.linspace(0, 1, width)
        gates = Gates(*(torch.tensor(case.arrays[name], **like) for name in Gates._fields[:5]))
        h, last = triton_torch.rglru(x, gates, chunks=chunks)
        exact_gates = Gates(*(wide(v) for v in gates[:5]))
        exact, exact_last = reference.rglru(wide(x[:, first - forgotten :]), exact_gates)
    assert h.numel() > FAR
    error = relative_error(wide(h[:, first:]), exact[:, forgotten:])
    pair = f"triton {op} - reference"
    record_parity(pair, "bfloat16, beyond 31 bits", error, TOLERANCES["bfloat16"])
    error = relative_error(wide(last), exact_last)
    record_parity(pair, "float32, beyond 31 bits", error, 1e-5)


def wide(array):
    """Return a tensor in float64 as an array of numpy."""
    return array.double().cpu().numpy()


@pytest.fixture
def compiled(request, monkeypatch):
    """Compiled kernels are kept where pytest keeps things, for the next run."""
    cache = request.config.cache.mkdir("triton")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(cache))


def check_builds(launches, target, dtype, config):
    for launch in launches:
        kernel = launch.build(config, gpu_compiler.TARGETS[target])
        assert kernel.asm["cubin"].startswith(b"\x7fELF")
        taken = gpu_compiler.usage(kernel.asm["cubin"])
        # Nothing spilled: neither local memory nor a stack.
        assert (taken["LOCAL"], taken["STACK"]) == (0, 0), (launch.kernel, config, taken)
        assert 16 <= taken["REG"] <= 255
        if (
            dtype == torch.float32
            and launch.kernel != "scan_chunks"
            and (config.kwargs["STEPS"], config.kwargs["BLOCK"]) == (8, 64)
        ):
            assert re.search(r"ld\.global\.v[24]", kernel.asm["ptx"])  # several columns at once


def launches(op, dtype, chunks):
    """Return the launches forward and backward for the width and a batch of RecurrentGemma 2B."""
    return gpu_compiler.launches(op == "rglru", dtype, 32, 2560, 10, chunks, padded=True)


@OLDER_HOOK
@pytest.mark.parametrize(
    ("op", "target", "dtype"),
    [
        ("scan", "sm_80", torch.bfloat16),
        ci("rglru", "sm_80", torch.bfloat16),
        slow("scan", "sm_90", torch.float32),
        slow("rglru", "sm_90", torch.float32),
    ],
)
def test_kernels_build_without_a_device(op, target, dtype, compiled):
    config = importlib.import_module(KERNELS).FEW_STEPS[0]
    found = launches(op, dtype, 1)
    assert [launch.kernel for launch in found] == ["forward", "backward"]
    check_builds(found, target, dtype, config)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("op", ["scan", "rglru"])
def test_every_config_builds(op, target, dtype, compiled):
    kernels = importlib.import_module(KERNELS)
    given = kernels.forward_configs(None if op == "rglru" else "given")
    assert [len(given), len(kernels.FEW_STEPS)] == [3 if op == "rglru" else 4, 3]
    for chunks in (1, 2):
        for launch in launches(op, dtype, chunks):
            for config in launch.configurations():
                check_builds([launch], target, dtype, config)
