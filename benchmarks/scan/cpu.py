"""The scan and the RG-LRU on this CPU in float32, compared with other implementations and a limit.

The limit of a scan is the sum of two arrays written into a third, by this package's loop or by
torch, whichever is faster. A backward pass reads three arrays and writes two: 5/3 of that limit. An
RG-LRU is compared with its parts: without its gates' products with the scan, with them with both.
Memory is reused, as in an evaluation, and JAX overwrites its input.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.peers import why_absent
from griffin_eval.kernels.cpu import compiled
from griffin_eval.kernels.rglru import api
from griffin_eval.kernels.rglru.reference import C, Gates

REPEAT = 0.02  # least seconds of a measurement, by repeated calls


class Timing(NamedTuple):
    """One line of the table.

    Attributes:
        operation: Operation that is timed.
        tokens: T.
        implementation: Name of the implementation.
        seconds: Median of the rounds.
        fastest, slowest: Seconds of the fastest and the slowest round.
        against: Name of the denominator of ``ratio``.
        ratio: Median over the time of ``against``.
    """

    operation: str
    tokens: int
    implementation: str
    seconds: float
    fastest: float
    slowest: float
    against: str
    ratio: float


def measure(
    lengths: list[int], width: int, gates: int, rounds: int, tell: Callable[[str], None]
) -> list[Timing]:
    """Time every implementation in turn, with a batch of 1."""
    from griffin_eval.process import tune_process

    tune_process()
    timings = []
    for tokens in lengths:
        problem = Problem(tokens, width, gates)
        calls = {**_limits(problem), **_torch(problem), **_jax(problem), **_peers(problem)}
        for call in calls.values():
            call()  # JAX compiles
        times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
        for number in range(rounds):
            tell(f"T = {tokens}, round {number + 1} of {rounds}")
            for key, call in calls.items():
                times[key].append(_seconds(call))
        timings += _timings(tokens, times)
    return timings


class Problem:
    """Arrays of one recurrence of D columns over T tokens."""

    def __init__(self, tokens: int, width: int, gates: int):
        rng = np.random.default_rng(0)
        self.tokens, self.width, self.count = tokens, width, gates

        def draw(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32)

        self.a = rng.uniform(0.9, 1, (1, tokens, width)).astype(np.float32)
        self.x, self.dh = draw(1, tokens, width), draw(1, tokens, width)
        block = width // gates
        shapes = [(gates, block, block), (gates, block)]
        scale = np.float32(block**-0.5)
        gate_arrays = [draw(*shape) * scale for shape in shapes * 2]
        self.gates = Gates(draw(width) - 4, *gate_arrays)


_Calls = dict[tuple[str, str], Callable[[], Any]]
SCAN, BACK, FUSED, WHOLE = "scan", "scan, backward", "RG-LRU from products", "RG-LRU"
PRODUCTS, LIMIT, TORCH, JAX = "products", "limit", "griffin, torch", "griffin, JAX"


def _limits(problem: Problem) -> _Calls:
    import torch

    a, x = torch.from_numpy(problem.a), torch.from_numpy(problem.x)
    out = torch.empty_like(x)
    calls: _Calls = {(LIMIT, "torch.add"): lambda: torch.add(a, x, out=out)}
    library = compiled.library()
    if library is not None:
        pointers = [array.data_ptr() for array in (a, x, out)]
        threads = torch.get_num_threads()
        calls[LIMIT, "sum"] = lambda: library.griffin_sum(*pointers, x.numel(), threads)
    return calls


def _torch(problem: Problem) -> _Calls:
    import torch
    import torch.nn.functional as F

    from griffin_eval.kernels.rglru import cpu_torch

    a, x, dh = (torch.from_numpy(v) for v in (problem.a, problem.x, problem.dh))
    gates = Gates(*(None if v is None else torch.from_numpy(v) for v in problem.gates))
    blocks = x[0].view(problem.tokens, problem.count, -1).transpose(0, 1)
    leaves = [a.clone().requires_grad_(), x.clone().requires_grad_()]

    def products() -> list[torch.Tensor]:
        return [torch.bmm(blocks, w) for w in (gates.input_weight, gates.recurrent_weight)]

    calls: _Calls = {(PRODUCTS, TORCH): products}
    for name in ("cpu", "plain"):
        if name == "cpu" and cpu_torch.unsupported(x, None, None):
            continue
        label = TORCH if name == "cpu" else f"{TORCH}, plain"
        h, _ = api.linear_scan(*leaves, impl=name)
        calls[SCAN, label] = lambda name=name: api.linear_scan(a, x, impl=name)
        calls[BACK, label] = lambda h=h: torch.autograd.grad(h, leaves, dh, retain_graph=True)
        calls[WHOLE, label] = lambda name=name: api.rglru(x, gates, impl=name)
    if (SCAN, TORCH) in calls:
        out, last = torch.empty_like(x[0]), torch.zeros(1, problem.width)
        biases = [b.flatten() for b in (gates.input_bias, gates.recurrent_bias)]
        arrays = [*cpu_torch.layout(x), x[0], *products(), *biases]
        arrays.append(-C * F.softplus(gates.recurrent_param))
        calls[FUSED, TORCH] = lambda: cpu_torch.run(
            cpu_torch.GATED, arrays, [out, last], 1, problem.count
        )
    return {
        key: torch.inference_mode()(call) if key[0] != BACK else call for key, call in calls.items()
    }


def _jax(problem: Problem) -> _Calls:
    import jax
    import jax.numpy as jnp

    from griffin_eval.kernels.rglru import cpu_jax

    a, x, dh = (jnp.asarray(v) for v in (problem.a, problem.x, problem.dh))
    gates = Gates(*(None if v is None else jnp.asarray(v) for v in problem.gates))

    def over(function: Callable, *rest: Any) -> Callable[[], Any]:
        """Return a call of ``function(x, *rest)`` whose result becomes the next x."""
        compiled, state = jax.jit(function, donate_argnums=0), [jnp.array(x)]

        def call() -> None:
            state[0] = compiled(state[0], *rest).block_until_ready()

        return call

    def ready(function: Callable, *arrays: Any) -> Callable[[], Any]:
        compiled = jax.jit(function)
        return lambda: jax.block_until_ready(compiled(*arrays))

    def products(x: Any, gates: Gates) -> Any:
        return cpu_jax.products(x, gates.input_weight, gates.recurrent_weight)

    calls: _Calls = {(PRODUCTS, JAX): ready(products, x, gates)}
    for name in ("cpu", "plain"):
        if name == "cpu" and cpu_jax.unsupported(x, None, None):
            continue
        label = JAX if name == "cpu" else f"{JAX}, plain"

        def scan(x: Any, a: Any, name: str = name) -> Any:
            return api.linear_scan(a, x, impl=name)[0]

        calls[SCAN, label] = over(scan, a)
        pull = jax.jit(lambda x, a, scan=scan: jax.vjp(scan, x, a)[1])(x, a)
        calls[BACK, label] = ready(lambda pull, dh: pull(dh), pull, dh)
        calls[WHOLE, label] = over(
            lambda x, gates, name=name: api.rglru(x, gates, impl=name)[0], gates
        )
    if (SCAN, JAX) in calls:
        biases = [b.reshape(-1) for b in (gates.input_bias, gates.recurrent_bias)]
        rest = (*products(x, gates), *biases, -C * jax.nn.softplus(gates.recurrent_param))
        calls[FUSED, JAX] = over(lambda x, *rest: cpu_jax.from_products(x, *rest), *rest)
    calls[SCAN, "lax.associative_scan"] = over(_associative, a)
    return calls


def _associative(x: Any, a: Any) -> Any:
    import jax

    def combine(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
        return left[0] * right[0], left[1] * right[0] + right[1]

    return jax.lax.associative_scan(combine, (a, x), axis=1)[1]


def _peers(problem: Problem) -> _Calls:
    """Return the scans of transformers and of DeepMind's code, if they are installed and work."""
    import torch

    absent, calls = absent_peers(), {}
    for name, (_, make) in PEERS.items():
        if name not in absent:
            calls[SCAN, name] = make(problem)
    return {key: torch.inference_mode()(call) for key, call in calls.items()}


def absent_peers() -> dict[str, str]:
    """Return the reasons why peers are left out, by name."""
    reasons = {name: why_absent(*modules) for name, (modules, _) in PEERS.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _transformers(problem: Problem) -> Callable[[], Any]:
    import torch
    from transformers.models.recurrent_gemma import modeling_recurrent_gemma as theirs

    a, x = torch.from_numpy(problem.a), torch.from_numpy(problem.x)
    reset = torch.zeros(1, problem.tokens, 1, dtype=torch.bool)
    scan: Any = theirs.RecurrentGemmaRglru._rnn_scan
    return lambda: scan(None, x, a, reset, None)


def _deepmind_torch(problem: Problem) -> Callable[[], Any]:
    import torch
    from recurrentgemma.torch.layers import rnn_scan

    a, x = torch.from_numpy(problem.a), torch.from_numpy(problem.x)
    start = torch.zeros(1, problem.tokens, dtype=torch.bool)
    return lambda: rnn_scan(x, a, start, None)


def _deepmind_jax(problem: Problem) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp
    from recurrentgemma.jax.scan import linear_scan

    compiled = jax.jit(lambda x, a: linear_scan(x, a)[0])
    arrays = jnp.asarray(problem.x), jnp.asarray(problem.a)
    return lambda: compiled(*arrays).block_until_ready()


# Modules that a peer needs, and the function that makes its call.
PEERS: dict[str, tuple[tuple[str, ...], Callable[[Problem], Callable[[], Any]]]] = {
    "transformers": (
        ("transformers.models.recurrent_gemma.modeling_recurrent_gemma",),
        _transformers,
    ),
    "DeepMind, torch": (("recurrentgemma.torch.layers",), _deepmind_torch),
    "DeepMind, JAX": (("recurrentgemma.jax.scan",), _deepmind_jax),
}


def _seconds(call: Callable[[], Any]) -> float:
    start, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - start < REPEAT:
        call()
        count += 1
    return (time.perf_counter() - start) / count


def _timings(tokens: int, times: dict[tuple[str, str], list[float]]) -> Iterator[Timing]:
    limits = min((values for (what, _), values in times.items() if what == LIMIT), key=min)
    limit = min(limits)
    median = {key: statistics.median(values) for key, values in times.items()}
    yield Timing(LIMIT, tokens, "sum", limit, limit, max(limits), LIMIT, 1.0)
    for (operation, name), values in times.items():
        framework = ", ".join(name.split(", ")[:2])
        scan = median.get((SCAN, name), 0.0)
        whole = scan + median.get((PRODUCTS, framework), 0.0)
        denominators = {
            SCAN: (LIMIT, limit),
            BACK: ("5/3 limit", limit * 5 / 3),
            FUSED: ("its scan", scan),
            WHOLE: ("products and scan", whole),
        }
        if operation in denominators:
            against, seconds = denominators[operation]
            spread = median[operation, name], min(values), max(values)
            yield Timing(operation, tokens, name, *spread, against, spread[0] / seconds)


def table(timings: list[Timing]) -> tuple[str, list[str], list[list[str]]]:
    """Return title, headings and cells of the timings."""
    rows = [
        [
            *(each.operation, str(each.tokens), each.implementation),
            f"{each.seconds * 1e3:.3f} ({each.fastest * 1e3:.3f}-{each.slowest * 1e3:.3f})",
            *(f"{each.ratio:.2f}", each.against),
        ]
        for each in timings
    ]
    headings = ["operation", "T", "implementation", "time", "ratio", "over"]
    return "milliseconds, medians of the rounds and their range", headings, rows
