"""Opens a checkpoint of any format: its config, and its tensors by canonical name and layout."""

import contextlib
import logging
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.adapters.adapter import Adapter
from griffin_eval.converters.adapters.changes import Change
from griffin_eval.converters.adapters.merge import holds, merged
from griffin_eval.converters.adapters.together import plan_merge
from griffin_eval.converters.arrays.chunk_sums import ChunkSums
from griffin_eval.converters.arrays.dtypes import numpy_dtype
from griffin_eval.converters.arrays.grid import Region
from griffin_eval.converters.arrays.pieces import CHUNK_BYTES, bytes_of, chunks, drop_pages
from griffin_eval.converters.arrays.torch import torch_tensor
from griffin_eval.converters.codecs.quantised import Dequantised, Quantised
from griffin_eval.converters.containers.container import Container
from griffin_eval.converters.formats import Format
from griffin_eval.converters.inspection import inspect
from griffin_eval.converters.naming.derived import Derived, derive
from griffin_eval.converters.naming.ops import SAME
from griffin_eval.converters.naming.tables import EMBEDDING, HEAD, Binding
from griffin_eval.converters.output.manifest import MANIFEST_FILE, recorded
from griffin_eval.converters.overrides import NO_OVERRIDES, Overrides
from griffin_eval.errors import CheckpointError
from griffin_eval.layout import param_specs, parameter_count

if TYPE_CHECKING:
    import numpy as np
    import torch

logger = logging.getLogger(__name__)


class Checkpoint:
    """A checkpoint whose tensors are exactly those its config asks for, once adapters are merged.

    Attributes:
        inspection: everything that is known of it without reading tensors.
        path, overrides: as given.
        folder: the folder of its config and tokenizer: the path, or the folder of a file.
        container: the opened folder or file, with a tensor for each parameter that is only a part
            of a stored one, has other values, or is zeros.
        bindings: the parameters that each tensor of the container holds.
        format: its format, one of those of `griffin_eval.converters.formats` or the user's own.
        config: the architecture.
        check_parts: whether what `parts` reads is compared with the manifest.
        parts_read, parts_checked: bytes that were read by `parts`, and those of them that were
            compared with a checksum.
        shapes: the shape of each parameter, by canonical name.
        dtypes: the dtype that each parameter is stored in, by canonical name, such as
            ``bfloat16``.
        homes: the tensor that holds each parameter, by canonical name, and its number among the
            parameters in it.
        adapters: those that are merged while parameters are read.

    Args:
        path: folder, or file of a ``.pt``.
        overrides: facts that the files do not state, or state wrongly.

    Raises:
        CheckpointError: naming the file, key or tensors that are not as they must be.
        ArgumentError: an override that cannot be.
    """

    def __init__(self, path: str | Path, overrides: Overrides = NO_OVERRIDES):
        self.inspection = inspection = inspect(Path(path), overrides)
        self.path, self.folder, self.overrides = inspection.path, inspection.folder, overrides
        refusals = [*inspection.problems]
        if inspection.missing_fields_message is not None:
            refusals.append(inspection.missing_fields_message)
        if refusals or inspection.config is None or inspection.format is None:
            inspection.container.close()
            raise CheckpointError("; ".join(refusals))
        self.container, self.bindings = derive(inspection.container, inspection.bindings)
        self.format: Format = inspection.format
        self.config: GriffinConfig = inspection.config
        self.homes: dict[str, tuple[Binding, int]] = {
            spec.name: (binding, part)
            for binding in self.bindings
            for part, spec in enumerate(binding.canonical)
        }
        self.dtypes = {
            name: self.container.tensors[binding.foreign].dtype
            for name, (binding, _) in self.homes.items()
        }
        self._shared: tuple[Binding, Callable[[Binding], np.ndarray], np.ndarray] | None = None
        self._sharing, self._slicing = threading.Lock(), threading.Lock()
        self.parts_read = self.parts_checked = 0
        self.check_parts = overrides.check_parts
        self._manifest: dict[str, dict[str, Any]] | None = None
        self.adapters: list[Adapter] = []
        self._changes: Mapping[str, Sequence[Change]] = {}
        if overrides.adapters:
            self._merge(overrides.adapters)
        self.shapes = {name: spec.shape for name, spec in param_specs(self.config).items()}

    def _merge(self, adapters: Sequence[tuple[Path, float]]) -> None:
        """Prepares the merging of adapters."""

        def equal(name: str, change: Change) -> bool:
            if change.shape != param_specs(self.config)[name].shape:
                return False
            return holds(self.stored_pieces(name, check=False), self.dtypes[name], change)

        self.adapters = [Adapter(folder, weight) for folder, weight in adapters]
        merge = plan_merge(self.adapters, self.config, equal)
        if HEAD in param_specs(merge.config) and HEAD not in self.homes:
            self.homes[HEAD], self.dtypes[HEAD] = self.homes[EMBEDDING], self.dtypes[EMBEDDING]
        self.config, self._changes = merge.config, merge.changes

    def __repr__(self) -> str:
        size = f"{parameter_count(self.config):,} parameters"
        return f"Checkpoint({str(self.path)!r}: {self.format.name}, {size}, {self.dtype})"

    @property
    def dtype(self) -> str:
        """The dtype that the embedding is stored in."""
        return self.dtypes[EMBEDDING]

    def numpy(self, name: str) -> "np.ndarray":
        """A parameter by canonical name, in canonical layout: a view of what was read or mapped."""
        if name not in self._changes:
            return self._canonical(name, self._read)
        import numpy as np

        out = np.empty(param_specs(self.config)[name].shape, numpy_dtype(self.dtypes[name]))
        start = 0
        for piece in self.pieces(name, check=False):
            out[start : start + len(piece)] = piece
            start += len(piece)
        return out

    def pieces(
        self,
        name: str,
        nbytes: int = CHUNK_BYTES,
        check: bool = True,
        seen: "Callable[[np.ndarray], None] | None" = None,
    ) -> Iterator["np.ndarray"]:
        """A parameter in contiguous pieces of its leading axis, of about ``nbytes`` bytes.

        They are read piece by piece where possible, and never mapped. Several threads may read,
        each another parameter.

        Args:
            name: canonical name.
            nbytes: of a piece.
            check: as of `stored_pieces`.
            seen: called with each piece as it is stored, before adapters change it.

        Raises:
            CheckpointError: as of `stored_pieces`; an adapter cannot be merged.
        """
        unread = True  # what is read twice is seen once

        def stored() -> Iterator["np.ndarray"]:
            nonlocal unread
            first, unread = unread, False
            for piece in self.stored_pieces(name, nbytes, check and first):
                if first and seen is not None:
                    seen(piece)
                yield piece

        changes = self._changes.get(name)
        if changes is None:
            yield from stored()
            return
        spec = param_specs(self.config)[name]
        yield from merged(spec, self.dtypes[name], changes, stored, nbytes)
        if unread and seen is not None:  # an adapter takes its place
            for _ in stored():
                pass

    def changes(self, name: str) -> bool:
        """Whether adapters change a parameter."""
        return name in self._changes

    def quantised(self, name: str) -> Quantised | None:
        """How a parameter is quantised in the file; None if it is not, if it lies otherwise there,
        or if an adapter changes it."""
        binding, container = self.homes[name][0], self.container
        if not isinstance(container, Dequantised) or binding.op is not SAME or self.changes(name):
            return None
        stored = container.decoding.parameters.get(binding.foreign)
        return stored if stored is not None and stored.shape == self.shapes[name] else None

    def stored_pieces(
        self, name: str, nbytes: int = CHUNK_BYTES, check: bool = True
    ) -> Iterator["np.ndarray"]:
        """The same of the parameter as it is stored, without adapters.

        Args:
            name: canonical name.
            nbytes: of a piece.
            check: whether a checksum that the container has of it is compared, behind the last
                piece.

        Raises:
            CheckpointError: a tensor is not what its checksum says; a file has become shorter, or
                cannot be read.
        """
        binding, _ = self.homes[name]
        foreign, container = binding.foreign, self.container
        plain = binding.op is SAME and binding.entry is None
        whole = plain  # whether what is read is all that a checksum is of
        if isinstance(container, Derived) and foreign in container.parts:
            foreign, container, whole = container.parts[foreign].source, container.stored, False
        if whole:
            pieces = container.pieces(foreign, nbytes)
            yield from self._checked(container, foreign, pieces) if check else pieces
            return
        if plain:
            yield from self.container.pieces(binding.foreign, nbytes)
        else:
            yield from chunks(self._canonical(name, self._copy), nbytes)
        # Of what was read now.
        if check and foreign and container.checksum(foreign) is not None:
            for _ in self._checked(container, foreign, container.pieces(foreign, nbytes)):
                pass

    def _checked(
        self, container: Container, foreign: str, pieces: Iterator["np.ndarray"]
    ) -> Iterator["np.ndarray"]:
        """The pieces of a stored tensor, and an error behind them if their checksum is wrong."""
        stated, found = container.checksum(foreign), 0
        for piece in pieces:
            if stated is not None:
                found = zlib.crc32(bytes_of(piece), found)
            yield piece
        if stated not in (None, found):
            raise CheckpointError(
                f"{self.path}: {foreign} has the CRC-32 {found:08x}, and the file says "
                f"{stated:08x}: it is damaged; download or save it again"
            )

    def torch(self, name: str) -> "torch.Tensor":
        """A parameter by canonical name, in canonical layout, over the mapped file if possible.

        It may be written to, which never reaches the file.
        """
        binding, _ = self.homes[name]
        if binding.op is SAME and name not in self._changes:
            if binding.entry is None:
                return self.container.torch(binding.foreign).contiguous()
            if self.container.mapped:
                return self.container.torch(binding.foreign)[binding.entry].contiguous()
        return torch_tensor(self.numpy(name))

    def parts(self, name: str) -> "Parts":
        """Parts of a parameter, for processes and devices that need no more of it."""
        return Parts(self, name)

    def log_parts(self) -> None:
        """Says in the log how much of what `parts` read could not be checked, if anything could."""
        unchecked = self.parts_read - self.parts_checked
        if unchecked and self.parts_checked:
            logger.info(
                "%s: %.0f%% of the weights that this process reads are parts of chunks, whose "
                "checksums are of the whole: unchecked here (griffin-eval convert --chunks)",
                self.path,
                100 * unchecked / self.parts_read,
            )

    def close(self) -> None:
        self.container.close()

    def _canonical(self, name: str, read: "Callable[[Binding], np.ndarray]") -> "np.ndarray":
        binding, part = self.homes[name]
        if len(binding.canonical) == 1:
            return binding.op.to_canonical(read(binding))[part]
        with self._sharing:
            if self._shared is None or self._shared[:2] != (binding, read):  # once for its parts
                self._shared = None  # before the next one is read
                self._shared = (binding, read, read(binding))
            return binding.op.to_canonical(self._shared[2])[part]

    def _check_part(self, name: str, array: "np.ndarray", part: Region) -> None:
        """Compares a part of a parameter with the manifest, as far as whole chunks lie in it."""
        if not self.check_parts or name in self._changes:  # by an adapter
            return
        if self._manifest is None:
            self._manifest = recorded(self)
        self.parts_read += array.nbytes
        entry = self._manifest.get(name, {})
        sums: ChunkSums | None = entry.get("chunks")
        if sums is None:
            return
        wrong: list[int] = []
        if sums.shape == self.shapes[name] and entry["dtype"] == self.dtypes[name]:
            wrong, nbytes = sums.check(array, part)
            self.parts_checked += nbytes
            if not wrong:
                return
        found = f"chunk {wrong[0]} of {len(sums.sums)}" if wrong else "another shape or dtype"
        raise CheckpointError(
            f"{self.path}: {name} is not what {MANIFEST_FILE} says ({found}): the file is damaged, "
            "or was changed after it was converted (check=False loads it as it is)"
        )

    def _read(self, binding: Binding) -> "np.ndarray":
        """The tensor of a binding, over the mapped file if possible; of a stack only its layer."""
        if binding.entry is None:
            return self.container.numpy(binding.foreign)
        with self._slicing:  # several parameters are of one array
            start = binding.entry
            return self.container.slice(binding.foreign, start, start + 1)[0]

    def _copy(self, binding: Binding) -> "np.ndarray":
        """The same, but never mapped."""
        if binding.entry is None and self.container.mapped:
            (whole,) = self.container.pieces(
                binding.foreign, self.container.tensors[binding.foreign].nbytes
            )
            return whole
        return self._read(binding)


class Parts:
    """Parts of a parameter, in canonical layout. Each is compared with the checksums in the
    manifest of the chunks that lie in it as a whole.

    Args:
        checkpoint: that is open.
        name: canonical name.
    """

    def __init__(self, checkpoint: Checkpoint, name: str):
        self._checkpoint, self._name = checkpoint, name
        binding, _ = checkpoint.homes[name]
        container = checkpoint.container
        plain = binding.op is SAME and binding.entry is None and not checkpoint.changes(name)
        self._mapped = plain and container.mapped
        self._foreign = binding.foreign if plain and not self._mapped else None
        self._whole = None if self._foreign is not None else checkpoint.numpy(name)
        self._last: tuple[Region, np.ndarray] | None = None

    def numpy(self, part: Sequence[slice]) -> "np.ndarray":
        """A part, read alone where the container allows it.

        Args:
            part: a slice of each dimension, without steps.

        Raises:
            CheckpointError: it cannot be read, or a chunk in it is not what its checksum says.
        """
        shape = self._checkpoint.shapes[self._name]
        ends = (cut.indices(n) for cut, n in zip(part, shape, strict=True))
        asked = tuple(slice(start, stop) for start, stop, _ in ends)
        if self._last is None or self._last[0] != asked:  # devices may have the same one
            self._last = None  # before the next one is read
            if self._foreign is None:
                assert self._whole is not None
                array = self._whole[asked]
            else:
                array = self._checkpoint.container.part(self._foreign, asked)
            self._checkpoint._check_part(self._name, array, asked)
            self._last = (asked, array)
        return self._last[1]

    def torch(self, part: Sequence[slice]) -> "torch.Tensor":
        """A part as a tensor, over the mapped file if possible. It may be written to, which never
        reaches the file."""
        array = self.numpy(part)
        if not self._mapped:
            return torch_tensor(array)
        self.release()
        return self._checkpoint.torch(self._name)[tuple(part)].contiguous()

    def release(self) -> None:
        """Takes what was read of a mapped file out of this process's memory."""
        if self._whole is not None:
            drop_pages(self._whole)


_collected: ContextVar[list[str] | None] = ContextVar("not finite", default=None)


@contextlib.contextmanager
def collect_not_finite() -> Iterator[list[str]]:
    """Give a list to which the tensors that are loaded meanwhile are added if they hold NaN or
    infinity, a sentence each."""
    found: list[str] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def warn_not_finite(name: str, not_finite: int, size: int) -> None:
    """Says in the log that a tensor holds NaN or infinity."""
    if not_finite:
        message = f"{name}: {not_finite} of {size} weights are NaN or infinite"
        logger.warning("%s", message)
        found = _collected.get()
        if found is not None:
            found.append(message)
