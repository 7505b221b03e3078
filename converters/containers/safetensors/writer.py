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
from typing import TYPE_CHECKING, NamedTuple

from griffin_eval.converters.arrays.dtypes import ITEM_BYTES, numpy_dtype
from griffin_eval.converters.arrays.write import write_all, write_array, writing
from griffin_eval.converters.containers.container import Writer
from griffin_eval.converters.containers.safetensors.files import CODES, INDEX_FILE, SINGLE_FILE
from griffin_eval.errors import BadInput
from griffin_eval.messages import listed

if TYPE_CHECKING:
    import numpy as np

_ALIGNMENT = 64


class TensorSlot(NamedTuple):
    """The place of one tensor in the output."""

    file: str
    start: int  # byte of the file at which the tensor begins
    shape: tuple[int, ...]
    dtype: str


class SafetensorsWriter(Writer):
    """A context manager that writes ``model.safetensors``, or shards and their index.

    Several threads may write, each another tensor.

    Attributes:
        folder: where, an existing folder.
        shards: names of the tensors of every file, in the order in which they should be written.
        nbytes: size of every file.

    Args:
        specs: shape and dtype (one of ``CODES``) of every tensor to come, by name.
        max_shard_size: bytes of tensors in a file; a single larger tensor has a file of its own.

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
        self.folder = Path(folder)
        if not specs:
            raise ValueError("no tensors to write: expected at least one")
        if "__metadata__" in specs:
            raise ValueError("no tensor can be named '__metadata__' in safetensors")
        if unknown := sorted(name for name, (_, dtype) in specs.items() if dtype not in CODES):
            names = listed(unknown, lambda name: f"{name!r} is {specs[name][1]}")
            raise ValueError(f"expected dtypes {', '.join(CODES)}, but {names}")
        self._sizes = {
            n: math.prod(shape) * ITEM_BYTES[dtype] for n, (shape, dtype) in specs.items()
        }
        self._parameters = sum(math.prod(shape) for shape, _ in specs.values())
        self.shards = {
            file: sorted(names, key=lambda name: -_alignment(self._sizes[name]))
            for file, names in _plan(self._sizes, max_shard_size).items()
        }
        self._headers: dict[str, bytes] = {}
        self._slots: dict[str, TensorSlot] = {}
        self.nbytes: dict[str, int] = {}
        for file, names in self.shards.items():
            self._lay_out(file, {name: specs[name] for name in names})
        self._missing = {file: set(names) for file, names in self.shards.items()}
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._release()

    def write(self, name: str, chunks: "Iterable[np.ndarray]") -> None:
        if name not in self._slots:
            raise ValueError(f"{name!r} is not among the tensors to write")
        file, start, shape, dtype = self._slots[name]
        if name not in self._missing[file]:
            raise ValueError(f"{name!r} was written before")
        with writing(self.folder / file):
            with self._lock:
                if file not in self._open:
                    self._open[file] = self._begin(file)
                descriptor = self._open[file]
            try:
                write_array(descriptor, start, shape, numpy_dtype(dtype), chunks)
            except BadInput:  # of whoever makes the chunks
                raise
            except ValueError as error:
                raise ValueError(f"{self.folder / file}: {name!r} {error}") from None
            with self._lock:
                self._missing[file].remove(name)
                last = not self._missing[file]
            if last:
                self._finish(file)

    def close(self) -> None:
        """Writes the index, if there are several shards.

        Raises:
            ValueError: naming the tensors that were not written.
        """
        self._release()
        if missing := [n for file, names in self.shards.items() for n in names if self._lacks(n)]:
            raise ValueError(
                f"{self.folder}: {len(missing)} tensors were never written: {listed(missing, repr)}"
            )
        if len(self.shards) > 1:
            index = {
                "metadata": {
                    "total_parameters": self._parameters,
                    "total_size": sum(self._sizes.values()),
                },
                "weight_map": {name: slot.file for name, slot in self._slots.items()},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            with writing(self.folder / INDEX_FILE):
                (self.folder / INDEX_FILE).write_text(text, encoding="utf-8")

    def _lacks(self, name: str) -> bool:
        return name in self._missing[self._slots[name].file]

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
            self._slots[name] = TensorSlot(file, begin, tuple(shape), dtype)
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

    def _finish(self, file: str) -> None:
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
