"""The scan and the RG-LRU on this CPU in float32, compared with other implementations and a limit.

The limit of a scan is the sum of two arrays written into a third, by this package's loop or by
torch, whichever is faster. A backward pass reads three arrays and writes two: 5/3 of that limit. An
RG-LRU is compared with its parts: without its gates' products with the scan, with them with both.
Memory is reused, as in an evaluation, and JAX overwrites its input.
"""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np

from benchmarks.commands import tell
from benchmarks.peers import absent_peers
from benchmarks.report import Report, Row
from benchmarks.timing import interleave, tune_process
from griffin_eval.kernels.cpu import compiled
from griffin_eval.kernels.rglru import api
from griffin_eval.kernels.rglru.reference import C, Gates

REPEAT = 0.02  # seconds that a measurement takes at least, where calls are short
Calls = dict[tuple[str, str], Callable[[], Any]]  # by operation and implementation
SCAN, BACK, FUSED, WHOLE = "scan", "scan, backward", "RG-LRU from products", "RG-LRU"
PRODUCTS, LIMIT, TORCH, JAX = "products", "limit", "griffin, torch", "griffin, JAX"


def measure(
    lengths: list[int], width: int, gates: int, rounds: int, report: Report
) -> dict[str, str]:
    """Time every implementation in turn for each length, and return why peers are left out.

    ``gates`` is the number of blocks of the RG-LRU's gates, a divisor of the width.
    """
    tune_process()
    absent, rows = absent_peers({name: [module] for name, (module, _) in PEERS.items()}), []
    for tokens in lengths:
        problem = Problem(tokens, width, gates)
        peers = {(SCAN, n): make(problem) for n, (_, make) in PEERS.items() if n not in absent}
        calls = {**_limits(problem), **_torch(problem), **_jax(problem), **_no_gradients(peers)}
        timed = {key: _timed(call) for key, call in calls.items()}
        tell(f"T = {tokens}")
        interleave(1, timed)  # JAX compiles
        rows += _rows(tokens, interleave(rounds, timed, tell))
    report.tables["milliseconds, medians of the rounds and their range"] = rows
    return absent


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


def _limits(problem: Problem) -> Calls:
    import torch

    a, x = torch.from_numpy(problem.a), torch.from_numpy(problem.x)
    out = torch.empty_like(x)
    calls: Calls = {(LIMIT, "torch.add"): lambda: torch.add(a, x, out=out)}
    library = compiled.library()
    if library is not None:
        pointers = [array.data_ptr() for array in (a, x, out)]
        threads = torch.get_num_threads()
        calls[LIMIT, "sum"] = lambda: library.griffin_sum(*pointers, x.numel(), threads)
    return calls


def _torch(problem: Problem) -> Calls:
    import torch
    import torch.nn.functional as F

    from griffin_eval.kernels.rglru import cpu_torch

    a, x, dh = (torch.from_numpy(v) for v in (problem.a, problem.x, problem.dh))
    gates = Gates(*(None if v is None else torch.from_numpy(v) for v in problem.gates))
    blocks = x[0].view(problem.tokens, problem.count, -1).transpose(0, 1)
    leaves = [a.clone().requires_grad_(), x.clone().requires_grad_()]

    def products() -> list[torch.Tensor]:
        return [torch.bmm(blocks, w) for w in (gates.input_weight, gates.recurrent_weight)]

    calls: Calls = {(PRODUCTS, TORCH): products}
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
    return _no_gradients(calls)


def _no_gradients(calls: Calls) -> Calls:
    import torch

    return {
        key: torch.inference_mode()(call) if key[0] != BACK else call for key, call in calls.items()
    }


def _jax(problem: Problem) -> Calls:
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

    calls: Calls = {(PRODUCTS, JAX): ready(products, x, gates)}
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


# Module that a peer needs, and the function that makes its call.
PEERS: dict[str, tuple[str, Callable[[Problem], Callable[[], Any]]]] = {
    "transformers": (
        "transformers.models.recurrent_gemma.modeling_recurrent_gemma",
        _transformers,
    ),
    "DeepMind, torch": ("recurrentgemma.torch.layers", _deepmind_torch),
    "DeepMind, JAX": ("recurrentgemma.jax.scan", _deepmind_jax),
}


def _timed(call: Callable[[], Any]) -> Callable[[], float]:
    """Return a function that calls repeatedly and returns the milliseconds of a call."""

    def milliseconds() -> float:
        start, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - start < REPEAT:
            call()
            count += 1
        return (time.perf_counter() - start) / count * 1e3

    return milliseconds


def _rows(tokens: int, times: dict[tuple[str, str], list[float]]) -> Iterator[Row]:
    limits = min((values for (what, _), values in times.items() if what == LIMIT), key=min)
    limit, middle = min(limits), {key: median(values) for key, values in times.items()}

    def row(operation: str, name: str, ms: list[float], over: str, denominator: float) -> Row:
        ratio = {"ratio": median(ms) / denominator, "over": over}
        return {"operation": operation, "T": tokens, "implementation": name, "ms": ms} | ratio

    yield row(LIMIT, "sum", limits, "fastest round", limit)
    for (operation, name), values in times.items():
        framework = ", ".join(name.split(", ")[:2])
        scan = middle.get((SCAN, name), 0.0)
        whole = scan + middle.get((PRODUCTS, framework), 0.0)
        denominators = {
            SCAN: (LIMIT, limit),
            BACK: ("5/3 limit", limit * 5 / 3),
            FUSED: ("its scan", scan),
            WHOLE: ("products and scan", whole),
        }
        if operation in denominators:
            yield row(operation, name, values, *denominators[operation])
