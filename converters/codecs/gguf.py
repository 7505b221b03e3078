"""The block types of GGUF, dequantised by the gguf library.

A parameter is blocks of 32 to 256 elements of a row, each with scales of its own. What comes out
is float32, whatever the type.
"""

from typing import TYPE_CHECKING

from griffin_eval.converters.codecs.quantised import Decoding, Quantised
from griffin_eval.converters.containers.container import Container
from griffin_eval.converters.containers.gguf.library import gguf
from griffin_eval.converters.containers.gguf.reader import GgufFile, GgufTensor

if TYPE_CHECKING:
    import numpy as np

_TOGETHER = 1 << 16  # elements that the library gets at a time, so that they stay in a cache


def find(container: Container) -> Decoding | None:
    """The parameters that a GGUF file holds in blocks, or None if there are none."""
    if not isinstance(container, GgufFile):
        return None
    found = {n: _Blocks(container, t) for n, t in container.tensors.items() if t.quantised}
    return Decoding("gguf", found) if found else None


class _Blocks(Quantised):
    """A parameter in blocks of one type."""

    def __init__(self, container: GgufFile, tensor: GgufTensor):
        shape = tensor.dequantised_shape
        self._container = container
        self._type = gguf().GGMLQuantizationType[tensor.dtype]
        self._block = gguf().GGML_QUANT_SIZES[self._type][0]
        scheme = f"{tensor.dtype} in blocks of {self._block}"
        super().__init__(shape, "float32", scheme, (tensor.name,))

    def values(self, start: int, stop: int) -> "np.ndarray":
        import numpy as np

        (name,), block = self.parts, self._block
        first, last = start // block, -(-stop // block)
        stored = self._container.slice(name, first, last)
        out = np.empty(len(stored) * block, np.float32)
        step = _TOGETHER // block
        with np.errstate(all="ignore"):  # what is not finite is counted later
            for i in range(0, len(stored), step):
                # As one row: the library would take rows apart and put few of them together.
                row = stored[i : i + step].reshape(1, -1)
                values = gguf().quants.dequantize(row, self._type)
                out[i * block : (i + step) * block] = values[0]
        return out[start - first * block : stop - first * block]
