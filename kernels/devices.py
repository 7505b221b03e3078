"""The framework and the device of an array."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def framework(x: Any) -> str:
    """Return ``torch``, ``jax``, or for anything else ``numpy``."""
    top = type(x).__module__.partition(".")[0]
    return {"torch": "torch", "jax": "jax", "jaxlib": "jax"}.get(top, "numpy")


def platform(x: Any) -> str:
    """Return the platform of an array in its framework's words: cpu, cuda, gpu, tpu, …"""
    if framework(x) == "torch":
        return x.device.type
    import jax

    mesh = jax.sharding.get_abstract_mesh()  # target of ahead-of-time compilation
    if mesh.abstract_device is not None:
        return mesh.abstract_device.platform
    # A traced array has no device yet; it will most likely run on the default one.
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return getattr(device, "platform", device) or jax.default_backend()


def elsewhere(x_name: str, x: Any, arrays: dict[str, Any]) -> list[str]:
    """Return errors for PyTorch arrays that are not on the device of x; JAX checks this itself."""
    if framework(x) != "torch":
        return []
    return [
        f"{name} must be on {x.device} like {x_name}, found {array.device}"
        for name, array in arrays.items()
        if array is not None and array.device != x.device
    ]


def multiprocessors(device: Any) -> int:
    """Return the number of multiprocessors of a torch.device; 1 unless it is a CUDA device."""
    if device.type != "cuda":
        return 1
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def compiled_for_here() -> bool:
    """Return whether what JAX traces will run on devices of this process, so that it can be
    tested."""
    import jax

    target = jax.sharding.get_abstract_mesh().abstract_device
    return target is None or target.platform == jax.default_backend()


def untraced(function: Callable[[], Any]) -> Any:
    """Call a JAX function in a new thread, outside of any tracing and mesh."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


def without_autocast(x: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context that disables torch.autocast on x's device; it does nothing otherwise."""
    if framework(x) == "torch":
        import torch

        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()
