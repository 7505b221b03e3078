"""Devices to compile for: chips of a TPU slice that need not be present, or a divided CPU."""

import math
import os
import re
from dataclasses import dataclass
from typing import Any

from griffin_eval.errors import ArgumentError

# Shapes of slices that libtpu knows, the smallest first.
SLICES = ((2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
# Bytes that the compiler grants a program on a chip, by generation.
MEMORY = {"v5e": int(15.75 * 2**30), "v6e": int(31.25 * 2**30)}


@dataclass(frozen=True)
class Target:
    """Devices to compile for: their kind, a key of `MEMORY` or ``cpu``, and their number."""

    kind: str
    count: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.count}"


def parse_target(text: str) -> Target:
    """Parse a target such as ``v5e-16`` or ``cpu-8``; ArgumentError for other texts."""
    match = re.fullmatch(r"(\w+)-(\d+)", text)
    kinds = (*MEMORY, "cpu")
    if match is None or match.group(1) not in kinds or not 0 < int(match.group(2)) <= 256:
        raise ArgumentError(
            f"--target {text!r}: expected {' or '.join(kinds)} and a number of devices up to 256, "
            "such as v5e-16"
        )
    return Target(match.group(1), int(match.group(2)))


def devices(target: Target) -> list[Any]:
    """Return the devices, for a TPU from the smallest slice with enough of them."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if target.kind == "cpu":  # JAX divides it before it first looks for devices
        count = f"--xla_force_host_platform_device_count={target.count}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}".strip()
        import jax

        there = jax.devices("cpu")
        if len(there) < target.count:
            raise ArgumentError(f"--target {target}: JAX was started with {len(there)} devices")
        return there[: target.count]
    from jax.experimental import topologies

    from benchmarks.scan.tpu_compiler import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    rows, columns = next(shape for shape in SLICES if math.prod(shape) >= target.count)
    topology = topologies.get_topology_desc(
        f"{target.kind}:{rows}x{columns}", "tpu", chips_per_host_bounds=(2, 2, 1)
    )
    return list(topology.devices)[: target.count]
