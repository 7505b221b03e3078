"""Random matrices in 4 and 8 bits, and what numpy dequantises them to."""

import ml_dtypes
import numpy as np
import torch

from griffin_eval.converters.codecs.bitsandbytes import code_of, dequantised_4_bits, pairs_of
from griffin_eval.converters.codecs.encode import ENCODINGS
from griffin_eval.kernels.linear.packed_torch import Blocks

NAMES = {"nf4": "bnb-nf4", "affine-4": "mlx-4", "affine-8": "mlx-8", "int8": "bnb-int8"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def blocks_of(packing, dtype, outputs, inputs, seed=0):
    """The blocks of a random matrix that was of a dtype, and the values that they stand for."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((outputs, inputs)) * rng.choice([1e-4, 1, 30], (outputs, 1))
    if packing == "fp4":
        elements, scales, shifts, dense = _of_fp4(rng, weight, dtype)
    else:
        encoded = ENCODINGS[NAMES[packing]].encode(weight.astype(getattr(ml_dtypes, dtype, dtype)))
        elements, scales, *shifts = map(_tensor, encoded.parts)
        dense = _tensor(encoded.values)
    blocks = Blocks(
        packing,
        elements.view(torch.uint8).reshape(outputs, -1),
        scales.reshape(outputs, -1),
        shifts[0].reshape(outputs, -1) if shifts else None,
        dense.dtype,
        torch.from_numpy(code_of(packing)) if packing in ("nf4", "fp4") else None,
    )
    return blocks, dense


def _tensor(array):
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _of_fp4(rng, weight, dtype):
    """Random numbers with the scales of a matrix, which nothing here encodes so."""
    scales = np.abs(weight.reshape(-1, 64)).max(1).astype(np.float32)
    numbers = rng.integers(0, 256, weight.size // 2, np.uint8)
    dense = dequantised_4_bits(numbers, weight.size, scales, 64, pairs_of(code_of("fp4")))
    dense = torch.from_numpy(dense.reshape(weight.shape)).to(DTYPES[dtype])
    return _tensor(numbers), _tensor(scales), [], dense
