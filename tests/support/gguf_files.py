"""GGUF files as candle and the gguf library write them."""

import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
TYPES = gguf.GGMLQuantizationType
PLAIN = {"F16": np.float16, "F32": np.float32, "F64": np.float64, "BF16": np.uint16}


def dequantisable() -> list[str]:
    """Return the names of the block types that the library dequantises."""
    names = []
    for kind, (block, nbytes) in gguf.GGML_QUANT_SIZES.items():
        if block > 1:
            try:
                gguf.quants.dequantize(np.zeros((1, nbytes), np.uint8), kind)
                names.append(kind.name)
            except NotImplementedError:
                continue
    return names


class Stored(NamedTuple):
    """A stored tensor: its shape, type and bytes."""

    shape: tuple[int, ...]
    type: str
    data: bytes

    @property
    def values(self) -> np.ndarray:
        """The values that the library dequantises, in float32."""
        block, nbytes = gguf.GGML_QUANT_SIZES[TYPES[self.type]]
        rows = np.frombuffer(self.data, np.uint8).reshape(*self.shape[:-1], -1)
        with np.errstate(all="ignore"):
            found = gguf.quants.dequantize(rows, TYPES[self.type])
        return found.reshape(self.shape)


def random_blocks(shape: tuple[int, ...], kind: str, seed: int, finite: bool = False) -> Stored:
    """Return a tensor of random bytes, or with ``finite`` of random blocks with small values."""
    block, nbytes = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape)) // block
    blocks = rng.integers(0, 256, (count, nbytes), np.uint8)
    if finite:
        pool = _small(kind)
        blocks = pool[rng.integers(0, len(pool), count)]
    return Stored(shape, kind, blocks.tobytes())


@cache
def _small(kind: str) -> np.ndarray:
    """Return random blocks whose largest absolute value is between 0.01 and 0.5."""
    _, nbytes = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    pool = np.random.default_rng(0).integers(0, 256, (2000, nbytes), np.uint8)
    with np.errstate(all="ignore"):
        size = np.abs(gguf.quants.dequantize(pool, TYPES[kind])).max(1)
    return pool[(size < 0.5) & (size > 0.01)]  # also excludes NaN


def stored(array: np.ndarray, kind: str) -> Stored:
    """Quantise an array to a type that the library supports."""
    return Stored(array.shape, kind, gguf.quants.quantize(array, TYPES[kind]).tobytes())


def candle(tensors: Mapping[str, np.ndarray], kind: str, seed: int = 0) -> dict[str, Stored]:
    """Quantise tensors as candle's tensor-tools do, in random order.

    Tensors with two axes (also the gates' biases) whose rows are whole blocks get the type
    ``kind``, with random values if the library cannot quantise to it. All others are F32.
    """
    block = gguf.GGML_QUANT_SIZES[TYPES[kind]][0]
    names = list(tensors)
    np.random.default_rng(seed).shuffle(names)
    found = {}
    for i, name in enumerate(names):
        array = np.ascontiguousarray(tensors[name], np.float32)
        if array.ndim != 2 or array.shape[1] % block:
            found[name] = stored(array, "F32")
            continue
        try:
            found[name] = stored(array, kind)
        except NotImplementedError:
            found[name] = random_blocks(array.shape, kind, seed + i, finite=True)
    return found


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(name: str | bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """Return a tensor's entry in the header, with its axes in reverse."""
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return string(name) + axes + struct.pack("<IQ", kind, offset)


def header(
    entries: list[bytes],
    metadata: list[bytes] = [],  # noqa: B006  (read only)
    *,
    version: int = 2,
    counts: tuple[int, int] | None = None,
) -> bytes:
    counts = counts or (len(entries), len(metadata))
    return struct.pack("<4sIQQ", b"GGUF", version, *counts) + b"".join(metadata + entries)


def padded(data: bytes, to: int = 32) -> bytes:
    return data + bytes(-len(data) % to)


def write_candle(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write the same bytes as candle's ``gguf_file::write``: version 2, no metadata."""
    entries, data = [], b""
    for name, tensor in tensors.items():
        entries.append(entry(name, tensor.shape, TYPES[tensor.type], len(data)))
        data += padded(tensor.data)
    path.write_bytes(padded(header(entries)) + data)


def write_gguf(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write a file with the library's writer: version 3, some metadata, another alignment."""
    writer = gguf.GGUFWriter(path, "recurrent-gemma")
    writer.add_custom_alignment(64)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<pad>", "<eos>", "<bos>"])
    writer.add_array("griffin.numbers", [1, 2, 3])
    for name, tensor in tensors.items():
        if tensor.type in PLAIN and tensor.type != "BF16":
            writer.add_tensor(
                name, np.frombuffer(tensor.data, PLAIN[tensor.type]).reshape(tensor.shape)
            )
        else:
            rows = np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape[:-1], -1)
            writer.add_tensor(name, rows, raw_dtype=TYPES[tensor.type])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
