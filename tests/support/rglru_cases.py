"""Problems for the scan, the RG-LRU and the CG-LRU, with exact and computed answers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import rglru_torch
import torch
from torch_gradients import pulled_back
from xla_options import QUICK_COMPILE

from griffin_eval.kernels.rglru import api, reference, tpu_jax
from griffin_eval.kernels.rglru.reference import Gates

OPERATORS = {"scan": ("a", "x", "h0"), "rglru": ("x", *Gates._fields[:5], "h0")}
COMPLEX = {"cglru": ("x", *Gates._fields[:6], "h0")}  # plain kernels only

# Padded rows with document starts at any position, and packed segments with gaps between them.
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


class Case:
    """A problem: its arrays in float64, and a mask of the tokens that are not padding."""

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
        self.complex = {  # a complex channel is a pair of numbers
            "recurrent_param": self.arrays["recurrent_param"][: width // 2],
            "imaginary_param": rng.uniform(-np.pi, np.pi, width // 2),
        }
        for name in Gates._fields[1:5]:
            self.complex[name] = self.arrays[name][..., : block[1] // 2]
        self.read = np.ones((batch, time), bool)
        if "starts" in spec:
            self.read[:] = False
            for start, length in zip(spec["starts"], spec["lengths"], strict=True):
                self.read[0, start : start + length] = True
        elif "lengths" in spec:
            self.read = np.arange(time) < self.where["lengths"][:, None]
        self.dh = rng.standard_normal((batch, time, width)) * self.read[:, :, None]
        self.dlast = rng.standard_normal((states, width))

    def round_to_bfloat16(self):
        """Round all arrays to bfloat16, except the initial states, which stay float32."""
        for name, value in self.arrays.items():
            narrow = torch.tensor(value).float()
            self.arrays[name] = (narrow if name == "h0" else narrow.bfloat16()).double().numpy()
        self.dh = torch.tensor(self.dh).bfloat16().double().numpy()

    def inputs(self, operator):
        if operator in COMPLEX:
            return [(self.arrays | self.complex)[name] for name in COMPLEX[operator]]
        return [self.arrays[name] for name in OPERATORS[operator]]


def apply(operator, inputs, where, **options):
    if operator == "scan":
        a, x, h0 = inputs
        return options.pop("module", api).linear_scan(a, x, h0, **where, **options)
    x, *gates, h0 = inputs
    return options.pop("module", api).rglru(x, Gates(*gates), h0, **where, **options)


def run(framework, impl, operator, case, dtype, gradients=False, device="cpu", **options):
    """Return h of unpadded tokens, last states, and gradients of <h, dh> + <last, dlast>, float64.

    The implementation is given by its name, or in torch by a module and its options.
    """
    inputs = case.inputs(operator)
    if framework == "torch":
        kind = getattr(torch, dtype)
        put = [torch.tensor(v, dtype=kind, device=device) for v in inputs[:-1]]
        wider = torch.promote_types(kind, torch.float32)
        put.append(torch.tensor(inputs[-1], dtype=wider, device=device))
        where = {name: torch.tensor(v, device=device) for name, v in case.where.items()}
        put = [v.requires_grad_(gradients) for v in put]
        found = list(apply(operator, put, where, **options or {"impl": impl}))
        if gradients:
            pull = [
                torch.tensor(v).to(f) for v, f in zip((case.dh, case.dlast), found, strict=True)
            ]
            found += torch.autograd.grad(found, put, pull)
        found = [v.detach().double().cpu().numpy() for v in found]
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
    interpreted = {"module": tpu_jax, "interpret": True}

    def function(*inputs):
        return apply(operator, inputs, where, **(interpreted if impl == "tpu" else {"impl": impl}))

    (h, last), pull = jax.vjp(function, *inputs)
    return [h, last, *(pull((dh.astype(h.dtype), dlast.astype(last.dtype))) if gradients else ())]


def expected(operator, case):
    """Return every h_t and the last states of the reference."""
    return list(apply(operator, case.inputs(operator), case.where, module=reference))


def exact(operator, case):
    """Return the expected values and gradients of a case, from torch in float64."""
    function = functools.partial(as_torch, operator, case.where)
    values, gradients = pulled_back(function, case.inputs(operator), (case.dh, case.dlast))
    for ours, right in zip(values, expected(operator, case), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-12, atol=1e-12)
    return [*expected(operator, case), *gradients]


@functools.cache
def differentiated(operator, layout, width=24, gates=3):
    """Return a case by name, and its expected values and gradients."""
    case = Case(layout, width, gates)
    return case, exact(operator, case)


def as_torch(operator, where, *inputs):
    return apply(operator, inputs, where, module=rglru_torch)
