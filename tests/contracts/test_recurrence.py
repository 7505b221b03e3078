"""Contract of every scan and RG-LRU that runs here: the results of the float64 reference."""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import compare, relative_error
from rglru_cases import (
    COMPLEX,
    LAYOUTS,
    OPERATORS,
    Case,
    apply,
    differentiated,
    exact,
    expected,
    run,
)
from slow import ci, examples, fast, slow
from xla_options import QUICK_COMPILE

from griffin_eval.errors import ArgumentError
from griffin_eval.kernels import devices, registry
from griffin_eval.kernels.cpu import compiled
from griffin_eval.kernels.rglru import (
    api,
    cpu_jax,
    cpu_torch,
    plain_jax,
    plain_torch,
    tpu_jax,
)
from griffin_eval.kernels.rglru.reference import Gates
from griffin_eval.kernels.rglru.tpu import block

SUBJECTS = [("torch", "plain"), ("torch", "cpu"), ("jax", "plain"), ("jax", "cpu")]
each_subject = pytest.mark.parametrize("framework, impl", SUBJECTS)
each_operator = pytest.mark.parametrize("operator", OPERATORS)


def with_layouts(operator, framework, impl):
    """Return a subject with each layout: JAX compiles each, so few of them in `make test`."""
    cases = [(operator, framework, impl, layout) for layout in LAYOUTS]
    if framework == "torch":
        return cases
    few = ci if impl == "tpu" else pytest.param
    return [few(*one) if one[3] == "packed, resets" else slow(*one) for one in cases]


each_layout = pytest.mark.parametrize(
    ("operator", "framework", "impl", "layout"),
    [
        case
        for op in (*OPERATORS, *COMPLEX)
        for subject in (*SUBJECTS, ("jax", "tpu"))
        if op in OPERATORS or subject[1] == "plain"
        for case in with_layouts(op, *subject)
    ],
)


def fast_subjects(*chosen):
    return [one if one in chosen else slow(*one) for one in SUBJECTS]


@pytest.fixture(autouse=True)
def kernels_are_built():
    """Check that the kernels are built here; with the fallback they would stay untested."""
    assert cpu_torch.unsupported(torch.zeros(1, 1, 1), None, None) is None
    assert cpu_jax.unsupported(jnp.zeros((1, 1, 1)), None, None) is None


@each_layout
def test_float32_equals_the_reference(framework, impl, operator, layout, record_parity):
    case, wanted = differentiated(operator, layout)
    found = run(framework, impl, operator, case, "float32", gradients=True)
    name = f"{framework} {impl} {operator} - reference"
    compare(record_parity, name, "float32", found[:2], wanted[:2])
    compare(record_parity, name, "gradients, float32", found[2:], wanted[2:])


@pytest.mark.parametrize("framework", fast(["torch"], ["torch", "jax"]))
@pytest.mark.parametrize("operator", [*OPERATORS, *COMPLEX])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float64_equals_the_reference(framework, operator, layout, record_parity):
    case, wanted = differentiated(operator, layout)
    found = run(framework, "auto", operator, case, "float64", gradients=True)
    name = f"{framework} plain {operator} - reference"
    compare(record_parity, name, "float64", found[:2], wanted[:2])
    compare(record_parity, name, "gradients, float64", found[2:], wanted[2:])


WIDTHS = [(1, 1), (5, 1), (70, 1), (600, 2), (544, 1), (48, 16)]


@pytest.mark.parametrize(
    ("framework", "impl", "width", "gates"),
    [
        (*subject, *width)
        if (subject[0] == "torch" and width in [(70, 1), (544, 1), (48, 16)])
        or (subject, width) == (("jax", "cpu"), (70, 1))
        else slow(*subject, *width)
        for subject in SUBJECTS
        for width in WIDTHS
    ],
)
def test_any_width(framework, impl, width, gates, record_parity):
    for operator in OPERATORS:
        case, wanted = differentiated(operator, "short", width, gates)
        found = run(framework, impl, operator, case, "float32", gradients=True)
        name = f"{framework} {impl} {operator} - reference"
        compare(record_parity, name, "float32", found[:2], wanted[:2])
        compare(record_parity, name, "gradients, float32", found[2:], wanted[2:])


@pytest.mark.parametrize(
    ("framework", "impl"), fast_subjects(("torch", "plain"), ("torch", "cpu"), ("jax", "cpu"))
)
@settings(max_examples=examples(6))
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    gap=st.integers(0, 3),
    seed=st.integers(0, 2**32),
)
def test_any_segments(framework, impl, lengths, gap, seed, record_parity):
    starts = np.cumsum([gap, *(n + gap for n in lengths)])[:-1].tolist()
    # All examples have one shape, which JAX compiles once: empty segments follow those drawn.
    time, spare = 6 * (9 + 3) + 1, 6 - len(lengths)
    starts, lengths = starts + [time - 1] * spare, lengths + [0] * spare
    layout = {"batch": 1, "time": time, "starts": starts, "lengths": lengths, "resets": 0.1}
    case = Case(layout, width=6, gates=2, seed=seed)
    for operator in OPERATORS:
        found = run(framework, impl, operator, case, "float32")
        name = f"{framework} {impl} {operator} - reference"
        compare(record_parity, name, "float32", found, expected(operator, case))


@each_layout
def test_padding_is_not_read(framework, impl, operator, layout, record_parity):
    clean, dirty = Case(layout), Case(layout)
    for name in ("a", "x"):
        dirty.arrays[name][~dirty.read] = np.nan
    # With gradients: a program that JAX has compiled for the test above.
    found = run(framework, impl, operator, dirty, "float32", gradients=True)[:2]
    wanted = expected(operator, clean)
    compare(record_parity, f"{framework} {impl} {operator} - reference", "float32", found, wanted)


@each_subject
@each_operator
def test_bfloat16_is_read_exactly_and_rounded_once(framework, impl, operator):
    case = Case("resets")
    case.round_to_bfloat16()
    found, last = run(framework, impl, operator, case, "bfloat16")
    wanted, wanted_last = expected(operator, case)
    np.testing.assert_allclose(last, wanted_last, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found, wanted, rtol=2**-8, atol=1e-5)


def test_many_tokens_in_tiles_and_threads(monkeypatch, record_parity):
    """Long enough for several tiles of tokens and for every thread. Where PyTorch has no GNU OpenMP
    to share, the kernels start threads, which give the same bits."""
    case = Case({"batch": 1, "time": 2100, "starts": [3, 1500], "lengths": [1200, 600]}, 256, 1)
    shared = run("torch", "cpu", "rglru", case, "float32", gradients=True)
    wanted = expected("rglru", case)
    compare(record_parity, "torch cpu rglru - reference", "float32", shared[:2], wanted)

    def refuse(path, mode):
        raise OSError("not loaded")

    monkeypatch.setattr(compiled.ctypes, "CDLL", refuse)
    compiled.library_for_torch.cache_clear()
    compiled.library().griffin_pool(None)
    own = run("torch", "cpu", "rglru", case, "float32", gradients=True)
    compiled.library_for_torch.cache_clear()
    for one, other in zip(shared, own, strict=True):
        np.testing.assert_array_equal(one, other)


@each_subject
@pytest.mark.parametrize("gate", fast([-200.0, 0.0, 200.0], [-200.0, -50.0, 0.0, 50.0, 200.0]))
@pytest.mark.parametrize("param", fast([-80.0, 0.0, 80.0], [-80.0, -20.0, 0.0, 20.0, 80.0]))
def test_extreme_gates(framework, impl, gate, param):
    """Products and Λ that no sigmoid tells from 0 and 1: finite, near the reference."""
    case = Case("rows")
    for name in ("input_bias", "recurrent_bias"):
        case.arrays[name] = np.full_like(case.arrays[name], gate)
    case.arrays["recurrent_param"] = np.full_like(case.arrays["recurrent_param"], param)
    found = run(framework, impl, "rglru", case, "float32", gradients=True)
    assert all(np.isfinite(v).all() for v in found)
    for got, wanted in zip(found[:2], expected("rglru", case), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


# Several blocks of 128 steps and channels, gates of many programs, and gates too wide for a kernel.
ON_A_TPU = [
    ("scan", {"batch": 2, "time": 137, "lengths": [137, 90], "resets": 0.1}, 130, 1),
    ("rglru", {"batch": 2, "time": 137, "lengths": [137, 90], "resets": 0.1}, 16, 2),
    ("rglru", {"batch": 1, "time": 3}, 640, 5),
    ("rglru", {"batch": 3, "time": 9, "lengths": [9, 0, 4]}, 1200, 2),
]
# Tolerances of h, by its dtype's rounding, of states, and of gradients.
TPU_TOLERANCES = {"float32": (1e-6, 1e-6, 3e-6), "bfloat16": (4e-3, 1e-6, 1.2e-2)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TPU_TOLERANCES)
@pytest.mark.parametrize(("operator", "layout", "width", "gates"), ON_A_TPU)
def test_blocks_of_a_tpu(operator, layout, width, gates, dtype, monkeypatch):
    of = block.Blocks.of

    def short(shape, lanes=128, max_rows=128, **more):
        return of(shape, lanes=lanes, max_rows=128, **more)

    monkeypatch.setattr(block.Blocks, "of", short)
    case = Case(layout, width, gates)
    if dtype == "bfloat16":
        case.round_to_bfloat16()
    found = run("jax", "tpu", operator, case, dtype, gradients=True)
    of_h, of_last, of_gradient = TPU_TOLERANCES[dtype]
    for at, (ours, right) in enumerate(zip(found, exact(operator, case), strict=True)):
        tolerance = (of_h, of_last)[at] if at < 2 else of_gradient
        assert relative_error(ours, right) <= tolerance


def test_a_tpu_says_what_it_cannot_read():
    x = jnp.zeros((1, 2, 128))
    assert tpu_jax.unsupported(x, None, None) is None
    assert "float16" in tpu_jax.unsupported(x.astype("float16"), None, None)
    gates = Gates(*(jnp.zeros(n) for n in (64, (1, 128, 64), (1, 64), (1, 128, 64), (1, 64), 64)))
    assert "complex gates" in tpu_jax.unsupported(x, gates, None)


class Stub(ModuleType):
    """Stands for the kernels of a device that is not here."""

    def __init__(self, rglru):
        super().__init__("stub")
        self.rglru = rglru

    def unsupported(self, x, gates, starts):
        return None


def broken(*arrays, **layout):
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize("starts", [None, slow(np.zeros(1))])
@pytest.mark.parametrize("framework, name", [("torch", "triton"), ("jax", "tpu")])
def test_kernels_that_fail_on_their_device_are_not_chosen(framework, name, starts, monkeypatch):
    x = torch.zeros(1, 2, 3) if framework == "torch" else jnp.zeros((1, 2, 3))
    right = plain_torch.rglru
    if framework == "jax":
        right = jax.jit(plain_jax.rglru, compiler_options=QUICK_COMPILE)
    monkeypatch.setattr({"torch": plain_torch, "jax": plain_jax}[framework], "rglru", right)

    def half(*arrays, **layout):
        return tuple(v / 2 for v in right(*arrays, **layout))

    monkeypatch.setattr(devices, "platform", lambda x: {"torch": "cuda", "jax": "tpu"}[framework])
    for rglru, chosen, said in [
        (broken, "plain", "do not run here: no such instruction"),
        (half, "plain", "are wrong here: off by"),
        (right, name, None),
    ]:
        stub = Stub(rglru)
        monkeypatch.setattr(registry, "module", lambda operator, name, x, stub=stub: stub)
        assert api.choose(x, starts=starts).name == chosen
        if said:
            with pytest.raises(NotImplementedError, match=said):
                api.choose(x, starts=starts, impl=name)


@each_subject
def test_shapes_that_do_not_belong_together_are_named(framework, impl):
    make = torch.zeros if framework == "torch" else jnp.zeros
    right = {"x": (2, 3, 8), "a": (2, 3, 8), "h0": (2, 8), "lengths": (2,), "resets": (2, 3)}
    right |= {"recurrent_param": (8,), "input_weight": (2, 4, 4), "recurrent_weight": (2, 4, 4)}
    right |= {"input_bias": (2, 4), "recurrent_bias": (2, 4)}
    for changed, said in (
        (
            {"h0": (1, 8)},
            r"h0 must have the shape \[2, 8\] beside an x of \[2, 3, 8\], found \[1, 8\]",
        ),
        ({"lengths": (3,)}, "lengths must"),
        ({"resets": (2, 2)}, "resets must"),
        ({"a": (2, 4, 8)}, "a must"),
        ({"input_weight": (2, 5, 4)}, "input_weight must have the shape .2, 4, 4."),
        ({"recurrent_weight": (2, 4, 3)}, "recurrent_weight must"),
        ({"recurrent_bias": (1, 4)}, "recurrent_bias must"),
        ({"recurrent_param": (4,)}, "recurrent_param must"),
        ({"imaginary_param": (3,)}, "imaginary_param must have the shape"),
        ({"starts": (2,)}, "lie in one row"),
        ({"input_weight": (3, 2, 2), "recurrent_weight": (3, 2, 2)}, "gates of 3 blocks"),
        (
            {"recurrent_param": (6,), "input_weight": (2, 4, 3), "recurrent_weight": (2, 4, 3)},
            "recurrent_param must have the shape .8.",
        ),
    ):
        v = {name: make(shape) for name, shape in {**right, **changed}.items()}
        gates = Gates(**{name: v[name] for name in Gates._fields if name in v})
        where = {name: v[name] for name in ("resets", "lengths", "starts") if name in v}
        with pytest.raises(ArgumentError, match=said):
            if "a" in changed:
                api.linear_scan(v["a"], v["x"], v["h0"], impl=impl, **where)
            else:
                api.rglru(v["x"], gates, v["h0"], impl=impl, **where)
    x, h0, flags = (make(right[name]) for name in ("x", "h0", "resets"))
    with pytest.raises(ArgumentError, match="resets must be bool, found .*float32"):
        api.linear_scan(x, x, h0, impl=impl, resets=flags)


@each_subject
def test_a_row_ends_where_it_ends(framework, impl):
    """A length beyond the row does not read the next one."""
    make, array = (torch.ones, torch.tensor) if framework == "torch" else (jnp.ones, jnp.array)
    x, h0 = make((2, 3, 8)), make((2, 8))
    found = [
        api.linear_scan(x / 2, x, h0, impl=impl, lengths=array([length, length]))
        for length in (3, 5)
    ]
    for one, other in zip(*found, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("impl", ["auto", "cpu", "plain"])
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_on_another_device_is_named(impl, packed):
    x, h0 = torch.zeros(1, 6, 8), torch.zeros(1, 8)
    block = (2, 4)
    shapes = {"recurrent_param": (8,), "input_weight": (*block, 4), "input_bias": block}
    shapes |= {"recurrent_weight": (*block, 4), "recurrent_bias": block}
    gates = Gates(**{name: torch.zeros(shape) for name, shape in shapes.items()})
    where = {"lengths": torch.tensor([4]), "resets": torch.zeros(1, 6, dtype=torch.bool)}
    if packed:
        where["starts"] = torch.tensor([0])
    given = {"h0": h0, **where}
    for name in given:
        moved = given | {name: given[name].to("meta")}
        said = f"^{name} must be on cpu like x, found meta$"
        with pytest.raises(ArgumentError, match=said):
            api.linear_scan(x, x, **moved, impl=impl)
        with pytest.raises(ArgumentError, match=said):
            api.rglru(x, gates, **moved, impl=impl)
    with pytest.raises(ArgumentError, match="^a must be on cpu like x, found meta$"):
        api.linear_scan(x.to("meta"), x, h0, impl=impl)
    for name in shapes:
        moved = gates._replace(**{name: getattr(gates, name).to("meta")})
        with pytest.raises(ArgumentError, match=f"^{name} must be on cpu like x, found meta$"):
            api.rglru(x, moved, h0, impl=impl)


@pytest.mark.parametrize(
    ("impl", "backward_inside"), [("plain", False), ("cpu", False), ("cpu", True)]
)
def test_autocast_leaves_the_recurrence_as_it_is(impl, backward_inside):
    inputs = [torch.tensor(v).float().requires_grad_() for v in Case("rows").inputs("rglru")]

    def results(forward, backward):
        with torch.autocast("cpu", torch.bfloat16, enabled=forward):
            h, last = apply("rglru", inputs, {}, impl=impl)
        with torch.autocast("cpu", torch.bfloat16, enabled=backward):
            return h, last, *torch.autograd.grad(h.square().sum(), inputs)

    for found, right in zip(results(True, backward_inside), results(False, False), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=0)


@pytest.mark.parametrize("impl", ["cpu", "plain"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_another_constant_of_the_decay(framework, impl):
    case = Case(next(iter(LAYOUTS)))
    right, last = apply("rglru", case.inputs("rglru"), case.where, c=3.5)
    array = torch.tensor if framework == "torch" else jnp.asarray
    inputs = [array(v.astype(np.float32)) for v in case.inputs("rglru")]
    where = {name: array(v) for name, v in case.where.items()}

    def compute(inputs, where):
        return apply("rglru", inputs, where, c=3.5, impl=impl)

    if framework == "jax":
        compute = jax.jit(compute, compiler_options=QUICK_COMPILE)
    found = compute(inputs, where)
    for mine, theirs in zip(found, (right * case.read[:, :, None], last), strict=True):
        mine = np.asarray(mine) * (case.read[:, :, None] if mine.ndim == 3 else 1)
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)
    of_eight, _ = apply("rglru", case.inputs("rglru"), case.where)
    assert np.abs((of_eight - right) * case.read[:, :, None]).max() > 0.01


def test_what_cannot_run_says_why():
    x = torch.zeros(1, 2, 3)
    with pytest.raises(NotImplementedError, match="triton kernels have no constant c other than 8"):
        inputs = [torch.tensor(v).float() for v in Case("rows").inputs("rglru")]
        apply("rglru", inputs, {}, c=3.5, impl="triton")
    with pytest.raises(
        NotImplementedError, match="triton kernels run on cuda, and the arrays are on cpu"
    ):
        api.linear_scan(x, x, impl="triton")
    with pytest.raises(NotImplementedError, match="float16, not torch.float64"):
        api.linear_scan(x.double(), x.double(), impl="cpu")
    with pytest.raises(NotImplementedError, match="'fast' in torch: expected auto, triton, cpu"):
        api.linear_scan(x, x, impl="fast")
    with pytest.raises(
        NotImplementedError, match="tpu kernels run on tpu, and the arrays are on cpu"
    ):
        api.linear_scan(jnp.zeros((1, 2, 3)), jnp.zeros((1, 2, 3)), impl="tpu")
    for array, name in {
        "a float32 tensor": (x, "cpu"),
        "a float64 tensor": (x.double(), "plain"),
        "a complex array": (jnp.zeros((1, 2, 3), complex), "plain"),
        "a tensor without numbers": (x.to("meta"), "plain"),
        "numpy": (np.zeros((1, 2, 3)), "reference"),
    }.values():
        assert api.choose(array).name == name, name


# Around the stepwise limit (8), around squares (blocks of sqrt(T)), primes.
@pytest.mark.parametrize(
    ("framework", "lengths"),
    [("torch", (1, 2, 7, 8, 9, 15, 16, 17, 31, 97, 257)), ("jax", (5, 97)), slow("jax", (9, 257))],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_plain_scans_of_any_length(framework, lengths, dtype, record_parity):
    for length in lengths:
        case = Case({"batch": 2, "time": length}, width=5)
        found = run(framework, "plain", "scan", case, dtype)
        name = f"{framework} plain scan - reference"
        compare(record_parity, name, dtype, found, expected("scan", case))


@each_subject
def test_decays_that_underflow_do_no_harm(framework, impl, record_parity):
    """Products of decays become subnormal and zero; 0 forgets and 1 keeps exactly."""
    case = Case("rows", width=5)
    case.arrays["a"][:] = np.array([0.0, 1e-30, 1e-3, 0.5, 1.0])
    found = run(framework, impl, "scan", case, "float32")
    name = f"{framework} {impl} scan - reference"
    compare(record_parity, name, "float32", found, expected("scan", case))
    np.testing.assert_array_equal(found[0][:, :, 0], case.arrays["x"][:, :, 0].astype(np.float32))
