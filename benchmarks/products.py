"""The rooflines of models: the best rates of matrix products and of reading memory.

``python -m benchmarks.products`` answers requests for these functions (`benchmarks.timing.serve`).
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Literal

from benchmarks.timing import best_seconds, serve

MEASURED = 1.0  # seconds for which products are repeated
Dtype = Literal["float32", "bfloat16", "float16"]  # dtypes of the benchmarks of models


def products_torch(
    tokens: int, width: int, mlp_width: int, device: str = "cpu", dtype: str = "float32"
) -> dict[str, float]:
    """Return the FLOP/s of an MLP's three matrix products, for each method of PyTorch."""
    import torch
    import torch.nn.functional as F

    torch.manual_seed(0)
    options: Any = {"device": device, "dtype": getattr(torch, dtype)}
    x, hidden = (torch.randn(tokens, size, **options) for size in (width, mlp_width))
    gate, up, down = (torch.randn(s, **options) / 32 for s in _mlp_shapes(width, mlp_width))
    ways: dict[str, Callable] = {"F.linear": F.linear}
    pointwise = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if device == "cpu" and dtype != "float16" and pointwise:
        with contextlib.suppress(RuntimeError):  # oneDNN has no bfloat16 on some processors.
            pointwise(x, gate, None, "none", [], "")
            ways["mkldnn._linear_pointwise"] = lambda x, w: pointwise(x, w, None, "none", [], "")

    def seconds(product: Callable) -> float:
        work = _wait(lambda: (product(x, gate), product(x, up), product(hidden, down)), device)
        return best_seconds(work, MEASURED)

    flops = tokens * 3 * 2 * width * mlp_width
    with torch.inference_mode():
        return {f"torch {name}": flops / seconds(product) for name, product in ways.items()}


def products_jax(
    tokens: int, width: int, mlp_width: int, dtype: str = "float32"
) -> dict[str, float]:
    """Return FLOP/s of the products of `products_torch`, compiled by JAX for its default device.

    Weights are used as stored and pre-transposed; sums are float32.
    """
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(jax.random.key(0), 5))
    x = jax.random.normal(next(keys), (tokens, width), dtype)
    hidden = jax.random.normal(next(keys), (tokens, mlp_width), dtype)
    weights = [jax.random.normal(next(keys), s, dtype) / 32 for s in _mlp_shapes(width, mlp_width)]

    def product(x, w):
        return jnp.matmul(x, w, preferred_element_type=jnp.float32)

    @jax.jit
    def as_stored(x, hidden, gate, up, down):
        return product(x, gate.T), product(x, up.T), product(hidden, down.T)

    @jax.jit
    def transposed(x, hidden, gate, up, down):
        return product(x, gate), product(x, up), product(hidden, down)

    flops = tokens * 3 * 2 * width * mlp_width
    with jax.default_matmul_precision("highest"):
        stored = best_seconds(_run(as_stored, x, hidden, *weights), MEASURED)
        weights = [w.T.copy() for w in weights]
        turned = best_seconds(_run(transposed, x, hidden, *weights), MEASURED)
    return {"jax x @ w.T": flops / stored, "jax x @ w": flops / turned}


def reading_torch(nbytes: int, device: str = "cpu") -> dict[str, float]:
    """Return the bytes per second of reading a float32 array, for each method of PyTorch."""
    import torch

    array = torch.ones(nbytes // 4096, 1024, device=device)
    vector = torch.ones(1024, device=device)
    ways = {"sum": array.sum, "matrix times vector": lambda: array @ vector}
    rates = {name: array.nbytes / best_seconds(_wait(way, device)) for name, way in ways.items()}
    return {f"torch {name}": rate for name, rate in rates.items()}


def reading_jax(nbytes: int) -> dict[str, float]:
    """Return the bytes per second of reading by a sum that JAX compiles for its default device."""
    import jax
    import jax.numpy as jnp

    array = jnp.ones(nbytes // 4)
    return {"jax sum": array.nbytes / best_seconds(_run(jax.jit(jnp.sum), array))}


def _run(function: Callable, *arguments: Any) -> Callable[[], Any]:
    import jax

    return lambda: jax.block_until_ready(function(*arguments))


def _wait(work: Callable[[], Any], device: str) -> Callable[[], Any]:
    """Return the work, followed by a wait for its end on an accelerator."""
    import torch

    if device == "cpu":
        return work

    def finished() -> None:
        work()
        torch.accelerator.synchronize(device)

    return finished


def _mlp_shapes(width: int, mlp_width: int) -> list[tuple[int, int]]:
    return [(mlp_width, width), (mlp_width, width), (width, mlp_width)]


if __name__ == "__main__":
    serve(sys.modules[__name__])
