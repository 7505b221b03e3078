"""Writes a safetensors folder tensor by tensor, in any order, holding no more than a chunk.

The names of the files and the index are those of transformers. Same tensors, same bytes.
safetensors allows no holes between tensors, so those whose size is a multiple of 64 bytes come
first: they, which in real models are all, begin at 64-byte boundaries, as JAX needs them to use the
file's memory in place.
"""

import json
import math
import os
import struct
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from griffin_eval.converters.containers.container import Specs, Writer
from griffin_eval.converters.containers.safetensors.reader import CODES, INDEX_FILE, SINGLE_FILE
from griffin_eval.converters.files import write_array, write_file, writing
from griffin_eval.converters.tensors import ITEM_BYTES, Shape, numpy_dtype

_ALIGNMENT = 64


class SafetensorsWriter(Writer):
    """Writes ``model.safetensors``, or shards and their index, into an existing folder.

    Attributes:
        shards: Names of the tensors of every file, in the order in which they should be written.
        nbytes: Size of every file.

    Args:
        specs: Shape and dtype (one of ``CODES``) of every tensor to come, by name.
        max_shard_size: Bytes of tensors in a file; a single larger tensor has a file of its own.

    Raises:
        ValueError: no tensors, or a dtype that is not among ``CODES``.
        BadInput: the system refuses to write.
    """

    def __init__(
        self,
        folder: str | Path,
        specs: Mapping[str, tuple[tuple[int, ...], str]],
        *,
        max_shard_size: int = 5 * 10**9,
    ):
        super().__init__(Path(folder), specs, CODES)
        self.folder = Path(folder)
        if "__metadata__" in specs:
            raise ValueError("no tensor can be named '__metadata__' in safetensors")
        self._sizes = {
            n: math.prod(shape) * ITEM_BYTES[dtype] for n, (shape, dtype) in specs.items()
        }
        self._parameters = sum(math.prod(shape) for shape, _ in specs.values())
        self.shards = {
            file: sorted(names, key=lambda name: -_alignment(self._sizes[name]))
            for file, names in _plan(self._sizes, max_shard_size).items()
        }
        self._headers: dict[str, bytes] = {}
        self._slots: dict[str, tuple[str, int]] = {}  # file of a tensor, and its first byte there
        self._locks = {file: threading.Lock() for file in self.shards}
        self._unwritten = {file: set(names) for file, names in self.shards.items()}
        self.nbytes: dict[str, int] = {}
        for file, names in self.shards.items():
            self._lay_out(file, {name: specs[name] for name in names})

    def _write(self, name: str, shape: Shape, dtype: str, chunks: Iterable[np.ndarray]) -> None:
        file, start = self._slots[name]
        with writing(self.folder / file):
            with self._lock:
                if header := self._headers.pop(file, None):  # once
                    with open(self.folder / file, "wb") as handle:
                        handle.write(header)
                        handle.truncate(self.nbytes[file])
            with open(self.folder / file, "r+b", buffering=0) as handle:
                kind, lock = numpy_dtype(dtype), self._locks[file]
                write_array(handle.fileno(), start, shape, kind, chunks, lock)
                with self._lock:
                    self._unwritten[file].discard(name)
                if not self._unwritten[file]:  # start to wait for the disk while other files grow
                    os.fsync(handle.fileno())

    def _finish(self) -> None:
        """Write the index, if there are several shards."""
        if len(self.shards) > 1:
            index = {
                "metadata": {
                    "total_parameters": self._parameters,
                    "total_size": sum(self._sizes.values()),
                },
                "weight_map": {name: file for name, (file, _) in self._slots.items()},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            write_file(self.folder / INDEX_FILE, text)

    def _lay_out(self, file: str, specs: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begins, end = {}, 0
        for name, (shape, dtype) in specs.items():
            begins[name], end = end, end + self._sizes[name]
            header[name] = {
                "dtype": CODES[dtype],
                "shape": list(shape),
                "data_offsets": [begins[name], end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)  # spaces, as the library pads too
        self._headers[file] = data = struct.pack("<Q", len(text)) + text
        self._slots |= {name: (file, len(data) + begin) for name, begin in begins.items()}
        self.nbytes[file] = len(data) + end


def output_files(specs: Specs, max_shard_size: int) -> dict[str, str]:
    """Return the file that each tensor goes into."""
    shards = SafetensorsWriter("", specs, max_shard_size=max_shard_size).shards
    return {name: file for file, names in shards.items() for name in names}


def _plan(sizes: Mapping[str, int], max_shard_size: int) -> dict[str, list[str]]:
    """Return the names of every file's tensors, split exactly as transformers splits them."""
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        dict(sizes),
        get_storage_size=lambda size: size,
        filename_pattern=SINGLE_FILE.replace(".", "{suffix}."),
        max_shard_size=max_shard_size,
    )
    return split.filename_to_tensors


def _alignment(size: int) -> int:
    """Return the largest power of two up to 64 that divides a size (64 for size 0)."""
    return math.gcd(size, _ALIGNMENT)
