"""Opens a checkpoint of any format: its config, and its tensors by canonical name and layout."""

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.adapters.adapter import Adapter
from griffin_eval.converters.adapters.changes import Change
from griffin_eval.converters.adapters.merge import holds, merged, plan_merge
from griffin_eval.converters.chunk_sums import ChunkSums
from griffin_eval.converters.codecs.decode import quantised
from griffin_eval.converters.files import checked_pieces
from griffin_eval.converters.formats import Format
from griffin_eval.converters.inspection import inspect
from griffin_eval.converters.naming.parameters import Parameter, parameters_of
from griffin_eval.converters.naming.tables import EMBEDDING, HEAD
from griffin_eval.converters.output.manifest import MANIFEST_FILE, recorded
from griffin_eval.converters.overrides import NO_OVERRIDES, Overrides
from griffin_eval.converters.source.hub import check_files
from griffin_eval.converters.tensors import (
    PIECE_BYTES,
    LazyTensor,
    Region,
    assembled,
    bytes_of,
    drop_pages,
    in_memory,
    torch_tensor,
)
from griffin_eval.errors import CheckpointError
from griffin_eval.layout import param_specs, parameter_count

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class Checkpoint:
    """A checkpoint whose tensors are exactly those its config asks for, once adapters are merged.

    Attributes:
        inspection: Facts of the checkpoint that are known without reading tensors.
        folder: Folder of its config and tokenizer: the path, or the folder of a file.
        bindings: Parameters that each tensor of the container holds.
        format: One of `griffin_eval.converters.formats`, or the user's own.
        check_parts: Whether data that `parts` reads are compared with the manifest.
        parts_read, parts_checked: Bytes that `parts` read, and bytes of these with a checksum.
        shapes, dtypes: Shape, and dtype in the files such as ``bfloat16``, by canonical name.
        adapters: Adapters that are merged while parameters are read.

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
        self.container, self.bindings = inspection.container, inspection.bindings
        self.format: Format = inspection.format
        self.config: GriffinConfig = inspection.config
        self._closed = False
        self._parameters = parameters_of(self.container.tensors, self.bindings)
        self.dtypes = {name: each.tensor.dtype for name, each in self._parameters.items()}
        self.parts_read = self.parts_checked = 0
        self.check_parts = overrides.check_parts
        self._manifest: dict[str, dict[str, Any]] | None = None
        self.adapters: list[Adapter] = []
        self._changes: Mapping[str, Sequence[Change]] = {}
        if overrides.adapters:
            self._merge(overrides.adapters)
        self.shapes = {name: spec.shape for name, spec in param_specs(self.config).items()}

    def _merge(self, adapters: Sequence[tuple[Path, float]]) -> None:
        """Prepare the merging of adapters."""

        def equal(name: str, change: Change) -> bool:
            return holds(self._parameters[name].tensor, change)

        self.adapters = [Adapter(folder, weight) for folder, weight in adapters]
        merge = plan_merge(self.adapters, self.config, equal)
        if HEAD in param_specs(merge.config) and HEAD not in self._parameters:
            self._parameters[HEAD] = self._parameters[EMBEDDING]
            self.dtypes[HEAD] = self.dtypes[EMBEDDING]
        self.config, self._changes = merge.config, merge.changes

    def __repr__(self) -> str:
        size = f"{parameter_count(self.config):,} parameters"
        return f"Checkpoint({str(self.path)!r}: {self.format.name}, {size}, {self.dtype})"

    @property
    def dtype(self) -> str:
        """The dtype that the embedding is stored in."""
        return self.dtypes[EMBEDDING]

    def numpy(self, name: str) -> np.ndarray:
        """Return a parameter in canonical layout: a view of a mapped file, or an array."""
        return self._whole(name).numpy()

    def _parameter(self, name: str) -> Parameter:
        """Return a parameter as it is stored; ValueError if the checkpoint is closed."""
        if self._closed:
            raise ValueError(f"{self.path} is closed: open it again to read {name}")
        return self._parameters[name]

    def _tensor(self, name: str) -> LazyTensor:
        """Return a parameter, with the changes of adapters."""
        stored = self._parameter(name).tensor
        if not self.changes(name):
            return stored
        return merged(stored, param_specs(self.config)[name], self._changes[name])

    def _whole(self, name: str) -> LazyTensor:
        """Return a parameter with the changes of adapters, which are computed at once."""
        tensor = self._tensor(name)
        if not self.changes(name):
            return tensor
        return in_memory(assembled(tensor.shape, tensor.dtype, tensor.pieces()))

    def pieces(
        self, name: str, nbytes: int = PIECE_BYTES, check: bool = True
    ) -> Iterator[np.ndarray]:
        """Yield a parameter in contiguous pieces of its leading axis, of about ``nbytes`` bytes.

        They are read piece by piece where possible, and never mapped. Several threads may read,
        each another parameter. For ``check`` and errors see `stored_pieces`.
        """
        if not self.changes(name):
            yield from self.stored_pieces(name, nbytes, check)
            return
        yield from self._tensor(name).pieces(nbytes)
        stored = self._parameter(name).stored
        if check and stored is not None and stored.crc32 is not None:
            for _ in self.stored_pieces(name, nbytes):
                pass

    def changes(self, name: str) -> bool:
        """Return whether adapters change a parameter."""
        return name in self._changes

    def quantised(self, name: str) -> LazyTensor | None:
        """Return a parameter that is quantised in the file; None if it is not, if it lies otherwise
        there, or if an adapter changes it."""
        tensor = self._parameter(name).tensor
        return None if tensor.quantised is None or self.changes(name) else tensor

    @property
    def codecs(self) -> set[str]:
        """Names of the codecs that parameters are quantised with."""
        return {each.codec for each in quantised(self.container).values()}

    def stored_pieces(
        self, name: str, nbytes: int = PIECE_BYTES, check: bool = True
    ) -> Iterator[np.ndarray]:
        """Yield the pieces of a parameter as it is stored, without adapters.

        With ``check``, the container's CRC-32 of the tensor, if any, is compared after the last
        piece.

        Raises:
            CheckpointError: a tensor does not match its checksum; a file became shorter, or
                cannot be read.
        """
        tensor, stored, foreign = self._parameter(name)
        if not check or stored is None or stored.crc32 is None:
            yield from tensor.pieces(nbytes)
            return
        checked = checked_pieces(stored, foreign, self.path, nbytes)
        if tensor is stored:
            yield from checked
            return
        yield from tensor.pieces(nbytes)
        for _ in checked:
            pass

    def check_files(self) -> None:
        """Raise CheckpointError if a file of the model or of its adapters is not the hub's, or if
        an adapter's tensor does not match its CRC-32."""
        adapted = (file for adapter in self.adapters for file in adapter.files)
        check_files([*self.container.files(), *adapted])
        for adapter in self.adapters:
            adapter.check_tensors()

    def sha256(
        self, name: str, check: bool = True, seen: Callable[[int], None] = lambda nbytes: None
    ) -> str:
        """Return the SHA-256 of a parameter as it is stored, in canonical layout, in hexadecimal
        digits. ``seen`` is called with the bytes of each piece; an exception ends the reading."""
        sha = hashlib.sha256()
        for piece in self.stored_pieces(name, check=check):
            sha.update(bytes_of(piece))
            seen(piece.nbytes)
        return sha.hexdigest()

    def torch(self, name: str) -> "torch.Tensor":
        """Return a parameter in canonical layout, over the mapped file if possible. It may be
        written to, which never reaches the file."""
        return self._whole(name).torch()

    def parts(self, name: str) -> "Parts":
        """Return parts of a parameter, for processes and devices that need no more of it."""
        return Parts(self, name, self._whole(name))

    def log_parts(self) -> None:
        """Log how many bytes that `parts` read could not be checked, if some could."""
        unchecked = self.parts_read - self.parts_checked
        if unchecked and self.parts_checked:
            logger.info(
                "%s: %.0f%% of the weights that this process reads are parts of chunks, whose "
                "checksums are of the whole: unchecked here (griffin-eval convert --chunks)",
                self.path,
                100 * unchecked / self.parts_read,
            )

    def close(self) -> None:
        """Release the files; arrays and tensors that were returned keep what they need."""
        self._closed = True
        self._parameters.clear()
        self.container.close()

    def _check_part(self, name: str, array: np.ndarray, part: Region) -> None:
        """Compare a part of a parameter with the manifest, as far as whole chunks lie in it."""
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


class Parts:
    """Parts of a parameter, in canonical layout. Each is compared with the manifest's checksums of
    the chunks that lie in it as a whole."""

    def __init__(self, checkpoint: Checkpoint, name: str, tensor: LazyTensor):
        if tensor.view is None and tensor.grid == tensor.shape:  # a part costs as much as all of it
            tensor = in_memory(tensor.numpy())
        self._checkpoint, self._name, self._tensor = checkpoint, name, tensor
        self._last: tuple[Region, np.ndarray] | None = None

    def numpy(self, part: Sequence[slice]) -> np.ndarray:
        """Return a part, read alone where the container allows it: a slice without a step of each
        dimension.

        Raises:
            CheckpointError: the part cannot be read, or a chunk in it does not match its checksum.
        """
        tensor = self._tensor
        ends = (cut.indices(n) for cut, n in zip(part, tensor.shape, strict=True))
        region = tuple(slice(start, stop) for start, stop, _ in ends)
        if self._last is None or self._last[0] != region:  # devices may have the same one
            self._last = None  # before the next one is read
            array = tensor.read(region) if tensor.view is None else tensor.view(False)[region]
            self._checkpoint._check_part(self._name, array, region)
            self._last = (region, array)
        return self._last[1]

    def torch(self, part: Sequence[slice]) -> "torch.Tensor":
        """Return a part as a tensor, over the mapped file if possible. It may be written to, which
        never reaches the file."""
        array = self.numpy(part)
        if self._tensor.view is None:
            return torch_tensor(array)
        self.release()
        return torch_tensor(self._tensor.view(True)[tuple(part)])

    def release(self) -> None:
        """Release the memory of the pages read from a mapped file."""
        if self._tensor.view is not None:
            drop_pages(self._tensor.view(False))


_collected: ContextVar[list[str] | None] = ContextVar("not finite", default=None)


@contextlib.contextmanager
def collect_not_finite() -> Iterator[list[str]]:
    """Collect a sentence for each tensor loaded within the context that holds NaN or infinity."""
    found: list[str] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def warn_not_finite(name: str, not_finite: int, size: int) -> None:
    """Log that a tensor holds NaN or infinity, if it does."""
    if not_finite:
        message = f"{name}: {not_finite} of {size} weights are NaN or infinite"
        logger.warning("%s", message)
        if (found := _collected.get()) is not None:
            found.append(message)
