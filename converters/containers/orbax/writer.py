"""Writes an Orbax checkpoint array by array, in small chunks, so that memory stays small too.

The layout is Orbax's own default, zarr (zstd) in an OCDBT database beside ``_METADATA``, so that
stock Orbax restores it: ``PyTreeCheckpointer().restore(folder)``. tensorstore does the work; jax
and Orbax are not needed.
"""

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from griffin_eval.converters.containers.container import Writer
from griffin_eval.converters.containers.orbax.find import (
    MANIFEST,
    STEP_METADATA,
    TREE_METADATA,
)
from griffin_eval.converters.containers.orbax.remote import (
    context,
    reason,
    shown,
    store_of,
    tensorstore,
    url_of,
)
from griffin_eval.converters.files import cannot_be_written, write_file, writing
from griffin_eval.converters.tensors import (
    CHUNK_BYTES,
    FLOATS,
    ITEM_BYTES,
    Region,
    Shape,
    chunk_shape,
    flattened,
    part_chunks,
    regions,
    shape_of,
)
from griffin_eval.errors import BadInput
from griffin_eval.messages import listed

_IN_FLIGHT = 2  # chunks being compressed and written
_PART = 4 << 20  # bytes of an array that is not contiguous, copied at a time
_DICT_KEY = 2  # Orbax's number for the key of a dict, as opposed to the index of a list
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


class OrbaxWriter(Writer):
    """Writes arrays, then on ``close`` the metadata that make them a checkpoint. Several threads
    may write, each another array.

    Leaves are marked as numpy arrays: unlike arrays of jax, which remember devices, they restore
    on any machine, and as arrays of jax where those are asked for.

    Args:
        folder: Folder, made if it is not there.
        specs: Shape and dtype (one of ``FLOATS``) of every array to come, by name. A name is the
            path of its keys joined by "/"; every key becomes one of a nested dict.
        chunk: Bytes of a chunk of zarr, on which the memory that is taken depends.
        parts: Number of parts along each dimension that devices will read apart, by name. No
            chunk lies in two of them. Without it, chunks are rows.

    Raises:
        ValueError: no arrays, an unknown dtype, names that cannot be told apart, or a folder
            that holds an Orbax checkpoint.
        MissingExtraError: tensorstore is not installed.
        BadInput: the system refuses to write.
    """

    def __init__(
        self,
        folder: str | Path,
        specs: Mapping[str, tuple[tuple[int, ...], str]],
        *,
        chunk: int = CHUNK_BYTES,
        parts: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__(Path(folder), specs, FLOATS)
        _check(specs)
        self.folder, self._ts = Path(folder), tensorstore()
        self._chunk, self._parts = chunk, parts or {}
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if (self.folder / MANIFEST).exists() or (self.folder / TREE_METADATA).exists():
                raise ValueError(f"{self.folder} holds an Orbax checkpoint already")
        self._started = time.time_ns()
        self._pending: deque[tuple[Any, int]] = deque()  # commits and their bytes
        self._context = self._ts.Context(
            context(
                {
                    "cache_pool": {"total_bytes_limit": 0},
                    "cache_pool#ocdbt": {"total_bytes_limit": 20_000_000},
                    "file_io_sync": False,
                }
            )
        )
        self._arrays = self._create()

    def _release(self) -> None:
        for pending, _ in self._pending:  # nothing may write there any more
            pending.exception()
        self._pending.clear()

    def _write(self, name: str, shape: Shape, dtype: str, chunks: Iterable[np.ndarray]) -> None:
        """Write one array. Each chunk is copied before the next is taken: memory may be reused."""
        # Pieces must be contiguous: single chunks, or all chunks that lie beside each other.
        grid = self._chunks(name)
        if name in self._parts:
            first = next((axis for axis, count in enumerate(grid) if count > 1), 0)
            grid = (*grid[: first + 1], *shape[first + 1 :])
        array = self._arrays[name]
        pieces = _refilled(chunks, shape, grid, array.dtype.numpy_dtype)
        for region, piece in pieces:
            with self._lock:
                self._drain(_IN_FLIGHT * self._chunk - piece.nbytes)
                # Nothing else uses this piece, so tensorstore may read it at any time.
                future = array[region].write(piece, can_reference_source_data_indefinitely=True)
                self._pending.append((future.commit, piece.nbytes))

    def _finish(self) -> None:
        """Wait for pending writes, and write the metadata. The caller has to call fsync."""
        self._drain(0)
        leaves = {}
        for name in self._specs:
            keys = name.split("/")
            leaves[str(tuple(keys))] = {
                "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
                "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
            }
        tree = {
            "tree_metadata": leaves,
            "use_ocdbt": True,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        step = {
            "item_handlers": _HANDLER,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": self._started,
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": {},
        }
        write_file(self.folder / STEP_METADATA, json.dumps(step))
        # This file comes last: without it, the folder is no checkpoint to anybody.
        write_file(self.folder / TREE_METADATA, json.dumps(tree))

    def _create(self) -> dict[str, Any]:
        """Create all arrays at once: each alone would wait for the chunks of others."""
        arrays, together = {}, self._ts.Transaction()
        for name, (shape, dtype) in self._specs.items():
            spec = {
                "driver": "zarr",
                "dtype": dtype,
                "metadata": {
                    "shape": shape,
                    "chunks": self._chunks(name),
                    "compressor": {"id": "zstd", "level": 1},  # Orbax's choice
                },
                "kvstore": {**self._database(), "path": f"{name.replace('/', '.')}/"},
                "store_data_equal_to_fill_value": True,  # Orbax takes an absent chunk for damage
                "recheck_cached_data": False,
                "recheck_cached_metadata": False,
            }
            arrays[name] = self._ts.open(
                spec, context=self._context, create=True, transaction=together
            )
        try:
            opened = {name: array.result() for name, array in arrays.items()}
            together.commit_sync()
            return {name: array.with_transaction(None) for name, array in opened.items()}
        except (ValueError, OSError) as error:
            raise self._refused(error) from None

    def _database(self) -> dict[str, Any]:
        base, store = store_of(self.folder), {}
        if url_of(self.folder) is None:
            # Data files have random names, and only the manifest names them.
            store, base = {"manifest": base}, {**base, "file_io_locking": {"mode": "non_atomic"}}
        return {
            "driver": "ocdbt",
            "base": base,
            **store,
            "cache_pool": "cache_pool#ocdbt",
            "config": {
                "max_inline_value_bytes": 1024,
                "max_decoded_node_bytes": 100_000_000,
                "manifest_kind": "single",
            },
            "assume_config": True,
        }

    def _chunks(self, name: str) -> tuple[int, ...]:
        shape, dtype = self._specs[name]
        if name in self._parts:
            return part_chunks(shape, self._parts[name], ITEM_BYTES[dtype], self._chunk)
        return chunk_shape(shape, ITEM_BYTES[dtype], self._chunk)

    def _drain(self, allowed: int) -> None:
        """Wait until at most ``allowed`` bytes are in flight."""
        in_flight = sum(nbytes for _, nbytes in self._pending)
        while self._pending and in_flight > allowed:
            commit, nbytes = self._pending.popleft()
            in_flight -= nbytes
            try:
                commit.result()
            except (ValueError, OSError) as error:
                raise self._refused(error) from None

    def _refused(self, error: Exception) -> BadInput:
        return cannot_be_written(shown(self.folder), reason(error))


def _refilled(
    chunks: Iterable[np.ndarray], shape: Shape, grid: Shape, dtype: np.dtype
) -> Iterator[tuple[Region, np.ndarray]]:
    """Cut consecutive elements anew: a fresh array for every region of a grid, in C order.
    ValueError, a phrase, for chunks of another dtype, or too many or too few elements."""
    source = (flat for chunk in chunks for flat in flattened(chunk, _PART))
    left = np.empty(0, dtype)  # rest of the present chunk
    for region in regions(shape, grid):
        piece = np.empty(shape_of(region), dtype)
        flat = piece.reshape(-1)
        while flat.size:
            if not left.size:
                left = next(source, None)
                if left is None:
                    raise ValueError(f"was given fewer elements than its shape {shape} has")
                if left.dtype != dtype:
                    raise ValueError(f"was given chunks of {left.dtype}, expected {dtype}")
            count = min(flat.size, left.size)
            flat[:count] = left[:count]
            flat, left = flat[count:], left[count:]
        yield region, piece
    if left.size or any(chunk.size for chunk in source):
        raise ValueError(f"was given more elements than its shape {shape} has")


def _check(specs: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    if empty := [name for name, (shape, _) in specs.items() if 0 in shape]:
        raise ValueError(f"Orbax holds no arrays without elements: {listed(empty, repr)}")
    if malformed := [n for n in specs if not all(n.split("/")) or "\0" in n]:
        raise ValueError(f"expected keys joined by '/', found {listed(malformed, repr)}")
    stored: dict[str, str] = {}
    inner = {prefix for name in specs for prefix in _prefixes(name)}
    for name in specs:
        other = stored.setdefault(name.replace("/", "."), name)  # Orbax joins keys with dots
        if other != name:
            raise ValueError(f"Orbax stores {other!r} and {name!r} under one name")
        if name in inner:
            raise ValueError(f"{name!r} is an array and holds others")


def _prefixes(name: str) -> Iterator[str]:
    keys = name.split("/")
    return ("/".join(keys[:i]) for i in range(1, len(keys)))
