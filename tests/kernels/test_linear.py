"""The linear map: the compiled kernel, oneDNN's and PyTorch's own way, against float64."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slow import examples
from torch.utils._python_dispatch import TorchDispatchMode

from griffin_eval.kernels.cpu import compiled
from griffin_eval.kernels.linear import cpu_jax
from griffin_eval.kernels.linear.cpu_torch import MAX_ROWS, linear, product

FOLLOWS = {
    "none": lambda y, other: y,
    "gelu_pytorch_tanh": lambda y, other: torch.nn.functional.gelu(y, approximate="tanh"),
    "gelu": lambda y, other: torch.nn.functional.gelu(y),
    "silu": lambda y, other: torch.nn.functional.silu(y),
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


def close(found, right):
    tolerance = {
        torch.float64: 1e-12,
        torch.float32: 3e-6,
        torch.bfloat16: 3e-2,
        torch.float16: 4e-3,
    }[found.dtype]
    torch.testing.assert_close(found.double(), right.double(), rtol=tolerance, atol=tolerance)


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
        close(found, expected(then, x, weight, b, other))


@pytest.mark.parametrize("rows", [(1, 3), (3, 40)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype, rows):
    arguments = inputs(rows, dtype)
    for then in FOLLOWS:
        found = run(then, *arguments)
        assert found.dtype == dtype
        close(found, expected(then, *arguments))


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
    for arguments in (("mul",), ("gelu", other), ("silu", other)):
        with pytest.raises(ValueError, match="other= needs then='mul'"):
            linear(x, weight, bias, *arguments)


@pytest.mark.parametrize("rows", [(1, 3), (3, 40)])
@pytest.mark.parametrize("width", [63, 65, 128, 1])
def test_an_x_of_another_width_is_refused(rows, width, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    said = rf"the 64 inputs of a weight of .48, 64., found {width} in an x of .{rows[0]}, "
    for dtype in DTYPES:
        _, weight, bias, other = inputs(rows, dtype)
        x = torch.zeros(*rows, width, dtype=dtype)
        for then in FOLLOWS:
            with pytest.raises(ValueError, match=said):
                run(then, x, weight, bias, other)
        with pytest.raises(ValueError, match=said):
            product(x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [(1, 3), (3, 40)])
def test_others_lie_as_they_like(rows, dtype):
    x, weight, bias, other = inputs(rows, dtype)
    turned = other.transpose(0, 1).contiguous().transpose(0, 1)
    for b in (bias.repeat_interleave(2)[::2], bias[:1].expand(48)):
        for then in FOLLOWS:
            found = run(then, x, weight, b, turned)
            right = run(then, x, weight, b.contiguous(), other)
            torch.testing.assert_close(found, right, rtol=0, atol=0)
            sliced = x[:, ::2], weight, b, other[:, ::2]
            close(run(then, *sliced), expected(then, *sliced))


def device_of(function, *arguments):
    """Return the device of a result, or None if PyTorch refuses the arguments."""
    try:
        return function(*arguments).device
    except RuntimeError:
        return None


def test_what_lies_on_another_device_is_not_read(monkeypatch):
    """The operators refuse and accept what PyTorch's own do; a read would end the process."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for rows in (3, 100):
        for dtype in DTYPES:
            arrays = [
                torch.ones(shape, dtype=dtype)
                for shape in ((rows, 64), (48, 64), (48,), (rows, 48))
            ]
            for moved in range(4):
                x, weight, bias, other = (
                    t.to("meta") if i == moved else t for i, t in enumerate(arrays)
                )
                found = device_of(linear, x, weight, bias, "mul", other)
                assert found == device_of(
                    lambda *a: F.linear(*a[:3]) * a[3], x, weight, bias, other
                )
            x, weight, *_ = arrays
            for operands in ((x, weight.to("meta")), (x.to("meta"), weight)):
                assert device_of(product, *operands) == device_of(F.linear, *operands)


def test_nothing_in_is_nothing_out():
    x, weight, bias, other = inputs((0, 40))
    assert run("mul", x, weight, bias, other).shape == (0, 40, 48)


# The compiled kernel

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@settings(max_examples=examples(60))
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 32),
    inner=st.integers(1, 140),
    outputs=st.integers(1, 30),
    then=st.sampled_from(list(FOLLOWS)),
    has_bias=st.booleans(),
)
@example(torch.bfloat16, 1, 4096, 999, "gelu_pytorch_tanh", True)
def test_few_rows(dtype, rows, inner, outputs, then, has_bias):
    rows = min(rows, MAX_ROWS[dtype])
    rng = torch.Generator().manual_seed(rows * inner)
    x, weight, other = (
        torch.randn(*shape, generator=rng).to(dtype)
        for shape in ((rows, inner), (outputs, inner), (rows, outputs))
    )
    bias = torch.randn(outputs, generator=rng).to(dtype) if has_bias else None
    with Names() as names:
        found = run(then, x, weight, bias, other)
    assert "aten::linear" not in names.seen and found.dtype == dtype
    right = expected(then, x, weight, bias, other)
    tolerance = 4 * torch.finfo(dtype).eps * max(right.abs().max().item(), inner**0.5)
    assert (found.double() - right).abs().max() < tolerance


def every(dtype) -> torch.Tensor:
    """All numbers of 16 bits, those that are finite first."""
    all_bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = all_bits.isfinite()
    return torch.cat([all_bits[finite], all_bits[~finite]])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_number_is_read_as_it_is_and_rounded_to_the_nearest(dtype):
    weight, one = every(dtype)[:, None], torch.ones(1, 1, dtype=dtype)
    read = product(one, weight)[0]
    assert torch.equal(read.nan_to_num(7), weight[:, 0].float().nan_to_num(7))
    assert torch.equal(read.isnan(), weight[:, 0].isnan())
    for factor in (1, 3, 1 / 3, 2**-9):  # large results become infinite, small ones subnormal
        x = torch.full((1, 1), factor, dtype=dtype)
        found, right = linear(x, weight)[0, :], (x[0].float() * weight[:, 0].float()).to(dtype)
        assert torch.equal(found.nan_to_num(7), right.nan_to_num(7))
    finite = every(dtype)
    finite = finite[finite.isfinite()]
    table = finite[: len(finite) // 32 * 32].view(-1, 32).contiguous()
    for place in range(32):  # each lane of a vector of 32
        x = torch.zeros(1, 32, dtype=dtype)
        x[0, place] = 1
        assert torch.equal(product(x, table)[0], table[:, place].float())


def test_jax_reads_every_float16_as_it_is():
    """XLA's threads take subnormal float32 for zero, but no float16 is one."""
    multiply = jax.jit(cpu_jax.product)
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    exact = halves.astype(np.float32)
    finite = np.where(np.isfinite(halves), halves, np.float16(0))
    one, column = jnp.ones((1, 1), jnp.float16), jnp.asarray(halves[:, None])
    assert cpu_jax.unsupported(one, column) is None  # and the kernel is registered
    alone = np.asarray(multiply(one, column))[0]
    assert np.array_equal(alone, exact, equal_nan=True)
    table = jnp.asarray(finite.reshape(-1, 32))  # vectors of 32 lanes
    rows = np.asarray(multiply(jnp.eye(32, dtype=jnp.float16), table))
    assert np.array_equal(rows.T.ravel(), finite.astype(np.float32))
    weight = jnp.asarray(2e-5 * np.random.default_rng(0).standard_normal((50, 70)), jnp.float16)
    x = jnp.ones((2, 70), jnp.float16)
    plain = jax.jit(
        lambda x, weight: jnp.einsum("ni,oi->no", x, weight, preferred_element_type=jnp.float32)
    )
    found = np.asarray(multiply(x, weight))
    np.testing.assert_allclose(found, np.asarray(plain(x, weight)), rtol=1e-4, atol=1e-9)
    right = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-9)


@each_dtype
def test_jax_multiplies_by_the_same_kernel(dtype):
    torch.manual_seed(1)
    x, weight = torch.randn(2, 3, 70).to(dtype), torch.randn(50, 70).to(dtype)
    name = str(dtype).removeprefix("torch.")
    arrays = [jnp.asarray(t.float().numpy()).astype(name) for t in (x, weight)]
    assert cpu_jax.unsupported(*arrays) is None
    found = np.asarray(jax.jit(cpu_jax.product)(*arrays))
    assert found.dtype == np.float32
    if dtype == torch.float32:
        assert np.array_equal(found, linear(x, weight).numpy())
    right = x.double() @ weight.double().T
    np.testing.assert_allclose(found, right.numpy(), rtol=0, atol=2e-5)


def test_derivatives_in_jax_are_those_of_a_product():
    rng = np.random.default_rng(0)
    x, weight, dx, dweight = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((3, 9), (5, 9)) * 2
    )

    def plain(x, weight):
        return jnp.tanh(x @ weight.T).sum()

    def ours(x, weight):
        return jnp.tanh(cpu_jax.product(x, weight)).sum()

    for a, b in zip(
        jax.grad(ours, (0, 1))(x, weight), jax.grad(plain, (0, 1))(x, weight), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    found, right = (jax.jvp(f, (x, weight), (dx, dweight))[1] for f in (ours, plain))
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)
    rows = jax.vmap(cpu_jax.product, (0, None))(x, weight)
    np.testing.assert_allclose(rows, x @ weight.T, rtol=1e-4, atol=1e-5)


def test_jax_refuses_an_x_of_another_width(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    weight = jnp.ones((5, 4))
    for width in (3, 8):
        x = jnp.ones((2, width))
        for multiply in (cpu_jax.product, jax.jit(cpu_jax.product)):
            with pytest.raises(ValueError, match=f"the 4 inputs .* found {width} in an x of"):
                multiply(x, weight)


def test_reasons():
    x, weight = jnp.ones((2, 3, 4)), jnp.ones((5, 4))
    assert cpu_jax.unsupported(x, weight) is None
    assert "few rows" in cpu_jax.unsupported(jnp.ones((33, 4)), weight)
    assert "float16 with float32" in cpu_jax.unsupported(x.astype(jnp.float16), weight)


def test_a_jax_that_refuses_the_kernels_says_why(monkeypatch):
    """Other releases of JAX may have another version of the interface."""

    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("the handler's API version (0.3) is incompatible")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    register = compiled.register_ffi_targets.__wrapped__
    assert "does not take the compiled kernels: the handler's API version" in register()


_THREADS = """
import ctypes, os, threading
import numpy as np
from griffin_eval.kernels.cpu import compiled

library = compiled.library()
weight = np.random.default_rng(0).standard_normal((500, 700), np.float32)
sizes = (ctypes.c_int64 * 7)(1, 700, 500, 0, 0, 0, 4)
wrong = []

def multiply(seed):
    x = np.random.default_rng(seed).standard_normal((1, 700), np.float32)
    for _ in range(100):
        y = np.empty((1, 500), np.float32)
        library.griffin_linear(sizes, x.ctypes.data, weight.ctypes.data, None, None, y.ctypes.data)
        if not np.allclose(y, x @ weight.T, atol=1e-3):
            wrong.append(seed)

threads = [threading.Thread(target=multiply, args=(seed,)) for seed in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
child = os.fork()
multiply(9)
if not child:
    os._exit(bool(wrong))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and not wrong
"""


def test_threads_of_several_callers_and_of_a_fork():
    """Calls from several threads at once are right, and so are those after a fork."""
    done = subprocess.run(
        [sys.executable, "-c", _THREADS], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
