"""Which framework an array is of, and where it is."""

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def framework(x: Any) -> str:
    """``torch``, ``jax``, or for anything else ``numpy``."""
    top = type(x).__module__.partition(".")[0]
    return {"torch": "torch", "jax": "jax", "jaxlib": "jax"}.get(top, "numpy")


def platform(x: Any) -> str:
    """Where an array of PyTorch or JAX is, as its framework calls it: cpu, cuda, gpu, tpu, …"""
    if framework(x) == "torch":
        return x.device.type
    import jax

    mesh = jax.sharding.get_abstract_mesh()  # for which a function is compiled
    if mesh.abstract_device is not None:
        return mesh.abstract_device.platform
    # Of an array that is being traced only the backend it will most likely run on is known.
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return getattr(device, "platform", device) or jax.default_backend()


def elsewhere(given: str, x: Any, arrays: dict[str, Any]) -> list[str]:
    """What is wrong where arrays of PyTorch are not on the device of x, whose kernels would read
    what is not there. (JAX looks itself.)

    Args:
        given: name of x.
        x: an array of any framework.
        arrays: by name; some may be None.
    """
    if framework(x) != "torch":
        return []
    return [
        f"{name} must be on {x.device} like {given}, found {array.device}"
        for name, array in arrays.items()
        if array is not None and array.device != x.device
    ]


def multiprocessors(device: Any) -> int:
    """How many multiprocessors a torch.device has; 1 where it is no CUDA device."""
    if device.type != "cuda":
        return 1
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def compiled_for_here() -> bool:
    """Whether what JAX traces will run on devices of this process; nothing can be tried on
    others."""
    import jax

    target = jax.sharding.get_abstract_mesh().abstract_device
    return target is None or target.platform == jax.default_backend()


def untraced(function: Callable[[], Any]) -> Any:
    """What a function of JAX gives where nothing is traced and no mesh is set: in a thread of its
    own."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


def without_autocast(x: Any) -> contextlib.AbstractContextManager[Any]:
    """Context manager that disables torch.autocast on x's device; nothing for JAX and numpy."""
    if framework(x) == "torch":
        import torch

        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()
