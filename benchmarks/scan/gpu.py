"""The scan and the RG-LRU on a CUDA device: bandwidth relative to a copy, and other libraries.

``copy_fraction`` is the bandwidth of the necessary bytes of an operation over that of a copy. The
scan reads a and x and writes h, backward it reads a, h and dh and writes da and dx. The RG-LRU
reads x and writes h, backward it reads x, h and dh and writes dx.

Installed peers get the same numbers in the layout they require, whose conversion is not timed: HGRN
of flash-linear-attention (which takes log a) and accelerated-scan (columns first; its CUDA kernel
if nvcc is installed, for powers of 2).
"""

import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

from benchmarks.commands import tell
from benchmarks.peers import absent_peers, why_absent
from benchmarks.timing import interleave
from griffin_eval.errors import ArgumentError

# (batch, tokens, width) of RecurrentGemma 2B and 9B: one document, and as many as fill a device.
SHAPES = [(1, 8192, 2560), (8, 8192, 2560), (64, 2048, 2560), (1, 8192, 4096), (8, 8192, 4096)]
GATE_WIDTH = 256
COPIED = 2**28  # values of the copied array, or those of the shape if they are more
PEERS = {"flash-linear-attention": "fla.ops.hgrn", "accelerated-scan": "accelerated_scan.scalar"}

_Call = tuple[str, str, int, Callable[[], Any]]  # operation, implementation, arrays, function


def absent() -> dict[str, str]:
    """Return why peers are left out, by name."""
    return absent_peers({name: [module] for name, module in PEERS.items()})


def measure(
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    device: str = "cuda",
    rounds: int = 5,
    peers: bool = True,
    seconds: Callable[[Callable[[], Any]], float] | None = None,
) -> list[dict[str, Any]]:
    """Time every operation in turn with a copy; return a row for each.

    ``shapes`` are batch, tokens and width; ``peers`` may compile for minutes; ``seconds`` times a
    call, by default `bench_seconds`.

    Raises:
        ArgumentError: There is no CUDA device.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--target cuda needs a CUDA device, and torch finds none")
    timer, rows = seconds or bench_seconds, []
    for shape, dtype in itertools.product(shapes, dtypes):
        tell(f"{' x '.join(map(str, shape))}, {dtype}")
        x = torch.randn(shape, dtype=getattr(torch, dtype), device=device)
        source = x.new_ones(max(x.numel(), COPIED if device == "cuda" else 0))
        copy = partial(torch.empty_like(source).copy_, source)
        calls = list(_calls(x, peers))
        timed = {index: partial(timer, call[3]) for index, call in enumerate(calls)}
        times = interleave(rounds, {-1: partial(timer, copy)} | timed, tell)
        rate = 2 * source.nbytes / median(times[-1])
        for index, (operation, name, arrays, _) in enumerate(calls):
            rows.append(
                {
                    "operation": operation,
                    "implementation": name,
                    "shape": " x ".join(map(str, shape)),
                    "dtype": dtype,
                    "microseconds": [taken * 1e6 for taken in times[index]],
                    "copy_fraction": arrays * x.nbytes / median(times[index]) / rate,
                }
            )
    return rows


def _calls(x: Any, peers: bool) -> Iterator[_Call]:
    """Yield calls to time. A forward pass keeps arrays for the backward pass, as in training."""
    import torch

    from griffin_eval.kernels.rglru import triton_torch
    from griffin_eval.kernels.rglru.reference import Gates

    a = torch.rand(x.shape, device=x.device).mul_(0.1).add_(0.9).to(x.dtype)
    _, tokens, width = x.shape
    size = GATE_WIDTH if width % GATE_WIDTH == 0 else width
    weight = size**-0.5 * x.new_ones(width // size, size, size).normal_()
    bias, slope = weight[:, 0].clone(), x.new_ones(width).uniform_(-7, -2)
    gates = (slope, weight, bias, weight, bias)

    def rglru(x: Any, *gates: Any) -> Any:
        return triton_torch.rglru(x, Gates(*gates))

    yield from _both("scan", "griffin", (3, 5), triton_torch.linear_scan, a, x)
    yield from _both("RG-LRU", "griffin", (2, 4), rglru, x, *gates)
    missing = absent() if peers else PEERS
    if "flash-linear-attention" not in missing:
        from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn  # type: ignore[import-not-found]

        for function in (chunk_hgrn, fused_recurrent_hgrn):
            yield from _both("scan", f"fla {function.__name__}", (3, 5), function, x, a.log())
    if "accelerated-scan" not in missing:
        columns_first = [v.transpose(1, 2).contiguous() for v in (a, x)]
        from accelerated_scan import scalar  # type: ignore[import-not-found]

        yield from _both("scan", "accelerated-scan, Triton", (3, 5), scalar.scan, *columns_first)
        built = shutil.which("nvcc") and why_absent("accelerated_scan.warp") is None
        if built and tokens & (tokens - 1) == 0:
            from accelerated_scan import warp  # type: ignore[import-not-found]

            yield from _both("scan", "accelerated-scan, CUDA", (3, 5), warp.scan, *columns_first)


def _both(
    operation: str, name: str, arrays: tuple[int, int], function: Callable[..., Any], *inputs: Any
) -> Iterator[_Call]:
    import torch

    leaves = [v.detach().clone().requires_grad_() for v in inputs]
    forward = partial(function, *leaves)
    yield operation, name, arrays[0], forward
    h = forward()
    h = h[0] if isinstance(h, tuple) else h
    pull_back = partial(torch.autograd.grad, h, leaves, torch.randn_like(h), retain_graph=True)
    yield f"{operation}, backward", name, arrays[1], pull_back


def bench_seconds(call: Callable[[], Any]) -> float:
    """Return the median seconds of a call on a CUDA device."""
    from triton.testing import do_bench  # empties the caches before each call

    milliseconds: Any = do_bench(call, warmup=25, rep=60, return_mode="median")
    return milliseconds / 1000
