"""Parameters that are stored in fewer bits, read as their own libraries read them.

`Dequantised` is a layer between a container and a naming: it shows the container's tensors, but
instead of those that make up a quantised parameter it shows that parameter.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from griffin_eval.converters.arrays.dtypes import ITEM_BYTES, numpy_dtype
from griffin_eval.converters.arrays.grid import Region
from griffin_eval.converters.arrays.pieces import CHUNK_BYTES
from griffin_eval.converters.arrays.torch import torch_tensor
from griffin_eval.converters.containers.container import Container, Tensor, natural_key

if TYPE_CHECKING:
    import numpy as np
    import torch

TOGETHER = 1 << 18  # elements that are dequantised at a time, so that they stay in a cache


class PackedRows(NamedTuple):
    """A matrix [O, I] in fewer bits, of which every row has a row of each array.

    Attributes:
        bits: Bits of an element.
        elements: uint8 [O, I * bits / 8] in the order in which they are stored, or int8 [O, I].
        scales: [O, S], each of I / S elements.
        shifts: [O, S] of MLX, None of bitsandbytes.
        table: float32 [256, 8 / bits], what the elements of a byte stand for; None where bits are 8
            or do not divide 8.
    """

    bits: int
    elements: "np.ndarray"
    scales: "np.ndarray"
    shifts: "np.ndarray | None" = None
    table: "np.ndarray | None" = None


class Quantised(ABC):
    """A parameter that is stored in fewer bits.

    Attributes:
        shape: its shape, with at least one axis.
        dtype: the dtype that it is dequantised in.
        scheme: how it is stored, in a few words.
        parts: names of the tensors that it is stored in.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, scheme: str, parts: tuple[str, ...]):
        self.shape, self.dtype, self.scheme, self.parts = shape, dtype, scheme, parts
        self.size = math.prod(shape)

    @property
    def nbytes(self) -> int:
        return self.size * ITEM_BYTES[self.dtype]

    def packed_rows(self) -> PackedRows | None:
        """What is stored, unchanged but for scales in 8 bits, which are dequantised; None where it
        is no matrix in rows of whole bytes, or in blocks of another library.

        Raises:
            CheckpointError: as of `values`.
        """
        return None

    @abstractmethod
    def values(self, start: int, stop: int) -> "np.ndarray":
        """Elements ``start`` to ``stop`` of the parameter in C order, in its dtype.

        Raises:
            CheckpointError: a file has become shorter, or cannot be read.
        """


class Decoding(NamedTuple):
    """What a codec has found in a container.

    Attributes:
        codec: name of the codec.
        parameters: the quantised parameters, by name.
        shapes: other shapes of tensors that are not quantised, by name: of as many elements, in
            the same order.
    """

    codec: str
    parameters: Mapping[str, Quantised]
    shapes: Mapping[str, tuple[int, ...]] = {}


class _Facts(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Dequantised:
    """A container whose quantised parameters are dequantised while they are read.

    Attributes:
        tensors, left_out, mapped: as of `Container`.
        decoding: what is dequantised.
        stored: the container below.
    """

    mapped = False

    def __init__(self, stored: Container, decoding: Decoding):
        self.stored, self.decoding, self.left_out = stored, decoding, stored.left_out
        self._parameters = decoding.parameters
        parts = {part for parameter in decoding.parameters.values() for part in parameter.parts}
        plain = {
            name: _Facts(decoding.shapes.get(name, tensor.shape), tensor.dtype, tensor.nbytes)
            for name, tensor in stored.tensors.items()
            if name not in parts
        }
        tensors: dict[str, Tensor] = {**plain, **decoding.parameters}
        self.tensors = {name: tensors[name] for name in sorted(tensors, key=natural_key)}

    def numpy(self, name: str) -> "np.ndarray":
        """One tensor, as a copy."""
        tensor = self.tensors[name]
        return self.slice(name, 0, tensor.shape[0]) if tensor.shape else next(self.pieces(name))

    def slice(self, name: str, start: int, stop: int) -> "np.ndarray":
        import numpy as np

        parameter = self._parameters.get(name)
        if parameter is None:
            return self._shaped(name, self.stored.slice(name, start, stop))
        rows, *others = parameter.shape
        start, stop, _ = slice(start, stop).indices(rows)
        stop = max(start, stop)
        out = np.empty((stop - start, *others), numpy_dtype(parameter.dtype))
        flat, row = out.reshape(-1), parameter.size // max(1, rows)
        for first in range(0, flat.size, TOGETHER):
            last = min(first + TOGETHER, flat.size)
            flat[first:last] = parameter.values(start * row + first, start * row + last)
        return out

    def part(self, name: str, part: Region) -> "np.ndarray":
        if not part:
            return self.numpy(name)
        return self.slice(name, part[0].start, part[0].stop)[(slice(None), *part[1:])]

    def pieces(self, name: str, nbytes: int = CHUNK_BYTES) -> Iterator["np.ndarray"]:
        parameter = self._parameters.get(name)
        if parameter is None:
            for piece in self.stored.pieces(name, nbytes):
                yield self._shaped(name, piece)
            return
        rows = max(1, nbytes // max(1, parameter.nbytes // max(1, parameter.shape[0])))
        for start in range(0, parameter.shape[0], rows):
            yield self.slice(name, start, start + rows)

    def checksum(self, name: str) -> int | None:
        return None if name in self._parameters else self.stored.checksum(name)

    def torch(self, name: str) -> "torch.Tensor":
        return torch_tensor(self.numpy(name))

    def files(self) -> Iterable[Path]:
        return self.stored.files()

    def describe(self) -> str:
        schemes = sorted({parameter.scheme for parameter in self._parameters.values()})
        return ", ".join([self.stored.describe(), *schemes])

    def close(self) -> None:
        self.stored.close()

    def bits(self, name: str) -> float:
        """The bits that an element of a quantised parameter takes in the files, scales included."""
        parameter = self._parameters[name]
        stored = sum(self.stored.tensors[part].nbytes for part in parameter.parts)
        return 8 * stored / max(1, parameter.size)

    def _shaped(self, name: str, rows: "np.ndarray") -> "np.ndarray":
        """Rows of a tensor that is not quantised, in the shape that is shown of it."""
        shape = self.decoding.shapes.get(name)
        return rows if shape is None else rows.reshape(len(rows), *shape[1:])
