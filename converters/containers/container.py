"""The interface of all containers (safetensors, PyTorch, …), open, written and as kinds."""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from griffin_eval.converters.arrays.grid import Region
from griffin_eval.converters.arrays.pieces import CHUNK_BYTES
from griffin_eval.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    import torch


MAX_NAME = 1000  # characters; messages show names in full

Specs = Mapping[str, tuple[tuple[int, ...], str]]  # shape and dtype of every tensor, by name


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts digits by value: ``layers.2`` before ``layers.10``."""
    parts = re.split(r"([0-9]{1,18})", name)  # int() refuses thousands of digits
    return tuple((int(p), "") if i % 2 else (0, p) for i, p in enumerate(parts))


class NothingThere(CheckpointError):
    """A path without anything that looks like a checkpoint."""


class Tensor(Protocol):
    """Facts of one tensor, known before it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str:
        """numpy's name of its dtype; of dtypes that no parameter has, perhaps the container's."""
        ...

    @property
    def nbytes(self) -> int: ...


class Container(Protocol):
    """A folder or file of named arrays, opened for reading.

    Attributes:
        left_out: whatever the container holds beside tensors, by name, each with the reason why
            it is not one.
        mapped: whether `numpy` and `torch` give tensors over the memory of mapped files, which
            must stay as they are; otherwise, as in `slice` and `pieces`, they are copies.
    """

    left_out: dict[str, str]
    mapped: bool

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every `Tensor` by name, in natural order."""
        ...

    def numpy(self, name: str) -> "np.ndarray":
        """One tensor, mapped from its file where that is possible."""
        ...

    def slice(self, name: str, start: int, stop: int) -> "np.ndarray":
        """Entries ``start`` to ``stop`` of the first axis of a tensor, clipped as slices are."""
        ...

    def part(self, name: str, part: Region) -> "np.ndarray":
        """A part of a tensor, without the rest where that is possible.

        Args:
            name: the tensor.
            part: a slice of every dimension, with both ends and without a step.
        """
        ...

    def pieces(self, name: str, nbytes: int = CHUNK_BYTES) -> "Iterator[np.ndarray]":
        """One tensor in contiguous pieces along its first axis, of about ``nbytes`` bytes.

        Several threads may read, each another tensor.
        """
        ...

    def checksum(self, name: str) -> int | None:
        """The CRC-32 that the container states of the bytes of a tensor in C order, if it does."""
        ...

    def torch(self, name: str) -> "torch.Tensor":
        """One tensor that may be written to, which never reaches the file; mapped if possible."""
        ...

    def files(self) -> Iterable[Path]:
        """Every file that the tensors are read from."""
        ...

    def describe(self) -> str:
        """The layout in a few words, for people."""
        ...

    def close(self) -> None:
        """Releases the files; arrays that were returned stay valid."""
        ...


class Writer(ABC):
    """Writes the tensors of a checkpoint, in any order, each once; threads may share it.

    A context manager: leaving it without an exception completes the output.
    """

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    @abstractmethod
    def write(self, name: str, chunks: "Iterable[np.ndarray]") -> None:
        """Writes one tensor, given in consecutive chunks along its first axis, or flat.

        Raises:
            ValueError: no such tensor or it was written before; chunks of another dtype or size.
            BadInput: the system refuses, such as a full disk.
        """


class ContainerKind(ABC):
    """One kind of container: how it is recognised, opened and, unless it is only read, written.

    Attributes:
        noun: its name with an article, for messages.
        has_items: whether it may hold several checkpoints, chosen by ``item=``.
        needs_config: whether a config.json always lies beside it, so that neither the config nor
            the naming has to be inferred from its tensors.
        is_folder: whether a checkpoint is a folder with everything below it, rather than some of
            the files of a folder.
        sharded: whether its tensors may be spread over several files of a largest size.
        compressed: whether its files are smaller than the tensors in them.
        chunked: whether its tensors may be cut along every dimension.
        remote: whether it may be in an object store.
        is_copy: whether it is mostly a copy of what else is there, and looked for last.
    """

    noun: str
    has_items: bool = False
    needs_config: bool = False
    is_folder: bool = False
    sharded: bool = False
    compressed: bool = False
    chunked: bool = False
    remote: bool = False
    is_copy: bool = False

    @abstractmethod
    def looks_like(self, path: Path) -> bool:
        """Whether a file or folder seems to be one, whole or damaged.

        Raises:
            OSError, CheckpointError: it may not be looked at.
        """

    @abstractmethod
    def recognises(self, names: Collection[str]) -> bool:
        """Whether a folder with files of these names seems to be one."""

    def weight_files(self, names: list[str], where: str) -> list[str]:
        """The names of the files that hold the weights, among those of a folder it recognises.

        Raises:
            CheckpointError: there are several candidates; ``where`` names the folder.
        """
        return names

    @abstractmethod
    def open(self, path: Path, item: str | None) -> Container:
        """Opens a file or folder, of several checkpoints in it the one that ``item`` names.

        Raises:
            CheckpointError: it is damaged, or not of this kind.
            ArgumentError: no such item, or several of equal standing.
        """

    def output_files(self, specs: Specs, max_shard_size: int) -> dict[str, str]:
        """The file, or folder, of the output that each tensor goes into, by the tensor's name."""
        raise NotImplementedError

    def open_writer(
        self,
        folder: Path,
        specs: Specs,
        *,
        max_shard_size: int,
        parts: Mapping[str, tuple[int, ...]],
    ) -> Writer:
        """A writer of tensors into a folder.

        Args:
            folder: an empty folder.
            specs: shape and dtype of every tensor.
            max_shard_size: bytes of a file, where the container has several.
            parts: if ``chunked``, into how many parts along each dimension a tensor is cut so that
                each can be read alone, by name; tensors that it leaves out are cut into rows.
        """
        raise NotImplementedError
