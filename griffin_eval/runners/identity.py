"""Checks that cooperating processes have the same checkpoint, versions and arguments."""

import dataclasses
import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from griffin_eval.converters.checkpoint import Checkpoint
from griffin_eval.converters.tensors import bytes_of
from griffin_eval.errors import ArgumentError
from griffin_eval.layout import param_specs

LIBRARIES = {"torch": ("griffin-eval", "torch"), "jax": ("griffin-eval", "jax", "jaxlib", "flax")}


def identity(checkpoint: Checkpoint, framework: str, dtype: str, sharing: int) -> dict[str, str]:
    """Return what has to be equal in every process, by name.

    Only the vectors among the weights (norms, biases, Λ) are hashed; they differ between any two
    checkpoints of a training. ``sharing`` is the number of processes or devices of one model.
    """
    vectors = hashlib.sha256()
    for name, spec in param_specs(checkpoint.config).items():
        if len(spec.shape) == 1:
            for piece in checkpoint.pieces(name):
                vectors.update(bytes_of(piece))
    return {
        **{f"version of {library}": version(library) for library in LIBRARIES[framework]},
        "dtype": dtype,
        "tensor_parallel_size": str(sharing),
        **{key: str(value) for key, value in dataclasses.asdict(checkpoint.config).items()},
        "weights": vectors.hexdigest()[:16],
        "adapters": ", ".join(f"{a.sha256[:16]} {a.weight}" for a in checkpoint.adapters),
    }


def check_alike(all_of: Sequence[dict[str, Any]], rank: int) -> None:
    """Check that all processes have the same identity. Otherwise process 0 raises ArgumentError
    with the difference, and the others raise SystemExit."""
    for other, theirs in enumerate(all_of):
        names = [name for name, value in all_of[0].items() if theirs.get(name) != value]
        if not names:
            continue
        if rank:
            raise SystemExit(2)
        differing = "; ".join(f"{n}: {all_of[0][n]} and {theirs.get(n)}" for n in names)
        raise ArgumentError(
            f"processes 0 and {other} were not given the same: {differing[:500]} (start all of "
            "them with the same arguments, files and versions)"
        )
