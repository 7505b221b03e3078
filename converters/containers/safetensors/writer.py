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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from griffin_eval.converters.containers.container import Specs, Writer
from griffin_eval.converters.containers.safetensors.files import CODES, INDEX_FILE, SINGLE_FILE
from griffin_eval.converters.files import write_all, write_array, write_file, writing
from griffin_eval.converters.tensors import ITEM_BYTES, Shape, numpy_dtype

if TYPE_CHECKING:
    import numpy as np

_ALIGNMENT = 64


class _Slot(NamedTuple):
    """The place of one tensor in the output: a file, and the byte at which the tensor begins."""

    file: str
    start: int


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
        self._slots: dict[str, _Slot] = {}
        self.nbytes: dict[str, int] = {}
        for file, names in self.shards.items():
            self._lay_out(file, {name: specs[name] for name in names})
        self._left = {file: len(names) for file, names in self.shards.items()}
        self._open: dict[str, int] = {}

    def _write(self, name: str, shape: Shape, dtype: str, chunks: "Iterable[np.ndarray]") -> None:
        file, start = self._slots[name]
        with writing(self.folder / file):
            with self._lock:
                if file not in self._open:
                    self._open[file] = self._begin(file)
                descriptor = self._open[file]
            write_array(descriptor, start, shape, numpy_dtype(dtype), chunks)
            with self._lock:
                self._left[file] -= 1
                last = not self._left[file]
            if last:
                self._complete(file)

    def _finish(self) -> None:
        """Write the index, if there are several shards."""
        if len(self.shards) > 1:
            index = {
                "metadata": {
                    "total_parameters": self._parameters,
                    "total_size": sum(self._sizes.values()),
                },
                "weight_map": {name: slot.file for name, slot in self._slots.items()},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            write_file(self.folder / INDEX_FILE, text)

    def _lay_out(self, file: str, specs: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (shape, dtype) in specs.items():
            begin, end = end, end + self._sizes[name]
            header[name] = {
                "dtype": CODES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
            self._slots[name] = _Slot(file, begin)
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)  # spaces, as the library pads too
        self._headers[file] = data = struct.pack("<Q", len(text)) + text
        for name in specs:
            slot = self._slots[name]
            self._slots[name] = slot._replace(start=len(data) + slot.start)
        self.nbytes[file] = len(data) + end

    def _begin(self, file: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(self.folder / file, flags, 0o666)
        os.ftruncate(descriptor, self.nbytes[file])
        write_all(descriptor, self._headers[file], 0)
        return descriptor

    def _complete(self, file: str) -> None:
        with self._lock:
            descriptor = self._open.pop(file)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _release(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def output_files(specs: Specs, max_shard_size: int) -> dict[str, str]:
    """Return the file that each tensor goes into."""
    shards = SafetensorsWriter("", specs, max_shard_size=max_shard_size).shards
    return {name: file for file, names in shards.items() for name in names}


def _plan(sizes: Mapping[str, int], max_shard_size: int) -> dict[str, list[str]]:
    """The names of the tensors of every file, split exactly as transformers splits them."""
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        dict(sizes),
        get_storage_size=lambda size: size,
        filename_pattern=SINGLE_FILE.replace(".", "{suffix}."),
        max_shard_size=max_shard_size,
    )
    return split.filename_to_tensors


def _alignment(size: int) -> int:
    """The largest power of two up to 64 that divides a size; of 0, which takes no room, 64."""
    return math.gcd(size, _ALIGNMENT)
