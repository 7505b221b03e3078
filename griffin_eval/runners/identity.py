"""Whether processes that share a model, or its requests, were given the same."""

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
    """What has to be the same in every process, by name.

    Of the weights only vectors (norms, biases, Λ) are read, which differ between any two
    checkpoints of a training.

    Args:
        framework: ``torch`` or ``jax``.
        dtype: that was asked for.
        sharing: processes or devices that share a model.
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
    """Checks that all processes have the same identity. The first that differs says so.

    Args:
        all_of: the identity of each process, by rank.

    Raises:
        ArgumentError: in the first process, with what differs and where.
        SystemExit: in the others.
    """
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
