"""Parameters that are parts of stored tensors, have other values than these, or are zeros.

`Derived` is a layer between a container and what reads parameters, which shows each of them as a
tensor of its own: read a piece, a slice or a part at a time, as other tensors are.
"""

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from griffin_eval.converters.arrays.dtypes import ITEM_BYTES, numpy_dtype
from griffin_eval.converters.arrays.grid import Region
from griffin_eval.converters.arrays.pieces import CHUNK_BYTES, chunks
from griffin_eval.converters.arrays.torch import torch_tensor
from griffin_eval.converters.containers.container import Container, Tensor
from griffin_eval.converters.naming.ops import Change, Shape
from griffin_eval.converters.naming.tables import EMBEDDING, Binding

if TYPE_CHECKING:
    import numpy as np
    import torch

_TOGETHER = 1 << 18  # elements that are changed at a time


class Part(NamedTuple):
    """A tensor that is made of a stored one.

    Attributes:
        source: the stored tensor; "" for zeros.
        shape: its shape.
        dtype: its dtype, which is the stored one's.
        entry: index along a first axis that the stored tensor has beyond it; None: no such axis.
        axis, start: axis along which the stored tensor is longer, and the index at which it begins
            there.
        cut: whether the stored tensor is longer.
        change: what is done to the values.
    """

    source: str
    shape: Shape
    dtype: str
    entry: int | None = None
    axis: int = 0
    start: int = 0
    cut: bool = False
    change: Change | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def within(self, part: Region) -> Region:
        """Where a part of it lies in the stored tensor, or in its entry."""
        if not self.cut:
            return part
        along = part[self.axis]
        moved = slice(along.start + self.start, along.stop + self.start)
        return (*part[: self.axis], moved, *part[self.axis + 1 :])


def derive(
    container: Container, bindings: Sequence[Binding]
) -> tuple[Container, Sequence[Binding]]:
    """The container with a tensor for each parameter that is none there, and bindings to these.

    Args:
        container: that holds every tensor of the bindings.
        bindings: of parameters to its tensors, of which some may be cut, changed or absent.
    """
    parts: dict[str, Part] = {}
    derived: list[Binding] = []

    def add(binding: Binding, label: str, part: Part) -> None:
        name = f"{part.source}{label}"
        while name in container.tensors or name in parts:
            name += "'"
        parts[name] = part
        derived.append(
            binding._replace(foreign=name, shape=part.shape, entry=None, cut=None, change=None)
        )

    homes = {spec.name: binding.foreign for binding in bindings for spec in binding.canonical}
    for binding in bindings:
        if not binding.foreign:
            (spec,) = binding.canonical
            beside = homes.get(spec.name.removesuffix("bias") + "weight") or homes[EMBEDDING]
            add(binding, spec.name, Part("", spec.shape, container.tensors[beside].dtype))
            continue
        dtype = container.tensors[binding.foreign].dtype
        label = "" if binding.entry is None else f"[{binding.entry}]"
        label += "" if binding.change is None else f", {' '.join(map(str, binding.change))}"
        if binding.cut is not None:
            start = 0
            for spec, shape in zip(binding.canonical, binding.part_shapes(), strict=True):
                stop = start + shape[binding.cut]
                place = (binding.entry, binding.cut, start, True, binding.change)
                part = Part(binding.foreign, shape, dtype, *place)
                one = binding._replace(canonical=(spec,))
                add(one, f"{label} {start}:{stop} along {binding.cut}", part)
                start = stop
        elif binding.change is not None:
            shape = binding.shape if binding.entry is None else binding.shape[1:]
            part = Part(binding.foreign, shape, dtype, binding.entry, change=binding.change)
            add(binding, label, part)
        else:
            derived.append(binding)
    return (Derived(container, parts) if parts else container), derived


class Derived:
    """A container that also has tensors which are made of others.

    Attributes:
        tensors, left_out, mapped: as of `Container`.
        stored: the container below.
        parts: what is made, by name.
    """

    def __init__(self, stored: Container, parts: Mapping[str, Part]):
        self.stored, self.parts, self.left_out = stored, parts, stored.left_out
        self.mapped = stored.mapped
        self.tensors: Mapping[str, Tensor] = {**stored.tensors, **parts}
        self._reading = threading.Lock()  # several parts are of one stored tensor

    def numpy(self, name: str) -> "np.ndarray":
        part = self.parts.get(name)
        if part is None:
            return self.stored.numpy(name)
        if part.source and part.entry is None and self.mapped:
            whole = self.stored.numpy(part.source)
            return _changed(whole[part.within(tuple(slice(0, n) for n in part.shape))], part)
        return self._rows(part, 0, part.shape[0])

    def slice(self, name: str, start: int, stop: int) -> "np.ndarray":
        part = self.parts.get(name)
        if part is None:
            return self.stored.slice(name, start, stop)
        start, stop, _ = slice(start, stop).indices(part.shape[0])
        return self._rows(part, start, max(start, stop))

    def part(self, name: str, part: Region) -> "np.ndarray":
        made = self.parts.get(name)
        if made is None:
            return self.stored.part(name, part)
        if not made.source:
            return self.numpy(name)[part]
        within, entry = made.within(part), made.entry
        with self._reading:
            if entry is not None:
                found = self.stored.part(made.source, (slice(entry, entry + 1), *within))[0]
            else:
                found = self.stored.part(made.source, within)
        return _changed(found, made)

    def pieces(self, name: str, nbytes: int = CHUNK_BYTES) -> Iterator["np.ndarray"]:
        part = self.parts.get(name)
        if part is None:
            yield from self.stored.pieces(name, nbytes)
        elif part.entry is not None:  # a stack is read a layer at a time
            yield from chunks(self._rows(part, 0, part.shape[0]), nbytes)
        else:
            rows = max(1, nbytes // max(1, part.nbytes // max(1, part.shape[0])))
            for start in range(0, part.shape[0], rows):
                yield self._rows(part, start, min(start + rows, part.shape[0]))

    def checksum(self, name: str) -> int | None:
        return None if name in self.parts else self.stored.checksum(name)

    def torch(self, name: str) -> "torch.Tensor":
        part = self.parts.get(name)
        if part is None:
            return self.stored.torch(name)
        if part.source and part.entry is None and part.change is None and self.mapped:
            return self.stored.torch(part.source)[
                part.within(tuple(slice(0, n) for n in part.shape))
            ]
        return torch_tensor(self.numpy(name))

    def files(self) -> Iterable[Path]:
        return self.stored.files()

    def describe(self) -> str:
        return self.stored.describe()

    def close(self) -> None:
        self.stored.close()

    def _rows(self, part: Part, start: int, stop: int) -> "np.ndarray":
        """Rows of a part, contiguous and copied."""
        import numpy as np

        if not part.source:
            return np.zeros((stop - start, *part.shape[1:]), numpy_dtype(part.dtype))
        region = part.within((slice(start, stop), *(slice(0, n) for n in part.shape[1:])))
        with self._reading:
            if part.entry is not None:
                layer = self.stored.slice(part.source, part.entry, part.entry + 1)[0]
                found = layer[region]
            else:
                found = self.stored.slice(part.source, region[0].start, region[0].stop)
                found = found[(slice(None), *region[1:])]
        return np.ascontiguousarray(_changed(found, part))


def _changed(values: "np.ndarray", part: Part) -> "np.ndarray":
    """The values of a part: the stored ones, or changed ones in a new array."""
    import numpy as np

    if part.change is None:
        return values
    out = np.empty(values.shape, values.dtype)
    rows = max(1, _TOGETHER // max(1, math.prod(values.shape[1:])))
    for start in range(0, len(values), rows):
        out[start : start + rows] = part.change.apply(values[start : start + rows])
    return out
