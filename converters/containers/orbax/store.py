"""Reads the zarr arrays of an Orbax item through tensorstore, a band of rows at a time.

tensorstore needs an array's whole chunk in memory, decoded, beside its result, and stock Orbax
makes one chunk of every array. Where such a chunk is large it is decompressed as a stream instead,
if pyarrow is installed.
"""

import dataclasses
import functools
import math
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np

from griffin_eval.converters.containers.orbax.find import MANIFEST, PROCESS
from griffin_eval.converters.containers.orbax.remote import (
    advice,
    context,
    reason,
    shown,
    store_of,
    tensorstore,
    url_of,
)
from griffin_eval.converters.containers.orbax.stream import ChunkStream, Codec, stream_codec
from griffin_eval.converters.tensors import (
    Kept,
    LazyTensor,
    Region,
    Shape,
    numpy_dtype,
    shape_of,
)
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import files_within
from griffin_eval.messages import listed

_STREAMED = 128 << 20  # a chunk of this size is decompressed as a stream
_HEIGHT = 16  # largest height of a B-tree in OCDBT; a higher one is damaged


class Store:
    """The arrays of one item; CheckpointError if the database is damaged or was never completed.

    Attributes:
        ocdbt: Whether they are in an OCDBT database, rather than a folder each.
        driver: ``zarr`` or ``zarr3``.
        sparse: See `Tree`.
    """

    def __init__(self, folder: Path, zarr3: bool, sparse: bool):
        self.folder, self.driver = folder, "zarr3" if zarr3 else "zarr"
        self.sparse = sparse
        self._ts = tensorstore()
        self.ocdbt = (folder / MANIFEST).is_file()
        self._context = self._ts.Context(
            context(
                {
                    "cache_pool": {"total_bytes_limit": 0},
                    "cache_pool#ocdbt": {"total_bytes_limit": 20_000_000},
                    "data_copy_concurrency": {"limit": 2},
                    # Compressed data are then pages of the files, not memory.
                    "file_io_mode": {"mode": "memmap"},
                }
            )
        )
        self._base, self._remote = store_of(folder), url_of(folder) is not None
        if not self.ocdbt and list(folder.glob(f"{PROCESS}*/{MANIFEST}")):
            raise CheckpointError(
                f"{folder}: {MANIFEST} is missing, though processes wrote their parts: the save "
                "was cut off, or the download is incomplete"
            )
        self._stored = self._count_chunks() if self.ocdbt or self._remote else {}
        self._values: dict[str, tuple[Path, int, int]] | None = None

    def open(self, names: list[str]) -> dict[str, LazyTensor]:
        """Open arrays by the names Orbax stores them under; CheckpointError with a list of those
        that are missing, incomplete or damaged."""
        arrays, problems = {}, []
        errors: list[Exception] = []
        futures = {name: self._open(name) for name in names if self._is_safe(name)}
        for name in names:
            if name not in futures:
                errors.append(ValueError(f"{name!r} leads out of the folder"))
                problems.append(str(errors[-1]))
                continue
            try:
                arrays[name] = _tensor(self, name, futures[name].result())
            except (ValueError, OSError, OverflowError) as error:
                errors.append(error)
                problems.append(f"{name!r}: {reason(error)}")
        if problems:
            raise CheckpointError(
                f"{shown(self.folder)}: {len(problems)} of {len(names)} arrays cannot be read: "
                f"{listed(problems)}{advice(*errors)}"
            )
        return arrays

    def places(self, names: Iterable[str]) -> list[str]:
        """Return the names of the folders that hold the arrays of these names."""
        if not self.ocdbt:
            return list(names)
        return ["d", *(path.name for path in self.folder.glob(f"{PROCESS}*"))]

    def chunks_of(self, name: str) -> int:
        """Return the number of chunks of an array that are stored."""
        if self.ocdbt or self._remote:
            return self._stored.get(name, 0)
        entries = (file.name for file in files_within(self.folder / name))
        return sum(entry not in (".zarray", ".zattrs", ".zgroup", "zarr.json") for entry in entries)

    def value(self, key: str) -> tuple[Path, int, int] | None:
        """Return the file, offset and length of the value under a key; None if the value is not in
        a file."""
        if self._remote:
            return None
        if not self.ocdbt:
            path = self.folder / key
            return (path, 0, path.stat().st_size) if path.is_file() else None
        if self._values is None:
            self._values = {}
            file = self._ts.KvStore.open(self._base, context=self._context).result()
            roots = self._ts.ocdbt.dump(file, context=self._context).result()["versions"]
            self._walk(file, roots[-1]["root"]["location"], b"", _HEIGHT)
        return self._values.get(key)

    def _walk(self, file: Any, location: str, prefix: bytes, height: int) -> None:
        """Record the places of the values in a node of the database and in the nodes below it."""
        node = self._ts.ocdbt.dump(file, location, context=self._context).result()
        for entry in node["entries"]:
            key = prefix + bytes(entry.get("key", b""))
            if "indirect_value" in entry:
                # value:<folder>:<file>:<offset>:<length>, ":" and "%" quoted in the two paths
                _, base, path, offset, length = str(entry["indirect_value"]).split(":")
                where = self.folder / (unquote(base) + unquote(path))
                assert self._values is not None
                self._values[key.decode("utf-8", "replace")] = (where, int(offset), int(length))
            elif "location" in entry and height:
                below = prefix + bytes(entry.get("subtree_common_prefix", b""))
                self._walk(file, entry["location"], below, height - 1)

    def _open(self, name: str) -> Any:
        kvstore = {**self._base, "path": f"{self._base['path']}{name}/"}
        if self.ocdbt:
            cache = {"cache_pool": "cache_pool#ocdbt"}
            kvstore = {"driver": "ocdbt", "base": self._base, "path": f"{name}/", **cache}
        spec = {
            "driver": self.driver,
            "kvstore": kvstore,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "fill_missing_data_reads": self.sparse,
        }
        return self._ts.open(spec, context=self._context, open=True, read=True)

    def _is_safe(self, name: str) -> bool:
        return self.ocdbt or not (name.startswith("/") or ".." in name.split("/"))

    def _count_chunks(self) -> dict[str, int]:
        spec = self._base
        if self.ocdbt:
            spec = {"driver": "ocdbt", "base": self._base, "cache_pool": "cache_pool#ocdbt"}
        counts: dict[str, int] = {}
        try:
            keys = self._ts.KvStore.open(spec, context=self._context).result().list().result()
        except (ValueError, OSError) as error:
            what = shown(self.folder / MANIFEST if self.ocdbt else self.folder)
            raise CheckpointError(
                f"{what} cannot be read: {reason(error)}{advice(error)}"
            ) from None
        # "name/0.1" in zarr, "name/c/0/1" in zarr3, whose names may hold "/" as well.
        ending = re.compile(r"/c(/[0-9]+)*" if self.driver == "zarr3" else r"/[0-9.]+")
        for key in keys:
            text = key.decode("utf-8", "replace")
            for match in ending.finditer(text):
                if match.end() == len(text):
                    name = text[: match.start()]
                    counts[name] = counts.get(name, 0) + 1
        return counts


def _tensor(store: Store, name: str, array: Any) -> LazyTensor:
    """Return one array; ValueError, a phrase, if it is larger than any memory, or lacks chunks."""
    shape = tuple(int(n) for n in array.shape)
    item = array.dtype.numpy_dtype.itemsize
    chunk = tuple(int(n) for n in array.chunk_layout.read_chunk.shape or ())
    write = tuple(int(n) for n in array.chunk_layout.write_chunk.shape or ())
    chunk_bytes = math.prod(chunk) * item
    if max(math.prod(shape) * item, chunk_bytes) >= 1 << 48:
        raise ValueError(f"has shape {shape}, larger than any memory")
    count = math.prod(-(-n // c) for n, c in zip(shape, write, strict=True))
    if not store.sparse and (stored := store.chunks_of(name)) < count:
        raise ValueError(f"{count - stored} of its {count} chunks are missing")

    def read(region: Region) -> np.ndarray:
        # tensorstore ends the process without memory for a result and a chunk.
        np.empty(math.prod(shape_of(region)) * item + chunk_bytes, np.uint8)
        return array[region].read().result()

    nbytes = math.prod(shape) * item
    tensor = LazyTensor(shape, str(array.dtype.name), read, grid=chunk, nbytes=nbytes)
    if chunk_bytes < _STREAMED or not shape or 0 in shape:
        return tensor
    return _streamed(tensor, functools.cache(lambda: _chunks(store, name, array, shape, chunk)))


class _Chunks(NamedTuple):
    """The chunks of an array that can be decompressed as a stream: their places and codec."""

    places: list[tuple[Path, int, int]]
    codec: Codec


def _chunks(store: Store, name: str, array: Any, shape: Shape, chunk: Shape) -> _Chunks | None:
    """Return an array's chunks if they split only the first axis, are all stored, and have a codec
    that can be read as a stream; else None."""
    codec = stream_codec(array.spec().to_json()["metadata"])
    if codec is None or not chunk or chunk[1:] != shape[1:]:
        return None
    keys = (codec.key(i, len(shape)) for i in range(-(-shape[0] // chunk[0])))
    places = [store.value(f"{name}/{key}") for key in keys]
    stored = [place for place in places if place is not None]
    return _Chunks(stored, codec) if len(stored) == len(places) else None


def _streamed(tensor: LazyTensor, chunks: Callable[[], _Chunks | None]) -> LazyTensor:
    """Return an array of large chunks with reads of single rows: from a stream for each thread, or,
    if the chunks are no streams, from the last chunk, which is kept for the next rows."""
    assert tensor.grid is not None
    kept, local = Kept(1)(tensor), threading.local()
    height, row_bytes = tensor.grid[0], tensor.nbytes // tensor.shape[0]

    def read(region: Region) -> np.ndarray:
        found, (rows, *others) = chunks(), region
        out = np.empty((rows.stop - rows.start, *tensor.shape[1:]), numpy_dtype(tensor.dtype))
        if found is None:
            for start in range(rows.start - rows.start % height, rows.stop, height):
                begin, end = max(start, rows.start), min(start + height, rows.stop)
                part = kept.read((slice(begin, end), *tensor.whole[1:]))
                out[begin - rows.start : end - rows.start] = part
            return out[(slice(None), *others)]
        stream = getattr(local, "stream", None)
        if stream is None or stream.position > rows.start * row_bytes:
            stream = ChunkStream(found.places, found.codec, height * row_bytes)
        local.stream = None  # set again if this read succeeds
        stream.read_into(out, rows.start * row_bytes)
        local.stream = stream if rows.stop < tensor.shape[0] else None
        return out[(slice(None), *others)]

    return dataclasses.replace(tensor, read=read, grid=None)
