"""The split of a model over devices: one table from logical axes to axes of a mesh.

Tensor parallelism as in section 4.1 of the paper (and Megatron-LM, arXiv:1909.08053): linear maps
that widen are split by outputs, those that narrow by inputs, the RG-LRU by whole gate blocks,
attention by heads. A single head of keys and values is computed on every device; several are split
with the queries that they serve. So each half of a residual block ends in one sum over the devices,
and no other communication is needed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from griffin_eval.config import GriffinConfig
from griffin_eval.errors import ArgumentError
from griffin_eval.layout import ParamSpec, param_specs
from griffin_eval.messages import brief

DATA, MODEL = "data", "model"  # mesh axes of the batch and of the weights
TIME = "time"  # the single axis of a mesh that splits documents along time

# Mesh axis that splits each logical axis. Other logical axes stay whole.
RULES: dict[str, str] = dict.fromkeys(("vocab", "mlp", "lru", "gate", "heads", "kv_heads"), MODEL)


@dataclass(frozen=True)
class Split:
    """The split of a model's axes over a number of devices that share the weights."""

    config: GriffinConfig
    devices: int
    whole: dict[str, str]  # logical axes whose size does not divide, with that size

    def axes(self, spec: ParamSpec) -> tuple[str | None, ...]:
        """Return the mesh axis that splits each dimension of a parameter; None if it is whole."""
        if self.devices == 1:
            return (None,) * len(spec.axes)
        return tuple(None if axis in self.whole else RULES.get(axis) for axis in spec.axes)

    def axes_in_training(self, spec: ParamSpec, data: int) -> tuple[str | None, ...]:
        """Return `axes` for ``data`` replicas that train together: each keeps a part of the width
        of every parameter and of the optimizer's state (ZeRO, arXiv:1910.02054)."""
        return tuple(
            DATA if name == "width" and size % data == 0 and data > 1 else axis
            for axis, name, size in zip(self.axes(spec), spec.axes, spec.shape, strict=True)
        )

    def part(self, spec: ParamSpec, rank: int) -> tuple[slice, ...]:
        """Return the slices of a parameter that device ``rank`` holds, 0 to ``devices`` - 1."""
        sizes = [n // self.devices for n in spec.shape]
        return tuple(
            slice(rank * size, (rank + 1) * size) if axis == MODEL else slice(None)
            for size, axis in zip(sizes, self.axes(spec), strict=True)
        )

    def adds_once(self, spec: ParamSpec) -> bool:
        """Return whether a parameter is the bias of a linear map that is split by its inputs; such
        a bias is added after the sum over devices."""
        name, _, last = spec.name.rpartition(".")
        if last != "bias":
            return False
        weight = param_specs(self.config)[f"{name}.weight"]
        return len(weight.axes) == 2 and self.axes(weight)[1] == MODEL

    @property
    def splits_keys(self) -> bool:
        """Whether each device has its own keys and values."""
        return self.devices > 1 and self.config.num_kv_heads > 1 and "kv_heads" not in self.whole

    def size(self, spec: ParamSpec) -> int:
        """Return the number of elements of a parameter on each device."""
        return spec.size // (self.devices if MODEL in self.axes(spec) else 1)

    def replicated(self) -> Iterator[ParamSpec]:
        """Yield the parameters that would be split if their axes divided."""
        for spec in param_specs(self.config).values():
            if any(axis in self.whole for axis in spec.axes):
                yield spec


def split_over(config: GriffinConfig, devices: int) -> Split:
    """Return the split over ``devices`` >= 1. An axis that does not divide stays whole."""
    counts = {
        "vocab": (config.vocab_size, "tokens"),
        "mlp": (config.mlp_width, "channels of the MLP"),
        "heads": (config.num_heads, "heads"),
        "lru": (config.gate_blocks, "blocks of gates"),
    }
    if not config.attends:
        del counts["heads"]  # no parameter has this axis
    whole = {
        axis: f"{count} {what}" for axis, (count, what) in counts.items() if count % devices != 0
    }
    if "heads" in counts and config.num_kv_heads > 1 and config.num_kv_heads % devices:
        whole["heads"] = whole["kv_heads"] = f"{config.num_kv_heads} heads of keys"
    if config.complex_gates and devices > 1:  # real and imaginary parts are separate halves
        whole["lru"] = "complex channels"
    if "lru" in whole:
        whole["gate"] = whole["lru"]
    return Split(config, devices, whole)


def parse_mesh(text: str, option: str) -> dict[str, int]:
    """Return the mesh sizes in a text such as ``data=4,model=2``, 1 by default, or raise
    ArgumentError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        repeated = name in sizes
        if name not in (DATA, MODEL) or repeated or not re.fullmatch("0*[1-9][0-9]{,8}", size):
            raise ArgumentError(
                f"{option} {brief(text)}: expected sizes of the axes {DATA} and {MODEL}, each "
                f"once, such as {DATA}=4,{MODEL}=2"
            )
        sizes[name] = int(size)
    return {DATA: 1, MODEL: 1} | sizes
