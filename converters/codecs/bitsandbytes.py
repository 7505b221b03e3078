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
from typing import TYPE_CHECKING, Any

from griffin_eval.converters.arrays.dtypes import numpy_dtype
from griffin_eval.converters.arrays.shapes import MAX_DIMENSIONS, are_naturals
from griffin_eval.converters.codecs.quantised import Decoding, PackedRows, Quantised
from griffin_eval.converters.containers.container import Container
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import parse_json
from griffin_eval.messages import DAMAGED, brief, listed

if TYPE_CHECKING:
    import numpy as np

# The values of the numbers from 0 to 15; those of fp4 are multiplied by 12.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (*(0, 0.0625, 8, 12, 4, 6, 2, 3), *(-0.0, -0.0625, -8, -12, -4, -6, -2, -3))
_STATE = "quant_state.bitsandbytes__"
_PART = re.compile(r"(.+)\.(?:quant_state\..*|absmax|quant_map|nested_absmax|nested_quant_map)")
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # elements; what bitsandbytes knows
_MAX_STATE = 10_000  # bytes
_NESTED = "nested_absmax", "nested_quant_map"


def find(container: Container) -> Decoding | None:
    """The parameters that bitsandbytes has quantised, or None if there are none.

    Raises:
        CheckpointError: parts that lack others, or contradict them.
    """
    tensors = container.tensors
    parameters: dict[str, Quantised] = {}
    problems: list[str] = []
    of_4_bits = dict.fromkeys(m[1] for name in tensors if (m := _PART.fullmatch(name)))
    of_8_bits = [name.removesuffix("SCB") + "weight" for name in tensors if _is_scale(name)]
    for names, read in ((of_4_bits, _read_4_bits), (of_8_bits, _read_8_bits)):
        for name in names:
            try:
                parameters[name] = read(container, name)
            except ValueError as error:
                problems.append(f"{name!r} {error}")
    if problems:
        raise CheckpointError(
            f"{len(problems)} parameters that bitsandbytes quantised cannot be read: "
            f"{listed(problems)}; {DAMAGED}"
        )
    return Decoding("bitsandbytes", parameters) if parameters else None


def _is_scale(name: str) -> bool:
    return name == "SCB" or name.endswith(".SCB")


def _read_4_bits(container: Container, name: str) -> Quantised:
    """A parameter in 4 bits; ValueError, a phrase that follows its name, if it cannot be read."""
    tensors = container.tensors
    states = {kind: f"{name}.{_STATE}{kind}" for kind in ("nf4", "fp4")}
    kinds = [kind for kind, state in states.items() if state in tensors]
    if len(kinds) != 1:
        raise ValueError(f"has {len(kinds)} of the states {listed(states.values())}, expected one")
    (kind,) = kinds
    if (nbytes := tensors[states[kind]].nbytes) > _MAX_STATE:
        raise ValueError(f"has a state of {nbytes} bytes, expected {_MAX_STATE} at most")
    try:
        state = parse_json(_bytes(container, states[kind]))
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
    nested_block = offset = 0
    expect = {"absmax": ("U8" if nested else "float32", blocks), "quant_map": ("float32", 16)}
    if nested:
        nested_block, offset = _nested(state)
        expect["nested_absmax"] = "float32", -(-blocks // nested_block)
        expect["nested_quant_map"] = "float32", 256
    for part, (kept_as, length) in expect.items():
        tensor = tensors.get(f"{name}.{part}")
        if tensor is None:
            raise ValueError(f"lacks its {part!r}")
        if (tensor.dtype, tensor.shape) != (kept_as, (length,)):
            raise ValueError(
                f"has {part!r} of {tensor.dtype}, {tensor.shape}, expected {kept_as}, ({length},)"
            )
    parameter = _FourBits(container, name, tuple(shape), dtype, kind, block, nested_block, offset)
    parameter.check_map()
    return parameter


def _nested(state: dict[str, Any]) -> tuple[int, float]:
    """The elements of a block of scales, and what is added to all of them."""
    block, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(block) is not int or block not in _BLOCKS:
        raise ValueError(f"has nested_blocksize {brief(block)}, expected one of {brief(_BLOCKS)}")
    if type(offset) is not float or not abs(offset) < 1e38:
        raise ValueError(f"has nested_offset {brief(offset)}, expected a finite number")
    if state.get("nested_dtype") != "float32":
        raise ValueError(f"has nested_dtype {brief(state.get('nested_dtype'))}, expected 'float32'")
    return block, offset


def _read_8_bits(container: Container, name: str) -> Quantised:
    """The same of a parameter in 8 bits."""
    tensors, module = container.tensors, name.removesuffix("weight")
    weight, scale = tensors.get(name), tensors[f"{module}SCB"]
    if weight is None or weight.dtype != "I8" or len(weight.shape) != 2:
        found = "is not there" if weight is None else f"is {weight.dtype}, {weight.shape}"
        raise ValueError(f"{found}, but has an SCB: expected a matrix of I8")
    if (scale.dtype, scale.shape) != ("float32", weight.shape[:1]):
        raise ValueError(
            f"has SCB of {scale.dtype}, {scale.shape}, expected float32, {weight.shape[:1]}"
        )
    parts = [name, f"{module}SCB"]
    if (format := f"{module}weight_format") in tensors:
        parts.append(format)
        values = _bytes(container, format) if tensors[format].nbytes < 10 else b""
        if any(values) or not values:  # 0: by rows; others are tiles of some devices
            raise ValueError(f"has weight_format {brief(values)}, and only rows (0) are read")
    return _EightBits(container, weight.shape, tuple(parts))


def _bytes(container: Container, name: str) -> bytes:
    (values,) = container.pieces(name, max(1, container.tensors[name].nbytes))
    return values.tobytes()


class _FourBits(Quantised):
    """A parameter of which each element is a number of 4 bits.

    Args:
        container: that holds it.
        name, shape, dtype: its own.
        kind: ``"nf4"`` or ``"fp4"``.
        block: elements that have a scale in common.
        nested_block: scales that have a scale in common; 0 if scales are not quantised.
        offset: what is added to scales that are quantised.
    """

    def __init__(
        self,
        container: Container,
        name: str,
        shape: tuple[int, ...],
        dtype: str,
        kind: str,
        block: int,
        nested_block: int,
        offset: float,
    ):
        parts = ["absmax", "quant_map", f"{_STATE}{kind}"]
        scheme = f"bitsandbytes {kind} in blocks of {block}"
        if nested_block:
            parts += _NESTED
            scheme += ", scales in 8 bits"
        names = (name, *(f"{name}.{part}" for part in parts))
        super().__init__(shape, dtype, scheme, names)
        self._container, self._name, self._kind = container, name, kind
        self._block, self._nested_block, self._offset = block, nested_block, offset
        # The packed bytes may be stored as elements of any dtype, so that other code moves them.
        self._width = container.numpy(name).itemsize
        self._pairs: np.ndarray | None = None

    def check_map(self) -> None:
        """ValueError if the file states other values of the 16 numbers than bitsandbytes has."""
        import numpy as np

        (stated,) = self._container.pieces(f"{self._name}.quant_map")
        if not np.allclose(stated, code_of(self._kind), rtol=1e-5, atol=1e-6):
            raise ValueError(f"has a quant_map that is not that of {self._kind}")

    def packed_rows(self) -> PackedRows | None:
        import numpy as np

        if len(self.shape) != 2 or self.shape[1] % 2 or not self.size:
            return None
        rows, columns = self.shape
        elements = np.ascontiguousarray(self._container.numpy(self._name)).reshape(-1)
        # Blocks go on from one row into the next where they do not divide it.
        shared = math.gcd(columns, self._block)
        scales = self._scales(0, -(-self.size // self._block))
        if shared < self._block:
            scales = np.repeat(scales, self._block // shared)[: self.size // shared]
        packed = elements.view(np.uint8).reshape(rows, -1)
        table = pairs_of(code_of(self._kind))
        return PackedRows(4, packed, scales.reshape(rows, -1), table=table)

    def values(self, start: int, stop: int) -> "np.ndarray":
        import numpy as np

        if self._pairs is None:
            self._pairs = pairs_of(code_of(self._kind))
        block = self._block
        first = start // block * block
        last = min(-(-stop // block) * block, self.size)
        begin, end = first // 2, (last + 1) // 2  # bytes: a block has an even number of elements
        stored = self._container.slice(self._name, begin // self._width, -(-end // self._width))
        flat = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        packed = flat[begin % self._width :][: end - begin]
        scales = self._scales(first // block, -(-last // block))
        values = dequantised_4_bits(packed, last - first, scales, block, self._pairs)
        with np.errstate(all="ignore"):  # what is not finite is counted later
            return values[start - first : stop - first].astype(numpy_dtype(self.dtype), copy=False)

    def _scales(self, start: int, stop: int) -> "np.ndarray":
        """The scales of some blocks."""
        import numpy as np

        stored = self._container.slice(f"{self._name}.absmax", start, stop)
        if not self._nested_block:
            return stored
        (code,) = self._container.pieces(f"{self._name}.nested_quant_map")
        block = self._nested_block
        first = start // block
        scales = self._container.slice(f"{self._name}.nested_absmax", first, -(-stop // block))
        with np.errstate(all="ignore"):
            scaled = code[stored] * scales[np.arange(start, stop) // block - first]
            return scaled + np.float32(self._offset)


class _EightBits(Quantised):
    """A matrix of int8, and the largest magnitude of each of its rows."""

    def __init__(self, container: Container, shape: tuple[int, ...], parts: tuple[str, ...]):
        super().__init__(shape, "float32", "bitsandbytes int8", parts)
        self._container = container

    def packed_rows(self) -> PackedRows | None:
        if not self.size:
            return None
        weight, scale, *_ = self.parts
        numbers, scales = self._container.numpy(weight), self._container.numpy(scale)
        return PackedRows(8, numbers, scales[:, None])

    def values(self, start: int, stop: int) -> "np.ndarray":
        weight, scale, *_ = self.parts
        row = self.shape[1]
        first, last = start // row, -(-stop // row)
        numbers = self._container.slice(weight, first, last)
        values = dequantised_8_bits(numbers, self._container.slice(scale, first, last))
        return values.reshape(-1)[start - first * row : stop - first * row]


def code_of(kind: str) -> "np.ndarray":
    """The values of the numbers from 0 to 15 of ``"nf4"`` or ``"fp4"``: float32 [16]."""
    import numpy as np

    if kind == "nf4":
        return np.array(_NF4, np.float32)
    return np.array(_FP4, np.float32) / np.float32(12)


def pairs_of(code: "np.ndarray") -> "np.ndarray":
    """By byte, the values of its two elements: float32 [256, 2]."""
    import numpy as np

    return np.stack([np.repeat(code, 16), np.tile(code, 16)], 1)


def dequantised_4_bits(
    packed: "np.ndarray", size: int, scales: "np.ndarray", block: int, pairs: "np.ndarray"
) -> "np.ndarray":
    """Elements of 4 bits in float32.

    Args:
        packed: uint8 [(size + 1) // 2], which begins with a block.
        size: number of elements.
        scales: float32, one for each block.
        block: elements of a block.
        pairs: from `pairs_of`.
    """
    import numpy as np

    values = np.take(pairs, packed, 0).reshape(-1)[:size]
    whole = size // block
    with np.errstate(all="ignore"):
        values[: whole * block].reshape(whole, block)[:] *= scales[:whole, None]
        if size > whole * block:
            values[whole * block :] *= scales[whole]
    return values


def dequantised_8_bits(numbers: "np.ndarray", scales: "np.ndarray") -> "np.ndarray":
    """int8 [R, C] with the largest magnitude of each row, in float32."""
    import numpy as np

    values = numbers.astype(np.float32)
    with np.errstate(all="ignore"):
        values *= scales[:, None]
        values *= np.float32(7.874015718698502e-3)  # 1 / 127, as bitsandbytes writes it
    return values
