"""The scan and the RG-LRU of every implementation that runs here, against the float64 reference."""

import functools
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rglru_torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import compare
from slow import examples, fast, slow
from torch_gradients import pulled_back
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
    reference,
    tpu_jax,
)
from griffin_eval.kernels.rglru.reference import Gates

SUBJECTS = [("torch", "plain"), ("torch", "cpu"), ("jax", "plain"), ("jax", "cpu")]
each_subject = pytest.mark.parametrize("framework, impl", SUBJECTS)
OPERATORS = {"scan": ("a", "x", "h0"), "rglru": ("x", *Gates._fields[:5], "h0")}
each_operator = pytest.mark.parametrize("operator", OPERATORS)

# Rows of any length with documents starting anywhere; segments behind each other with gaps.
LAYOUTS = {
    "rows": {"batch": 2, "time": 21},
    "ragged": {"batch": 4, "time": 17, "lengths": [17, 0, 1, 12], "resets": 0.1},
    "resets": {"batch": 2, "time": 13, "resets": 0.3},
    "packed": {"batch": 1, "time": 26, "starts": [0, 3, 3, 10, 24], "lengths": [3, 0, 6, 12, 2]},
    "packed, resets": {
        "batch": 1,
        "time": 20,
        "starts": [2, 10, 19],
        "lengths": [8, 6, 0],
        "resets": 0.2,
    },
    "short": {"batch": 2, "time": 6, "resets": 0.1, "lengths": [6, 4]},
    "one token": {"batch": 5, "time": 1},
}


def with_layouts(operator, framework, *impl):
    """Return a subject with each layout: JAX compiles each, so few of them in `make test`."""
    return [
        (operator, framework, *impl, layout)
        if framework == "torch" or layout == "packed, resets"
        else slow(operator, framework, *impl, layout)
        for layout in LAYOUTS
    ]


each_layout = pytest.mark.parametrize(
    ("operator", "framework", "impl", "layout"),
    [case for op in OPERATORS for subject in SUBJECTS for case in with_layouts(op, *subject)],
)


def fast_subjects(*chosen):
    return [one if one in chosen else slow(*one) for one in SUBJECTS]


class Case:
    """Arrays of one problem, in float64, and the tokens that are not padding."""

    def __init__(self, layout, width=24, gates=3, seed=0):
        spec = LAYOUTS[layout] if isinstance(layout, str) else layout
        rng = np.random.default_rng(seed)
        batch, time = spec["batch"], spec["time"]
        self.where = {}
        for name in ("starts", "lengths"):
            if name in spec:
                self.where[name] = np.array(spec[name])
        if "resets" in spec:
            self.where["resets"] = rng.random((batch, time)) < spec["resets"]
        states = len(self.where.get("lengths", range(batch)))
        block = (gates, width // gates)
        self.arrays = {
            "a": rng.uniform(0, 1, (batch, time, width)) ** rng.choice([0.01, 1.0], width),
            "x": rng.standard_normal((batch, time, width)),
            "h0": rng.standard_normal((states, width)),
            "recurrent_param": rng.uniform(-6, 1, width),
            "input_weight": rng.standard_normal((*block, block[1])) / block[1] ** 0.5,
            "input_bias": rng.standard_normal(block),
            "recurrent_weight": rng.standard_normal((*block, block[1])) / block[1] ** 0.5,
            "recurrent_bias": rng.standard_normal(block),
        }
        self.read = np.ones((batch, time), bool)
        if "starts" in spec:
            self.read[:] = False
            for start, length in zip(spec["starts"], spec["lengths"], strict=True):
                self.read[0, start : start + length] = True
        elif "lengths" in spec:
            self.read = np.arange(time) < self.where["lengths"][:, None]
        self.dh = rng.standard_normal((batch, time, width)) * self.read[:, :, None]
        self.dlast = rng.standard_normal((states, width))

    def inputs(self, operator):
        return [self.arrays[name] for name in OPERATORS[operator]]


def apply(operator, inputs, where, **options):
    if operator == "scan":
        a, x, h0 = inputs
        return options.pop("module", api).linear_scan(a, x, h0, **where, **options)
    x, *gates, h0 = inputs
    return options.pop("module", api).rglru(x, Gates(*gates), h0, **where, **options)


def run(framework, impl, operator, case, dtype, gradients=False):
    """h of what is read, last, and the gradients of <h, dh> + <last, dlast>, in float64."""
    inputs = case.inputs(operator)
    if framework == "torch":
        kind = getattr(torch, dtype)
        put = [torch.tensor(v).to(kind).requires_grad_(gradients) for v in inputs]
        put[-1] = torch.tensor(inputs[-1]).to(torch.promote_types(kind, torch.float32))
        put[-1].requires_grad_(gradients)
        where = {name: torch.tensor(v) for name, v in case.where.items()}
        h, last = apply(operator, put, where, impl=impl)
        found = [h, last]
        if gradients:
            pull = (torch.tensor(case.dh).to(h.dtype), torch.tensor(case.dlast).to(last.dtype))
            found += torch.autograd.grad((h, last), put, pull)
        found = [v.detach().double().numpy() for v in found]
    else:
        with jax.enable_x64(dtype == "float64"):
            put = [jnp.asarray(v, dtype) for v in inputs]
            put[-1] = jnp.asarray(inputs[-1], "float64" if dtype == "float64" else "float32")
            where = {name: jnp.asarray(v) for name, v in case.where.items()}
            found = _jax(operator, impl, gradients, put, where, case.dh, case.dlast)
            found = [np.asarray(v, np.float64) for v in found]
    found[0] = np.where(case.read[:, :, None], found[0], 0.0)
    return found


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=QUICK_COMPILE)
def _jax(operator, impl, gradients, inputs, where, dh, dlast):
    def function(*inputs):
        return apply(operator, inputs, where, impl=impl)

    (h, last), pull = jax.vjp(function, *inputs)
    return [h, last, *(pull((dh.astype(h.dtype), dlast.astype(last.dtype))) if gradients else ())]


def expected(operator, case):
    """Return every h_t and the last states of the reference."""
    return list(apply(operator, case.inputs(operator), case.where, module=reference))


@functools.cache
def differentiated(operator, layout, width=24, gates=3):
    """Return a case by name, and its expected values and gradients: torch's, in float64."""
    case = Case(layout, width, gates)
    function = functools.partial(_as_torch, operator, case.where)
    values, gradients = pulled_back(function, case.inputs(operator), (case.dh, case.dlast))
    for ours, right in zip(values, expected(operator, case), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-12, atol=1e-12)
    return case, [*expected(operator, case), *gradients]


def _as_torch(operator, where, *inputs):
    return apply(operator, inputs, where, module=rglru_torch)


@pytest.mark.slow
@each_operator
def test_jax_differentiates_the_reference(operator):
    case, wanted = differentiated(operator, "short")

    def function(*inputs):
        return apply(operator, inputs, case.where, module=reference, xp=jnp)

    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        values, pull = jax.vjp(function, *map(jnp.asarray, case.inputs(operator)))
        found = [*values, *pull((jnp.asarray(case.dh), jnp.asarray(case.dlast)))]
    for ours, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-11, atol=1e-12)


@pytest.fixture(autouse=True)
def kernels_are_built():
    """The kernels are built wherever the tests run; a fallback would leave them untested."""
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
@each_operator
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
    for name in ("a", "x", *Gates._fields[:5]):
        rounded = torch.tensor(case.arrays[name]).bfloat16()
        case.arrays[name] = rounded.double().numpy()
    case.arrays["h0"] = case.arrays["h0"].astype(np.float32).astype(np.float64)
    found, last = run(framework, impl, operator, case, "bfloat16")
    wanted, wanted_last = expected(operator, case)
    np.testing.assert_allclose(last, wanted_last, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found, wanted, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(("framework", "impl"), fast_subjects(("torch", "plain"), ("torch", "cpu")))
def test_many_tokens_in_tiles_and_threads(framework, impl, record_parity):
    """Long enough for several tiles of tokens and for every thread."""
    case = Case({"batch": 1, "time": 2100, "starts": [3, 1500], "lengths": [1200, 600]}, 256, 1)
    found = run(framework, impl, "rglru", case, "float32")
    wanted = expected("rglru", case)
    compare(record_parity, f"{framework} {impl} rglru - reference", "float32", found, wanted)


def test_threads_of_their_own_give_the_same(monkeypatch):
    """Where PyTorch has no GNU OpenMP to share, the kernels start threads."""
    case = Case({"batch": 1, "time": 2100, "starts": [3, 1500], "lengths": [1200, 600]}, 256, 1)
    shared = run("torch", "cpu", "rglru", case, "float32", gradients=True)
    opened = []

    def refuse(path, mode):
        opened.append(Path(path).name)
        raise OSError("not loaded")

    monkeypatch.setattr(compiled.ctypes, "CDLL", refuse)
    compiled.library_for_torch.cache_clear()
    compiled.library().griffin_pool(None)
    own = run("torch", "cpu", "rglru", case, "float32", gradients=True)
    compiled.library_for_torch.cache_clear()
    assert opened == [path.name for path in Path(torch.__file__).parent.glob("lib/libgomp*.so*")]
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


@pytest.mark.parametrize(
    ("operator", "layout"),
    [
        ("rglru", "packed, resets"),
        slow("rglru", "ragged"),
        slow("scan", "packed, resets"),
        slow("scan", "ragged"),
    ],
)
def test_the_layouts_of_a_tpu(operator, layout):
    """What `tpu_jax` makes of both layouts; its kernels, interpreted here, have their own tests."""
    case = Case(layout, width=128, gates=1)
    inputs = [jnp.asarray(v, "float32") for v in case.inputs(operator)]
    where = {name: jnp.asarray(v) for name, v in case.where.items()}

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILE)
    def interpreted(inputs, where):
        return apply(operator, inputs, where, module=tpu_jax, interpret=True)

    found, last = interpreted(inputs, where)
    wanted, wanted_last = expected(operator, case)
    read = case.read[:, :, None]
    np.testing.assert_allclose(np.where(read, found, 0), wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(last, wanted_last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operator", fast(["rglru"], OPERATORS))
@pytest.mark.parametrize("wrap", fast([jax.jit], [jax.jit, jax.checkpoint]))
@pytest.mark.parametrize(
    "options",
    [slow({"impl": "plain"}), {"impl": "cpu"}, slow({"module": tpu_jax, "interpret": True})],
)
def test_gradients_through_what_is_compiled_or_computed_again(options, wrap, operator):
    case = Case("rows", width=128, gates=1)
    inputs = [jnp.asarray(v, "float32") for v in case.inputs(operator)]

    def loss(*inputs):
        h, last = apply(operator, inputs, {}, **options)
        return jnp.square(h).sum() + last.sum()

    def loss_in_torch(*inputs):
        h, last = _as_torch(operator, {}, *inputs)
        return (h.square().sum() + last.sum(),)

    _, expected_gradients = pulled_back(loss_in_torch, case.inputs(operator), [1.0])
    found = jax.grad(wrap(loss), range(len(inputs)))(*inputs)
    for ours, right in zip(found, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-5, atol=1e-5 * float(abs(right).max()))


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
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"h0": (1, 8)},
            r"h0 must have the shape \[2, 8\] beside an x of \[2, 3, 8\], found \[1, 8\]",
        ),
        ({"h0": (3, 8)}, "found .3, 8."),
        ({"lengths": (3,)}, "lengths must"),
        ({"resets": (2, 2)}, "resets must"),
        ({"a": (2, 4, 8)}, "a must"),
        ({"input_weight": (2, 5, 4)}, "input_weight must have the shape .2, 4, 4."),
        ({"recurrent_weight": (2, 4, 3)}, "recurrent_weight must"),
        ({"recurrent_bias": (1, 4)}, "recurrent_bias must"),
        ({"recurrent_param": (4,)}, "recurrent_param must"),
        ({"starts": (2,)}, "lie in one row"),
        ({"input_weight": (3, 2, 2), "recurrent_weight": (3, 2, 2)}, "gates of 3 blocks"),
        (
            {"recurrent_param": (6,), "input_weight": (2, 4, 3), "recurrent_weight": (2, 4, 3)},
            "recurrent_param must have the shape .8.",
        ),
    ],
)
def test_shapes_that_do_not_belong_together_are_named(framework, impl, changed, said):
    make = torch.zeros if framework == "torch" else jnp.zeros
    shapes = {"x": (2, 3, 8), "a": (2, 3, 8), "h0": (2, 8), "lengths": (2,), "resets": (2, 3)}
    shapes |= {"recurrent_param": (8,), "input_weight": (2, 4, 4), "recurrent_weight": (2, 4, 4)}
    shapes |= {"input_bias": (2, 4), "recurrent_bias": (2, 4), **changed}
    v = {name: make(shape) for name, shape in shapes.items()}
    gates = Gates(*(v[name] for name in Gates._fields[:5]))
    where = {name: v[name] for name in ("resets", "lengths", "starts") if name in v}
    with pytest.raises(ArgumentError, match=said):
        if "a" in changed:
            api.linear_scan(v["a"], v["x"], v["h0"], impl=impl, **where)
        else:
            api.rglru(v["x"], gates, v["h0"], impl=impl, **where)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_an_imaginary_part_of_another_shape_is_named(framework):
    make = torch.zeros if framework == "torch" else jnp.zeros
    block = make((2, 4, 2)), make((2, 2))
    gates = Gates(make((4,)), *block, *block, imaginary_param=make((4,)))
    assert api.rglru(make((1, 3, 8)), gates)[0].shape == (1, 3, 8)
    wrong = gates._replace(imaginary_param=make((3,)))
    with pytest.raises(ArgumentError, match=r"imaginary_param must have the shape \[4\]"):
        api.rglru(make((1, 3, 8)), wrong)


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
    for name in {"torch": ["triton"], "jax": ["tpu"]}[framework]:
        with pytest.raises(
            NotImplementedError, match=f"{name} kernels have no constant c other than 8"
        ):
            apply("rglru", inputs, where, c=3.5, impl=name)


def test_what_cannot_run_says_why():
    x = torch.zeros(1, 2, 3)
    with pytest.raises(
        NotImplementedError, match="triton kernels run on cuda, and the arrays are on cpu"
    ):
        api.linear_scan(x, x, impl="triton")
    with pytest.raises(NotImplementedError, match="float32, and x is torch.float64"):
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
