"""MLX's affine quantisation of a matrix, equal bit for bit to ``mlx.core.quantize`` on a CPU.

As ``mlx_lm.convert`` does it, linear maps, embedding and output head are quantised if their rows
are whole groups, and the taps of a convolution lie in (L, K, 1).
"""

from typing import TYPE_CHECKING, Any

from griffin_eval.converters.codecs.encoding import Encoded, Encoding, is_matrix
from griffin_eval.converters.codecs.mlx import dequantised
from griffin_eval.converters.containers.container import Specs
from griffin_eval.layout import ParamSpec

if TYPE_CHECKING:
    import numpy as np

GROUP = 64  # elements that have scale and bias in common, the default of mlx_lm


class Affine(Encoding):
    """Numbers of 4 or 8 bits, with a scale and a bias of each group.

    Args:
        bits: of a number.
    """

    left = "norms, biases, convolution, gates and Λ"
    reader = "mlx_lm"
    runs_mixed = False  # an assertion of its recurrence fails

    def __init__(self, bits: int):
        self.name, self._bits = f"mlx-{bits}", bits

    def takes(self, spec: ParamSpec) -> bool:
        return is_matrix(spec) and spec.shape[1] % GROUP == 0

    def stored(self, spec: ParamSpec, dtype: str) -> Specs:
        rows, columns = spec.shape
        module = spec.name.removesuffix("weight")
        groups = (rows, columns // GROUP), dtype
        words = rows, columns * self._bits // 32
        return {
            spec.name: (words, "uint32"),
            f"{module}scales": groups,
            f"{module}biases": groups,
        }

    def shape(self, spec: ParamSpec) -> tuple[int, ...]:
        taps = spec.name.endswith("conv_1d.weight")
        return (spec.shape[0], spec.shape[2], 1) if taps else spec.shape

    def encode(self, rows: "np.ndarray") -> Encoded:
        import numpy as np

        values = rows.astype(np.float32).reshape(-1, GROUP)
        most = np.float32((1 << self._bits) - 1)
        high, low = values.max(1), values.min(1)
        falls = np.abs(low) > np.abs(high)
        scales = np.maximum((high - low) / most, np.float32(1e-7))
        scales = np.where(falls, scales, -scales)
        edges = np.where(falls, low, high)
        steps = np.rint(edges / scales)  # so that zero is one of the values
        moved = steps != 0
        scales = np.where(moved, edges / np.where(moved, steps, np.float32(1)), scales)
        biases = np.where(moved, edges, np.float32(0))
        values -= biases[:, None]
        values /= scales[:, None]
        np.clip(np.rint(values, out=values), 0, most, out=values)
        numbers = values.astype(np.uint8).reshape(-1)
        if self._bits == 4:
            numbers = numbers[::2] | numbers[1::2] << 4
        words = numbers.view("<u4")
        kept = scales.astype(rows.dtype), biases.astype(rows.dtype)
        read = dequantised(words, *kept, self._bits, GROUP)
        return Encoded((words, *kept), read.reshape(rows.shape))

    def config(self, dtype: str) -> dict[str, Any]:
        settings = {"group_size": GROUP, "bits": self._bits, "mode": "affine"}
        return {"quantization": settings, "quantization_config": settings}
