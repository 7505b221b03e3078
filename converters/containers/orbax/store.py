"""Reads the zarr arrays of an Orbax item through tensorstore, a band of rows at a time.

tensorstore needs an array's whole chunk in memory, decoded, beside its result, and stock Orbax
makes one chunk of every array. Where such a chunk is large it is decompressed as a stream instead,
if pyarrow is installed.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from griffin_eval.converters.arrays.grid import Region
from griffin_eval.converters.containers.orbax.find import MANIFEST, PROCESS
from griffin_eval.converters.containers.orbax.library import advice, reason, tensorstore
from griffin_eval.converters.containers.orbax.remote import context, shown, store_of, url_of
from griffin_eval.converters.containers.orbax.stream import ChunkStream, stream_codec
from griffin_eval.errors import CheckpointError
from griffin_eval.json_files import files_within
from griffin_eval.messages import listed

if TYPE_CHECKING:
    import numpy as np

_STREAMED = 128 << 20  # a chunk of this size is decompressed as a stream
_HEIGHT = 16  # of a tree in OCDBT; beyond it, it is damaged


class Store:
    """The arrays of one item.

    Attributes:
        folder: the item's.
        ocdbt: whether they are in an OCDBT database, rather than a folder each.
        driver: ``zarr`` or ``zarr3``.
        sparse: as of `Tree`.

    Raises:
        CheckpointError: the database is damaged or was never completed.
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

    def open(self, names: list[str]) -> "dict[str, StoredArray]":
        """Opens arrays by the names Orbax stores them under.

        Raises:
            CheckpointError: listing those that are missing, incomplete or damaged.
        """
        arrays, problems = {}, []
        errors: list[Exception] = []
        futures = {name: self._open(name) for name in names if self._is_safe(name)}
        for name in names:
            if name not in futures:
                errors.append(ValueError(f"{name!r} leads out of the folder"))
                problems.append(str(errors[-1]))
                continue
            try:
                arrays[name] = StoredArray(self, name, futures[name].result())
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
        """The names of the folders that hold the arrays of these names."""
        if not self.ocdbt:
            return list(names)
        return ["d", *(path.name for path in self.folder.glob(f"{PROCESS}*"))]

    def chunks_of(self, name: str) -> int:
        """The number of chunks of an array that are stored."""
        if self.ocdbt or self._remote:
            return self._stored.get(name, 0)
        entries = (file.name for file in files_within(self.folder / name))
        return sum(entry not in (".zarray", ".zattrs", ".zgroup", "zarr.json") for entry in entries)

    def value(self, key: str) -> tuple[Path, int, int] | None:
        """File, offset and length of what is stored under a key; None where it is not a file's."""
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
        """Notes where the values of a node of the database, and of those below it, are."""
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


class StoredArray:
    """One array; rows are entries of its first axis.

    Attributes:
        shape: shape of the array.
        dtype: numpy's name of its dtype, such as ``bfloat16``.

    Raises:
        ValueError: a phrase; it is larger than any memory, or some of its chunks are missing.
    """

    def __init__(self, store: Store, name: str, array: Any):
        self._store, self._name, self._array = store, name, array
        self.shape = tuple(int(n) for n in array.shape)
        self.dtype = str(array.dtype.name)
        item = array.dtype.numpy_dtype.itemsize
        self._chunk = tuple(int(n) for n in array.chunk_layout.read_chunk.shape or ())
        write = tuple(int(n) for n in array.chunk_layout.write_chunk.shape or ())
        self._chunk_bytes = math.prod(self._chunk) * item
        if max(math.prod(self.shape) * item, self._chunk_bytes) >= 1 << 48:
            raise ValueError(f"has shape {self.shape}, larger than any memory")
        count = math.prod(-(-n // c) for n, c in zip(self.shape, write, strict=True))
        if not store.sparse and (stored := store.chunks_of(name)) < count:
            raise ValueError(f"{count - stored} of its {count} chunks are missing")
        self._stream: ChunkStream | None = None
        self._ahead: tuple[int, int, Any] | None = None  # rows, and the future that reads them
        self._held: tuple[int, np.ndarray] | None = None  # first row of a chunk, and the chunk
        self._row_bytes = math.prod(self.shape[1:]) * item

    def rows(self, nbytes: int) -> int:
        """The number of rows to read at once, for pieces of ``nbytes``; whole chunks, if small."""
        rows = max(1, nbytes // max(1, self._row_bytes))
        if self._chunk and self._chunk_bytes < _STREAMED:
            rows = -(-rows // self._chunk[0]) * self._chunk[0]
        return rows

    def whole(self) -> "np.ndarray":
        """All of it.

        Raises:
            ValueError, OSError, MemoryError: it is damaged or too large.
        """
        if self._chunk_bytes >= _STREAMED and self._streamed(0):
            try:
                return self.read(0, self.shape[0])
            finally:
                self.release()
        self._check_memory(self.shape)
        return self._array.read().result()

    def read(self, start: int, stop: int) -> "np.ndarray":
        """Rows of the array; consecutive rows are read fastest.

        Raises:
            ValueError, OSError, MemoryError: it is damaged or too large.
        """
        import numpy as np

        shape = (stop - start, *self.shape[1:])
        if self._chunk_bytes < _STREAMED:
            self._check_memory(shape)
            ahead, self._ahead = self._ahead, None
            if ahead is not None and ahead[:2] == (start, stop):
                future = ahead[2]
            else:
                future = self._array[start:stop].read()
            if stop < self.shape[0]:  # while this one is used
                after = min(stop + stop - start, self.shape[0])
                self._ahead = (stop, after, self._array[stop:after].read())
            return future.result()
        out = np.empty(shape, self._array.dtype.numpy_dtype)
        if stream := self._streamed(start):
            stream.read_into(out, start * out[:1].nbytes)
            return out
        # Nothing but whole chunks can be read, and one is kept for the rows that come next.
        step = self._chunk[0]
        for band in range(start - start % step, stop, step):
            if self._held is None or self._held[0] != band:
                self._held = None
                end = min(band + step, self.shape[0])
                self._check_memory((end - band, *self.shape[1:]))
                self._held = (band, self._array[band:end].read().result())
            rows = self._held[1][max(start - band, 0) : stop - band]
            at = max(start, band) - start
            out[at : at + len(rows)] = rows
        return out

    def part(self, part: Region) -> "np.ndarray":
        """A part of the array, a slice of each dimension.

        Raises:
            ValueError, OSError, MemoryError: it is damaged or too large.
        """
        if self._chunk_bytes >= _STREAMED:  # rows in one chunk, or few
            rows, *others = part
            return self.read(rows.start, rows.stop)[:, *others]
        self._check_memory(tuple(cut.stop - cut.start for cut in part))
        return self._array[part].read().result()

    def release(self) -> None:
        """Forgets what was read ahead."""
        self._ahead = self._stream = self._held = None

    def _check_memory(self, shape: tuple[int, ...]) -> None:
        """Asks for the memory of a result and a chunk: tensorstore ends the process without it."""
        import numpy as np

        dtype = self._array.dtype.numpy_dtype
        np.empty(math.prod(shape) * dtype.itemsize + self._chunk_bytes, np.uint8)

    def _streamed(self, start: int) -> "ChunkStream | None":
        row = self._chunk_bytes // self._chunk[0] if self._chunk else 0
        if self._stream is None or self._stream.position > start * row:
            self._stream = self._open_stream()
        return self._stream

    def _open_stream(self) -> ChunkStream | None:
        """A stream over the chunks, if they are one below the other and plain enough."""
        codec = stream_codec(self._array.spec().to_json()["metadata"])
        if codec is None or not self._chunk or self._chunk[1:] != self.shape[1:]:
            return None
        keys = (codec.key(i, len(self.shape)) for i in range(-(-self.shape[0] // self._chunk[0])))
        parts = [self._store.value(f"{self._name}/{key}") for key in keys]
        stored = [part for part in parts if part is not None]
        return ChunkStream(stored, codec, self._chunk_bytes) if len(stored) == len(parts) else None
