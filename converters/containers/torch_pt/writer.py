"""Writes a .pt file tensor by tensor, in any order, holding no more than a chunk; without torch.

The archive has the entries that ``torch.save`` writes, in its order, and every storage begins at 64
bytes. The places of the storages are known beforehand; the CRC-32 of each is written into its entry
once its bytes are there. Equal tensors give equal bytes, whatever the file's name.
"""

import contextlib
import math
import pickle
import struct
import threading
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from griffin_eval.converters.containers.container import Writer
from griffin_eval.converters.containers.torch_pt.pickle import STORAGES
from griffin_eval.converters.files import c_strides, write_array, writing
from griffin_eval.converters.tensors import FLOATS, ITEM_BYTES, Shape, numpy_dtype

_ALIGNMENT = 64
_PADDING = struct.Struct("<HH")  # identifier and length of an extra field
_ZIP64 = 20  # bytes of the extra field that zipfile adds to an entry of 4 GiB or more
_LOCAL_HEADER = 30  # bytes before the name of an entry
_FACTS = {".format_version": b"1", ".storage_alignment": b"64", "byteorder": b"little"}
_TYPES = {dtype: name for name, dtype in STORAGES.items() if dtype in FLOATS}


class TorchWriter(Writer):
    """Writes a state dict as ``torch.save`` does.

    ``torch.load(path, weights_only=True, mmap=True)`` gives a dict of contiguous tensors in the
    order of ``specs`` (shape and dtype by name), each with a storage of its own. ValueError if
    there are no tensors, or other dtypes than ``FLOATS``; BadInput if the system refuses to
    write.
    """

    def __init__(self, path: str | Path, specs: Mapping[str, tuple[tuple[int, ...], str]]):
        super().__init__(Path(path), specs, FLOATS)
        self.path = Path(path)
        self._entries: dict[str, zipfile.ZipInfo] = {}
        self._starts: dict[str, int] = {}
        self._writing = threading.Lock()
        with writing(self.path):
            self._file = open(self.path, "w+b")
            self._archive = zipfile.ZipFile(self._file, "w")  # writes nothing yet
            try:
                self._lay_out()
            except BaseException:
                self._release()
                raise

    def _write(self, name: str, shape: Shape, dtype: str, chunks: Iterable[np.ndarray]) -> None:
        kind, start = numpy_dtype(dtype), self._starts[name]
        with writing(self.path):
            file, lock = self._file.fileno(), self._writing
            crc = write_array(file, start, shape, kind, chunks, lock, checksum=True)
        self._entries[name].CRC = crc

    def _finish(self) -> None:
        """Write the checksums and the directory of the archive. The caller has to call fsync."""
        if self._file.closed:
            return
        with writing(self.path):
            for entry in self._entries.values():
                self._file.seek(entry.header_offset)
                self._file.write(entry.FileHeader())
            self._archive.close()
            self._file.close()

    def _release(self) -> None:
        self._archive.fp = None  # or its destructor would write a directory
        with contextlib.suppress(OSError):  # a complete file is closed, another one has failed
            self._file.close()

    def _lay_out(self) -> None:
        """Write all entries but the bytes of the storages."""
        self._add("data.pkl", _pickled(self._specs))
        for name, content in _FACTS.items():
            self._add(name, content)
        for i, (name, (shape, dtype)) in enumerate(self._specs.items()):
            nbytes = math.prod(shape) * ITEM_BYTES[dtype]
            self._entries[name] = entry = zipfile.ZipInfo(f"archive/data/{i}")
            entry.file_size = entry.compress_size = nbytes
            entry.header_offset = at = self._archive.start_dir
            begin = at + _LOCAL_HEADER + len(entry.filename) + _PADDING.size
            begin += _ZIP64 if nbytes > zipfile.ZIP64_LIMIT else 0
            padding = -begin % _ALIGNMENT
            entry.extra = _PADDING.pack(0x4246, padding) + bytes(padding)
            self._starts[name] = begin + padding
            self._archive.start_dir = begin + padding + nbytes
            self._archive.filelist.append(entry)
        self._add("version", b"3\n")
        self._add(".data/serialization_id", b"0" * 40)

    def _add(self, name: str, content: bytes) -> None:
        self._archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)


def _pickled(specs: Mapping[str, tuple[tuple[int, ...], str]]) -> bytes:
    """Return the pickle of a dict of tensors. It names callables of torch, which is not imported:
    so the opcodes (protocol 2) are written here, and only those of numbers by `pickle`."""
    items = b""
    for i, (name, (shape, dtype)) in enumerate(specs.items()):
        storage_type = f"ctorch\n{_TYPES[dtype]}\n".encode()
        size = _number(math.prod(shape))
        storage = _tuple(_text("storage"), storage_type, _text(str(i)), _text("cpu"), size) + b"Q"
        numbers = (_tuple(*map(_number, n)) for n in (shape, c_strides(shape)))
        no_hooks = b"ccollections\nOrderedDict\n)R"
        arguments = _tuple(storage, _number(0), *numbers, b"\x89", no_hooks)  # no gradient
        items += _text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"R"
    return b"\x80\x02}(" + items + b"u."


def _tuple(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def _text(text: str) -> bytes:
    encoded = text.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]  # without the protocol and the end
