"""MLX's affine quantisation in 2 to 8 bits, as ``mlx_lm.convert`` saves it in safetensors.

``weight`` holds the numbers of a row one behind the other, the lowest bits first, as uint32;
``scales`` and ``biases`` one value for each group of them. An element is number x scale + bias, and
both results are rounded to the dtype of the scales, as MLX does on a processor. The taps of the
convolution lie in (L, K, 1) instead of (L, 1, K), which are the same elements in the same order.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from griffin_eval.converters.quantised import PackedRows, Quantised, bits_of, dequantised
from griffin_eval.converters.tensors import LazyTensor, expanded, index
from griffin_eval.errors import CheckpointError
from griffin_eval.messages import brief, listed

_BITS, _GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_DTYPES = ("bfloat16", "float16", "float32")
_CONVOLUTION = "conv_1d.weight"


def decoded(
    tensors: Mapping[str, LazyTensor], settings: dict[str, Any], source: str
) -> dict[str, LazyTensor]:
    """Return the tensors as they were before MLX quantised some and laid out others differently.

    Args:
        settings: Object about quantisation in config.json: ``group_size`` and ``bits``, and
            different values for single modules by the module's name.
        source: Name of that file, for messages.

    Raises:
        CheckpointError: parts are incomplete, or contradict each other or the settings.
    """
    found, problems = dict(tensors), []
    for name in tensors:
        module = name.removesuffix(".scales")
        if module == name or f"{module}.weight" not in tensors:
            continue
        try:
            found[f"{module}.weight"] = _read(tensors, module, settings)
            for part in ("scales", "biases"):
                del found[f"{module}.{part}"]
        except ValueError as error:
            problems.append(f"'{module}.weight' {error}")
    if problems:
        raise CheckpointError(
            f"{len(problems)} parameters that MLX quantised cannot be read: {listed(problems)}; "
            f"check that {source} and weights belong together"
        )
    for name, tensor in tensors.items():
        shape = tensor.shape
        if name.endswith(_CONVOLUTION) and len(shape) == 3 and shape[1] > shape[2] == 1:
            found[name] = expanded(index(tensor, 0, axis=2), axis=1)
    return found


def _read(tensors: Mapping[str, LazyTensor], module: str, settings: dict[str, Any]) -> LazyTensor:
    """Return the weight of a module; ValueError, a phrase that follows the module's name, if the
    weight cannot be read."""
    own = settings.get(module)
    stated = settings | own if isinstance(own, dict) else settings
    bits, group = stated.get("bits"), stated.get("group_size")
    mode = stated.get("mode", "affine")
    if mode != "affine":
        raise ValueError(f"is quantised in the mode {brief(mode)}, and only 'affine' is read")
    if type(bits) is not int or bits not in _BITS:
        raise ValueError(f"has bits {brief(bits)} in the config, expected one of {brief(_BITS)}")
    if type(group) is not int or group not in _GROUPS:
        raise ValueError(
            f"has group_size {brief(group)} in the config, expected one of {brief(_GROUPS)}"
        )
    weight, scales = tensors[f"{module}.weight"], tensors[f"{module}.scales"]
    biases = tensors.get(f"{module}.biases")
    if weight.dtype != "U32" or len(weight.shape) != 2:
        raise ValueError(f"is {weight.dtype}, {weight.shape}, expected a matrix of U32")
    rows, words = weight.shape
    columns = 32 * words // bits
    if 32 * words % (bits * group):
        raise ValueError(f"has rows of {32 * words} bits, no groups of {group} in {bits} bits")
    if biases is None:
        raise ValueError("has scales, but no biases")
    for part, tensor in (("scales", scales), ("biases", biases)):
        if tensor.dtype not in _DTYPES or tensor.dtype != scales.dtype:
            raise ValueError(f"has {part} of {tensor.dtype}, expected one of {', '.join(_DTYPES)}")
        if tensor.shape != (rows, columns // group):
            raise ValueError(
                f"has {part} of shape {tensor.shape}, expected {(rows, columns // group)} for "
                f"groups of {group} in {bits} bits"
            )
    parts = weight, scales, biases

    def values(first: int, last: int) -> np.ndarray:
        numbers, factors, shifts = (part.rows(first, last) for part in parts)
        return dequantised_groups(numbers, factors, shifts, bits, group)

    def packed_rows() -> PackedRows | None:
        if not rows * columns:
            return None
        elements = weight.numpy().astype("<u4", copy=False).view(np.uint8)
        table = _numbers_of_bytes(bits) if bits in (2, 4) else None
        return PackedRows(bits, elements, scales.numpy(), biases.numpy(), table)

    scheme = f"MLX affine, {bits} bits in groups of {group}"
    stored_bits = bits_of(sum(part.nbytes for part in parts), (rows, columns))
    facts = Quantised("mlx", scheme, stored_bits, packed_rows)
    return dequantised((rows, columns), scales.dtype, columns, values, facts)


def dequantised_groups(
    weight: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int, group: int
) -> np.ndarray:
    """Return the elements of whole groups, flat, in the dtype of the scales. ``weight`` is
    uint32, the numbers one behind the other; there is one scale and one bias for each group."""
    dtype = scales.dtype
    with np.errstate(all="ignore"):  # non-finite values are counted later
        # float32 is so wide that its rounded results equal those of the dtype's own arithmetic.
        values = _numbers(weight.astype("<u4", copy=False), bits).reshape(-1, group)
        values *= scales.reshape(-1, 1).astype(np.float32)
        values = values.astype(dtype).astype(np.float32)
        values += biases.reshape(-1, 1).astype(np.float32)
        return values.reshape(-1).astype(dtype)


def _numbers(weight: np.ndarray, bits: int) -> np.ndarray:
    """Unpack the numbers in uint32 words to float32."""
    packed = weight.view(np.uint8)
    if bits == 8:
        return packed.astype(np.float32)
    if 8 % bits == 0:
        return np.take(_numbers_of_bytes(bits), packed, 0)
    packed = packed.reshape(-1, bits)  # 8 numbers take as many bytes as each of them has bits
    words = np.zeros(len(packed), np.uint64)
    for i in range(bits):
        words |= packed[:, i].astype(np.uint64) << np.uint64(8 * i)
    numbers = np.empty((len(packed), 8), np.float32)
    for i in range(8):
        numbers[:, i] = words >> np.uint64(i * bits) & np.uint64((1 << bits) - 1)
    return numbers


def _numbers_of_bytes(bits: int) -> np.ndarray:
    """Return the numbers of 2 or 4 bits in each byte: float32 [256, 8 / bits]."""
    numbers = np.arange(256)[:, None] >> np.arange(0, 8, bits) & (1 << bits) - 1
    return numbers.astype(np.float32)
