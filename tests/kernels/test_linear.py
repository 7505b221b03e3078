"""The linear map of the PyTorch twin: oneDNN's and PyTorch's own way against float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from griffin_eval.kernels.linear.cpu_torch import linear

FOLLOWS = {
    "none": lambda y, other: y,
    "gelu": lambda y, other: torch.nn.functional.gelu(y, approximate="tanh"),
    "mul": lambda y, other: y * other,
}


class Names(TorchDispatchMode):
    """The operations that run, by name."""

    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.name().split("::")[0])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def onednn():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")


def inputs(rows=(3, 40), dtype=torch.float32):
    torch.manual_seed(0)
    x, weight = torch.randn(*rows, 64), torch.randn(48, 64) / 8
    return [t.to(dtype) for t in (x, weight, torch.randn(48), torch.randn(*rows, 48))]


def run(then, x, weight, bias, other):
    return linear(x, weight, bias, then, other if then == "mul" else None)


def expected(then, x, weight, bias, other):
    x, weight, other = x.double(), weight.double(), other.double()
    y = x @ weight.T + (0 if bias is None else bias.double())
    return FOLLOWS[then](y, other)


@pytest.mark.parametrize("then", FOLLOWS)
@pytest.mark.parametrize("way", ["onednn", "few rows", "gradients", "switched off"])
def test_every_way_gives_what_float64_gives(then, way, onednn, monkeypatch):
    x, weight, bias, other = inputs((1, 15) if way == "few rows" else (3, 40))
    if way == "gradients":
        weight.requires_grad_()
    if way == "switched off":
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    for b in (bias, None):
        with Names() as names:
            found = run(then, x, weight, b, other)
        assert ("mkldnn" in names.seen) == (way == "onednn")
        torch.testing.assert_close(
            found.double(), expected(then, x, weight, b, other), rtol=2e-6, atol=3e-6
        )


def test_neither_order_of_axes_nor_slices_matter(onednn):
    x, weight, bias, other = inputs()
    for a, b in (
        (x.transpose(0, 1), other.transpose(0, 1)),
        (x[:, ::2], other[:, ::2]),
        (x[:, 5:], other[:, 5:]),
        (x[:1].expand(3, -1, -1), other[:1].expand(3, -1, -1)),
    ):
        for then in FOLLOWS:
            found = run(then, a, weight, bias, b)
            torch.testing.assert_close(
                found.double(), expected(then, a, weight, bias, b), rtol=2e-6, atol=3e-6
            )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay_with_pytorch(dtype):
    arguments = inputs(dtype=dtype)
    for then in FOLLOWS:
        found = run(then, *arguments)
        tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-12
        assert found.dtype == dtype
        torch.testing.assert_close(
            found.double(), expected(then, *arguments), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize("then", FOLLOWS)
def test_gradients_are_those_of_float64(then):
    arguments = [t.requires_grad_() for t in inputs()]
    wide = [t.detach().double().requires_grad_() for t in arguments]
    run(then, *arguments).square().sum().backward()
    FOLLOWS[then](wide[0] @ wide[1].T + wide[2], wide[3]).square().sum().backward()
    for found, reference in zip(arguments, wide, strict=True):
        if reference.grad is not None:
            scale = reference.grad.abs().max()
            assert (found.grad.double() - reference.grad).abs().max() < 1e-5 * scale


def test_what_is_missing_or_for_nothing_is_refused():
    x, weight, bias, other = inputs()
    for arguments in (("mul",), ("gelu", other)):
        with pytest.raises(ValueError, match="other goes with 'mul'"):
            linear(x, weight, bias, *arguments)


def test_nothing_in_is_nothing_out():
    x, weight, bias, other = inputs((0, 40))
    assert run("mul", x, weight, bias, other).shape == (0, 40, 48)
