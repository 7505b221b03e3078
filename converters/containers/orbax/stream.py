"""Decompresses large zstd chunks of zarr arrays as streams, so that no chunk is in memory whole.

zstd is pyarrow's; without it there are no streams, and more memory is needed.
"""

import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_SKIP = 1 << 24  # bytes skipped at a time


class Codec(NamedTuple):
    """The naming and the compression of chunks.

    Attributes:
        prefix: Text before the indices in the name of a chunk.
        separator: Separator between the indices.
        shard: Whether a chunk is a shard of zarr3, with a single chunk in it.
    """

    prefix: str
    separator: str
    shard: bool

    def key(self, row: int, rank: int) -> str:
        """Return the name of a chunk of the first column."""
        return self.prefix + self.separator.join([str(row), *"0" * (rank - 1)])


def stream_codec(metadata: dict[str, Any]) -> Codec | None:
    """Return the codec in an array's zarr metadata; None if its chunks are no streams of zstd."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return None
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    if metadata["zarr_format"] == 2:
        compressor = metadata.get("compressor") or {}
        plain = metadata.get("order") == "C" and not metadata.get("filters")
        if compressor.get("id") != "zstd" or not plain or metadata["dtype"][0] == ">":
            return None
        return Codec("", metadata.get("dimension_separator", "."), False)
    encoding, codecs, shard = metadata["chunk_key_encoding"], metadata["codecs"], False
    if encoding["name"] != "default":
        return None
    if len(codecs) == 1 and codecs[0]["name"] == "sharding_indexed":
        inner, shard = codecs[0]["configuration"], True
        outer = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        index = [codec["name"] for codec in inner["index_codecs"]]
        at_end = inner.get("index_location", "end") == "end"
        if inner["chunk_shape"] != outer or index != ["bytes", "crc32c"] or not at_end:
            return None
        codecs = inner["codecs"]
    if len(codecs) != 2 or codecs[0] != little or codecs[1]["name"] != "zstd":
        return None
    separator = encoding.get("configuration", {}).get("separator", "/")
    return Codec(f"c{separator}", separator, shard)


class ChunkStream:
    """The bytes of consecutive chunks, forward only. ``parts`` are file, offset and length of
    every chunk as it is stored, ``chunk_bytes`` the size of every chunk, decompressed, and
    ``position`` the index of the next byte."""

    def __init__(self, parts: list[tuple[Path, int, int]], codec: Codec, chunk_bytes: int):
        self.position = 0
        self._parts, self._codec, self._chunk_bytes = parts, codec, chunk_bytes
        self._source: Any = None

    def read_into(self, out: np.ndarray, start: int) -> None:
        """Fill a contiguous array with the bytes from ``start``, which is not before `position`;
        ValueError or OSError if the data are damaged."""
        chunk = start // self._chunk_bytes
        if chunk > self.position // self._chunk_bytes:  # chunks in between need not be read
            self.position, self._source = chunk * self._chunk_bytes, None
        while self.position < start:
            skipped = np.empty(min(start - self.position, _SKIP), np.uint8)
            self._fill(skipped.data)
        self._fill(out.reshape(-1).view(np.uint8).data)

    def _fill(self, out: memoryview) -> None:
        at = 0
        while at < len(out):
            chunk, within = divmod(self.position, self._chunk_bytes)
            if self._source is None:
                assert within == 0, "a chunk can only be read from its beginning"
                self._source = self._open(*self._parts[chunk])
            count = self._source.readinto(out[at : at + self._chunk_bytes - within])
            if not count:
                raise ValueError(f"a chunk ends after {within} of {self._chunk_bytes} bytes")
            at += count
            self.position += count
            if self.position % self._chunk_bytes == 0:
                self._source = None

    def _open(self, path: Path, offset: int, length: int) -> Any:
        import pyarrow

        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            if not length or not 0 <= offset <= size - length:
                raise ValueError(f"{path.name} has {size} bytes, expected {offset + length}")
            data = memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
        data = data[offset : offset + length]
        if self._codec.shard:
            # At the end of a shard: offset and length of the chunk in it, and a checksum.
            begin, size = (int.from_bytes(data[i : i + 8], "little") for i in (-20, -12))
            if len(data) < 20 or begin + size > len(data) - 20:
                raise ValueError(f"{path.name}: the index of a shard leads out of it")
            data = data[begin : begin + size]
        return pyarrow.CompressedInputStream(pyarrow.BufferReader(pyarrow.py_buffer(data)), "zstd")
