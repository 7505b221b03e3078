"""bitsandbytes' nf4, fp4 and int8, as transformers saves them in safetensors.

4 bits: ``weight`` holds two elements a byte, the first one in the upper half; ``weight.absmax`` the
scale of each block of elements; ``weight.quant_state.bitsandbytes__nf4`` JSON as bytes. With double
quantisation the scales are numbers of 8 bits in ``weight.nested_quant_map``, times the scales of
their blocks in ``weight.nested_absmax``, plus an offset. 8 bits: ``weight`` is int8 and ``SCB`` the
largest magnitude of each row. What bitsandbytes computes is computed here, in the same order: all
products in float32, rounded once to the dtype that the state names.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from griffin_eval.converters.containers.safetensors.reader import CODES
from griffin_eval.converters.quantised import (
    PackedRows,
    Quantised,
    bits_of,
    dequantised,
)
from griffin_eval.converters.tensors import (
    FLOATS,
    MAX_DIMENSIONS,
    LazyTensor,
    are_naturals,
    contiguous,
)
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import parse_json
from griffin_eval.messages import DAMAGED, brief, listed

# Values of the 4-bit codes 0 to 15; fp4's are multiplied by 12.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (*(0, 0.0625, 8, 12, 4, 6, 2, 3), *(-0.0, -0.0625, -8, -12, -4, -6, -2, -3))
_STATE = "quant_state.bitsandbytes__"
_PART = re.compile(r"(.+)\.(?:quant_state\..*|absmax|quant_map|nested_absmax|nested_quant_map)")
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # elements; the sizes that bitsandbytes knows
_MAX_STATE = 10_000  # bytes
_NESTED = "nested_absmax", "nested_quant_map"


Tensors = Mapping[str, LazyTensor]


def decoded(tensors: Tensors) -> dict[str, LazyTensor]:
    """Replace the parts of each parameter that bitsandbytes quantised by the dequantised parameter;
    CheckpointError for parts that are incomplete or contradict each other."""
    parameters: dict[str, LazyTensor] = {}
    used: set[str] = set()
    problems: list[str] = []
    of_4_bits = dict.fromkeys(m[1] for name in tensors if (m := _PART.fullmatch(name)))
    of_8_bits = [name.removesuffix("SCB") + "weight" for name in tensors if _is_scale(name)]
    for names, read in ((of_4_bits, _read_4_bits), (of_8_bits, _read_8_bits)):
        for name in names:
            try:
                parameters[name], parts = read(tensors, name)
                used.update(parts)
            except ValueError as error:
                problems.append(f"{name!r} {error}")
    if problems:
        raise CheckpointError(
            f"{len(problems)} parameters that bitsandbytes quantised cannot be read: "
            f"{listed(problems)}; {DAMAGED}"
        )
    return {name: t for name, t in tensors.items() if name not in used} | parameters


def _is_scale(name: str) -> bool:
    return name == "SCB" or name.endswith(".SCB")


def _read_4_bits(tensors: Tensors, name: str) -> tuple[LazyTensor, list[str]]:
    """Return a parameter stored in 4 bits, and the names of its parts; ValueError, a phrase that
    follows the parameter's name, if it cannot be read."""
    states = {kind: f"{name}.{_STATE}{kind}" for kind in ("nf4", "fp4")}
    kinds = [kind for kind, state in states.items() if state in tensors]
    if len(kinds) != 1:
        raise ValueError(f"has {len(kinds)} of the states {listed(states.values())}, expected one")
    (kind,) = kinds
    if (nbytes := tensors[states[kind]].nbytes) > _MAX_STATE:
        raise ValueError(f"has a state of {nbytes} bytes, expected {_MAX_STATE} at most")
    try:
        state = parse_json(_bytes(tensors[states[kind]]))
    except ValueError as error:
        raise ValueError(f"has a state that is {error}, expected a JSON object") from None
    shape, dtype, block = (state.get(key) for key in ("shape", "dtype", "blocksize"))
    if state.get("quant_type") != kind:
        raise ValueError(f"has quant_type {brief(state.get('quant_type'))}, expected {kind!r}")
    if not are_naturals(shape) or not 0 < len(shape) <= MAX_DIMENSIONS:
        raise ValueError(f"has a state with shape {brief(shape)}")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"has a state with dtype {brief(dtype)}")
    if type(block) is not int or block not in _BLOCKS:
        raise ValueError(f"has blocksize {brief(block)}, expected one of {brief(_BLOCKS)}")
    size = math.prod(shape)
    blocks = -(-size // block)
    if name not in tensors or tensors[name].nbytes != (size + 1) // 2:
        found = f"{tensors[name].nbytes} bytes" if name in tensors else "no weight"
        raise ValueError(f"has {found}, but shape {tuple(shape)} needs {(size + 1) // 2} bytes")
    if math.prod(tensors[name].shape[1:]) != 1:
        raise ValueError(f"is {tensors[name].shape}, expected packed elements, (…, 1)")
    nested = any(f"{name}.{part}" in tensors for part in _NESTED)
    expect = {"absmax": ("U8" if nested else "float32", blocks), "quant_map": ("float32", 16)}
    nested_block, offset = _nested(state) if nested else (1, 0.0)
    if nested:
        expect["nested_absmax"] = "float32", -(-blocks // nested_block)
        expect["nested_quant_map"] = "float32", 256
    for part, (kept_as, length) in expect.items():
        tensor = tensors.get(f"{name}.{part}")
        if tensor is None:
            raise ValueError(f"lacks its {part!r}")
        if (_code(tensor), tensor.shape) != (kept_as, (length,)):
            raise ValueError(
                f"has {part!r} of {tensor.dtype}, {tensor.shape}, expected {kept_as}, ({length},)"
            )
    (stated,) = tensors[f"{name}.quant_map"].pieces()
    if not np.allclose(stated, code_of(kind), rtol=1e-5, atol=1e-6):
        raise ValueError(f"has a quant_map that is not that of {kind}")
    parts = [name, states[kind], *(f"{name}.{part}" for part in expect)]
    stored, absmax, pairs = tensors[name], tensors[f"{name}.absmax"], pairs_of(code_of(kind))
    # Packed bytes may be stored under any dtype: other code moves only some dtypes.
    width = max(1, stored.nbytes // max(1, math.prod(stored.shape)))

    def scales_of(start: int, stop: int) -> np.ndarray:
        scales = absmax.rows(start, stop)
        if not nested:
            return scales
        first = start // nested_block
        above = tensors[f"{name}.nested_absmax"].rows(first, -(-stop // nested_block))
        code = tensors[f"{name}.nested_quant_map"].numpy()
        with np.errstate(all="ignore"):
            above = above[np.arange(start, stop) // nested_block - first]
            return code[scales] * above + np.float32(offset)

    def values(first: int, last: int) -> np.ndarray:
        count = min(last * block, size) - first * block
        begin = first * block // 2  # a byte: a block has an even number of elements
        end = begin + (count + 1) // 2
        rows = stored.rows(begin // width, -(-end // width))
        packed = contiguous(rows).reshape(-1).view(np.uint8)[begin % width :][: end - begin]
        return dequantised_4_bits(packed, count, scales_of(first, last), block, pairs)

    def packed_rows() -> PackedRows | None:
        if len(shape) != 2 or shape[1] % 2 or not size:  # no matrix of whole bytes
            return None
        rows, columns = shape
        packed = contiguous(stored.numpy()).reshape(-1).view(np.uint8).reshape(rows, -1)
        # Blocks go on from one row into the next where they do not divide it.
        shared = math.gcd(columns, block)
        scales = scales_of(0, blocks)
        if shared < block:
            scales = np.repeat(scales, block // shared)[: size // shared]
        return PackedRows(4, packed, scales.reshape(rows, -1), table=pairs)

    scheme = f"bitsandbytes {kind} in blocks of {block}{', scales in 8 bits' * nested}"
    bits = bits_of(sum(tensors[part].nbytes for part in parts), tuple(shape))
    facts = Quantised("bitsandbytes", scheme, bits, packed_rows)
    return dequantised(tuple(shape), dtype, block, values, facts), parts


def _nested(state: dict[str, Any]) -> tuple[int, float]:
    """Return the number of scales in a block, and the offset added to all scales."""
    block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(block) is not int or block not in _BLOCKS:
        raise ValueError(f"has nested_blocksize {brief(block)}, expected one of {brief(_BLOCKS)}")
    if type(offset) is not float or not abs(offset) < 1e38:
        raise ValueError(f"has nested_offset {brief(offset)}, expected a finite number")
    if state.get("nested_dtype") != "float32":
        raise ValueError(f"has nested_dtype {brief(state.get('nested_dtype'))}, expected 'float32'")
    return block, offset


def _code(tensor: LazyTensor) -> str:
    """Return the name of a dtype: safetensors' for integers, numpy's for floats."""
    return tensor.dtype if tensor.dtype in FLOATS else CODES.get(tensor.dtype, tensor.dtype)


def _read_8_bits(tensors: Tensors, name: str) -> tuple[LazyTensor, list[str]]:
    """Return a parameter stored in 8 bits, and the names of its parts; ValueError, a phrase that
    follows the parameter's name, if it cannot be read."""
    module = name.removesuffix("weight")
    weight, scale = tensors.get(name), tensors[f"{module}SCB"]
    if weight is None or _code(weight) != "I8" or len(weight.shape) != 2:
        found = "is not there" if weight is None else f"is {weight.dtype}, {weight.shape}"
        raise ValueError(f"{found}, but has an SCB: expected a matrix of I8")
    if (scale.dtype, scale.shape) != ("float32", weight.shape[:1]):
        raise ValueError(
            f"has SCB of {scale.dtype}, {scale.shape}, expected float32, {weight.shape[:1]}"
        )
    parts = [name, f"{module}SCB"]
    if (format := f"{module}weight_format") in tensors:
        parts.append(format)
        stated = _bytes(tensors[format]) if tensors[format].nbytes < 10 else b""
        if any(stated) or not stated:  # 0: rows; other numbers: tiles of some devices
            raise ValueError(f"has weight_format {brief(stated)}, and only rows (0) are read")
    row = weight.shape[1]

    def values(first: int, last: int) -> np.ndarray:
        return dequantised_8_bits(weight.rows(first, last), scale.rows(first, last)).reshape(-1)

    def packed_rows() -> PackedRows | None:
        return PackedRows(8, weight.numpy(), scale.numpy()[:, None]) if weight.nbytes else None

    bits = bits_of(sum(tensors[part].nbytes for part in parts), weight.shape)
    facts = Quantised("bitsandbytes", "bitsandbytes int8", bits, packed_rows)
    return dequantised(weight.shape, "float32", row, values, facts), parts


def _bytes(tensor: LazyTensor) -> bytes:
    (values,) = tensor.pieces(max(1, tensor.nbytes))
    return values.tobytes()


def code_of(kind: str) -> np.ndarray:
    """Return the values of the numbers from 0 to 15 of ``"nf4"`` or ``"fp4"``: float32 [16]."""
    if kind == "nf4":
        return np.array(_NF4, np.float32)
    return np.array(_FP4, np.float32) / np.float32(12)


def pairs_of(code: np.ndarray) -> np.ndarray:
    """Return, by byte, the values of its two elements: float32 [256, 2]."""
    return np.stack([np.repeat(code, 16), np.tile(code, 16)], 1)


def dequantised_4_bits(
    packed: np.ndarray, size: int, scales: np.ndarray, block: int, pairs: np.ndarray
) -> np.ndarray:
    """Return ``size`` elements of 4 bits in float32: ``packed``, uint8 [(size + 1) // 2], begins
    with a block, and ``scales`` is float32, one for each block; ``pairs`` are from `pairs_of`."""
    values = np.take(pairs, packed, 0).reshape(-1)[:size]
    whole = size // block
    with np.errstate(all="ignore"):
        values[: whole * block].reshape(whole, block)[:] *= scales[:whole, None]
        if size > whole * block:
            values[whole * block :] *= scales[whole]
    return values


def dequantised_8_bits(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return int8 [R, C] with the largest magnitude of each row, in float32."""
    values = numbers.astype(np.float32)
    with np.errstate(all="ignore"):
        values *= scales[:, None]
        values *= np.float32(7.874015718698502e-3)  # 1 / 127, as bitsandbytes writes it
    return values
