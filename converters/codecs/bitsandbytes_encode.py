"""bitsandbytes' nf4 and int8 of a matrix, equal bit for bit to what its kernels for CPUs give.

As transformers does it, the linear maps of the layers are quantised; embedding and output head are
not. transformers rounds to float16 before it quantises in 8 bits, which is not done here.
"""

import json
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING, Any

from griffin_eval.converters.codecs.bitsandbytes import (
    code_of,
    dequantised_4_bits,
    dequantised_8_bits,
    pairs_of,
)
from griffin_eval.converters.codecs.encoding import Encoded, Encoding, is_matrix
from griffin_eval.converters.containers.container import Specs
from griffin_eval.layout import ParamSpec

if TYPE_CHECKING:
    import numpy as np

BLOCK = 64  # elements that have a scale in common, as transformers has it
_LEAST = 1e-38  # of a scale that is divided by


class _Bitsandbytes(Encoding):
    left = "embedding, output head, norms, biases, convolution, gates and Λ"
    _bits: int

    def takes(self, spec: ParamSpec) -> bool:
        return is_matrix(spec) and "vocab" not in spec.axes

    def config(self, dtype: str) -> dict[str, Any]:
        four = self._bits == 4
        return {
            "quantization_config": {
                "quant_method": "bitsandbytes",
                "_load_in_4bit": four,
                "_load_in_8bit": not four,
                "load_in_4bit": four,
                "load_in_8bit": not four,
                "bnb_4bit_compute_dtype": dtype if four else "float32",
                "bnb_4bit_quant_storage": "uint8",
                "bnb_4bit_quant_type": "nf4" if four else "fp4",  # the default, of no meaning
                "bnb_4bit_use_double_quant": False,
                "llm_int8_enable_fp32_cpu_offload": False,
                "llm_int8_has_fp16_weight": False,
                "llm_int8_skip_modules": None,
                "llm_int8_threshold": 6.0,
            }
        }


class NormalFloat(_Bitsandbytes):
    """nf4 in blocks of 64 elements, whose scales are in float32."""

    name = "bnb-nf4"
    _bits = 4

    @cached_property
    def _code(self) -> "np.ndarray":
        return code_of("nf4")

    @cached_property
    def _pairs(self) -> "np.ndarray":
        return pairs_of(self._code)

    def stored(self, spec: ParamSpec, dtype: str) -> Specs:
        state = self.constants(spec, dtype)
        return {
            spec.name: (((spec.size + 1) // 2, 1), "uint8"),
            f"{spec.name}.absmax": ((-(-spec.size // BLOCK),), "float32"),
            **{name: (value.shape, value.dtype.name) for name, value in state.items()},
        }

    def constants(self, spec: ParamSpec, dtype: str) -> "dict[str, np.ndarray]":
        import numpy as np

        state = {
            "quant_type": "nf4",
            "blocksize": BLOCK,
            "dtype": dtype,
            "shape": list(spec.shape),
        }
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        return {
            f"{spec.name}.quant_map": self._code,
            f"{spec.name}.quant_state.bitsandbytes__nf4": text,
        }

    def together(self, spec: ParamSpec) -> int:
        return BLOCK // gcd(BLOCK, spec.shape[1])

    def encode(self, rows: "np.ndarray") -> Encoded:
        import numpy as np

        values = rows.astype(np.float32).reshape(-1)
        size = values.size // BLOCK * BLOCK
        blocks, rest = values[:size].reshape(-1, BLOCK), values[size:]
        scales = np.abs(blocks).max(1)
        blocks *= (np.float32(1) / np.maximum(scales, np.float32(_LEAST)))[:, None]
        if rest.size:
            last = np.maximum(np.abs(rest).max(), np.float32(_LEAST))
            scales = np.append(scales, last)
            rest /= last
        np.clip(values, -1, 1, out=values)
        numbers = np.zeros(values.size + values.size % 2, np.uint8)
        numbers[values.size :] = 7  # beside the last one of an odd number: zero
        above = np.empty(values.size, bool)
        for bound in (self._code[:-1] + self._code[1:]) / 2:
            np.greater(values, bound, out=above)
            numbers[: values.size] += above.view(np.uint8)
        packed = numbers[::2] << 4 | numbers[1::2]
        read = dequantised_4_bits(packed, values.size, scales, BLOCK, self._pairs)
        return Encoded((packed, scales), read.astype(rows.dtype).reshape(rows.shape))


class EightBits(_Bitsandbytes):
    """int8 by rows, of which the largest magnitude is kept in float32."""

    name = "bnb-int8"
    _bits = 8

    def stored(self, spec: ParamSpec, dtype: str) -> Specs:
        module = spec.name.removesuffix("weight")
        return {
            spec.name: (spec.shape, "int8"),
            f"{module}SCB": (spec.shape[:1], "float32"),
            f"{module}weight_format": ((), "uint8"),
        }

    def constants(self, spec: ParamSpec, dtype: str) -> "dict[str, np.ndarray]":
        import numpy as np

        module = spec.name.removesuffix("weight")
        return {f"{module}weight_format": np.zeros((), np.uint8)}  # 0: by rows

    def read_dtype(self, dtype: str) -> str:
        return "float32"

    def encode(self, rows: "np.ndarray") -> Encoded:
        import numpy as np

        values = rows.astype(np.float32)
        scales = np.abs(values).max(1)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            values *= (np.float32(1) / scales * np.float32(127))[:, None]
        values[scales == 0] = 0
        numbers = np.clip(np.rint(values, out=values), -127, 127, out=values).astype(np.int8)
        return Encoded((numbers, scales), dequantised_8_bits(numbers, scales))
