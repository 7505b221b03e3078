"""Which framework an array is of, and where it is."""

import contextlib
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

    # Of an array that is being traced only the backend it will most likely run on is known.
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    return getattr(device, "platform", device) or jax.default_backend()


def without_autocast(x: Any) -> contextlib.AbstractContextManager[Any]:
    """Context manager that disables torch.autocast on x's device; nothing for JAX and numpy."""
    if framework(x) == "torch":
        import torch

        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()
