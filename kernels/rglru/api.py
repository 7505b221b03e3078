"""The recurrences: one signature for the models, and the fastest kernel that supports the call."""

from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from griffin_eval.kernels import devices, registry
from griffin_eval.kernels.registry import Choice, Trial
from griffin_eval.kernels.rglru.reference import C, Gates
from griffin_eval.kernels.rglru.shapes import check_rglru, check_scan


def linear_scan(
    a: Any,
    x: Any,
    h0: Any = None,
    *,
    resets: Any = None,
    lengths: Any = None,
    starts: Any = None,
    impl: str = "auto",
) -> tuple[Any, Any]:
    """Compute h_t = a_t h_{t-1} + x_t (equation 4, with gated input).

    Differentiable in a, x and h0. `griffin_eval.kernels.rglru.reference` describes the two layouts
    of tokens, rows and packed segments.

    Args:
        a: [B, T, D] decay of each step, of PyTorch, JAX or numpy (which uses the reference).
        x: [B, T, D] input of each step, of the same dtype: any float or complex one.
        h0: [S, D] states before the first step, float32 or wider; zeros by default.
        resets: [B, T] bool, start of a document, where h_t = x_t.
        lengths: [S] number of tokens to read; all by default. Later tokens do not change the state,
            and h is arbitrary but finite there.
        starts: [S] ascending starts of packed segments in the one row; None for rows.
        impl: Name of an implementation in `registry.IMPLEMENTATIONS`, or ``auto``: see `choose`.

    Returns:
        [B, T, D], every h_t in the dtype of x, and [S, D], the states after the last step in
        float32 or wider.

    Raises:
        NotImplementedError: The named implementation does not support this call.
        ArgumentError: Shapes or devices do not match.
    """
    h0 = _states(x, h0, lengths)
    check_scan(x, a, h0, resets, lengths, starts)
    module = registry.module("rglru", choose(x, None, starts, impl).name, x)
    with devices.without_autocast(x):
        return module.linear_scan(a, x, h0, resets=resets, lengths=lengths, starts=starts)


def rglru(
    x: Any,
    gates: Gates,
    h0: Any = None,
    *,
    resets: Any = None,
    lengths: Any = None,
    starts: Any = None,
    c: float = C,
    impl: str = "auto",
) -> tuple[Any, Any]:
    """Compute the RG-LRU (equations 1-4), in float32 or wider for any dtype of x and autocast.

    Differentiable in x, h0 and the gates' parameters; the backward pass recomputes the gates. The
    derivative of the square root is at most 1000.

    Args:
        x: [B, T, L] input.
        gates: Parameters. With an imaginary part this is the CG-LRU (appendix B), where one half of
            x, h and the states holds real parts, the other imaginary parts.
        h0, resets, lengths, starts, impl: See `linear_scan`.
        c: Constant of equation 3.

    Returns:
        [B, T, L], every h_t in the dtype of x, and [S, L], the states after the last step in
        float32 or wider.

    Raises:
        NotImplementedError: The named implementation does not support this call.
        ArgumentError: Shapes or devices do not match.
    """
    h0 = _states(x, h0, lengths)
    check_rglru(x, gates, h0, resets, lengths, starts)
    module = registry.module("rglru", choose(x, gates, starts, impl, c).name, x)
    layout = {"resets": resets, "lengths": lengths, "starts": starts}
    constant = {} if c == C else {"c": c}  # some implementations have no such argument
    with devices.without_autocast(x):
        return module.rglru(x, gates, h0, **layout, **constant)


def choose(
    x: Any,
    gates: Gates | None = None,
    starts: Any = None,
    impl: str = "auto",
    c: float = C,
) -> Choice:
    """Return the first implementation that supports these arrays on their device.

    Raises:
        NotImplementedError: The named implementation does not support them.
    """
    needs = []
    if gates is not None and gates.imaginary_param is not None:
        needs.append(registry.COMPLEX_GATES)
    if c != C:
        needs.append(registry.OTHER_CONSTANTS)

    def trial(module: ModuleType) -> Trial:
        framework, packed = devices.framework(x), starts is not None
        where = str(x.device) if framework == "torch" else ""
        return Trial(
            (where, x.dtype, packed), lambda: _error(module, framework, where, x.dtype, packed)
        )

    return registry.choose("rglru", x, gates, starts, needs=needs, trial=trial, impl=impl)


def _error(module: ModuleType, framework: str, device: str, dtype: Any, packed: bool) -> float:
    """Return the largest difference from the plain implementation in a small problem."""
    rng = np.random.default_rng(0)
    lengths, starts = [150, 0, 90], [0, 150, 160]
    batch, time = (1, 260) if packed else (3, 160)
    block = (2, 128)
    shapes = [(256,), (*block, 128), block, (*block, 128), block, (batch, time, 256), (3, 256)]
    scales = [1, 0.1, 1, 0.1, 1, 1, 1]
    arrays = [k * rng.standard_normal(n, np.float32) for k, n in zip(scales, shapes, strict=True)]
    index = [np.array(v, np.int32) for v in ([lengths, starts] if packed else [lengths])]
    plain = import_module(f"griffin_eval.kernels.rglru.plain_{framework}")
    put: Any
    cast: Any
    alone: Any  # function that calls another without gradients and outside of any tracing
    if framework == "torch":
        import torch

        put, cast = (lambda v: torch.from_numpy(v).to(device)), torch.Tensor.to
        alone = torch.no_grad()(lambda compute: compute())
    else:
        import jax

        put, cast, alone = jax.numpy.asarray, jax.numpy.astype, devices.untraced

    def difference() -> float:
        *rest, h0 = map(put, arrays)
        *gates, x = (cast(v, dtype) for v in rest)
        layout = dict(zip(("lengths", "starts"), map(put, index), strict=False))
        ours, right = (m.rglru(x, Gates(*gates), h0, **layout) for m in (module, plain))
        read = lengths[0]  # in both layouts the first segment is in the first row
        return max(
            float(abs(ours[0][0, :read] - right[0][0, :read]).max()),
            float(abs(ours[1] - right[1]).max()),
        )

    return alone(difference)


def _states(x: Any, h0: Any, lengths: Any) -> Any:
    if h0 is not None:
        return h0
    rows = len(x) if lengths is None else len(lengths)
    framework = devices.framework(x)
    if framework == "numpy":
        return None
    library = import_module({"torch": "torch", "jax": "jax.numpy"}[framework])
    dtype = x.dtype if x.dtype.itemsize >= 4 else library.float32
    where = {"device": x.device} if framework == "torch" else {}
    return library.zeros((rows, x.shape[2]), dtype=dtype, **where)
