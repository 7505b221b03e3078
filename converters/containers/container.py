"""The interface of all containers (safetensors, PyTorch, …): readers, writers and kinds."""

import dataclasses
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

from griffin_eval.converters.tensors import LazyTensor, Shape
from griffin_eval.errors import BadInput, CheckpointError
from griffin_eval.messages import listed

if TYPE_CHECKING:
    import numpy as np


MAX_NAME = 1000  # characters; messages show names in full

Specs = Mapping[str, tuple[tuple[int, ...], str]]  # shape and dtype of every tensor, by name


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Sort digits by value: ``layers.2`` before ``layers.10``."""
    parts = re.split(r"([0-9]{1,18})", name)  # int() refuses thousands of digits
    return tuple((int(p), "") if i % 2 else (0, p) for i, p in enumerate(parts))


class NothingThere(CheckpointError):
    """A path without anything that looks like a checkpoint."""


@dataclasses.dataclass(eq=False)
class Container:
    """A folder or file of named tensors, opened for reading.

    Attributes:
        tensors: Every tensor by name, in natural order.
        layout: Layout in a few words, for people.
        files: Returns every file that the tensors are read from.
        left_out: Reasons why entries of the container are not among ``tensors``, by name.
        root: Name within the container above all tensors' names; "" if there is none.
    """

    tensors: Mapping[str, LazyTensor]
    layout: str
    files: Callable[[], Iterable[Path]]
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    root: str = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the files; arrays and tensors that were returned keep what they need."""
        self.tensors = {}


def in_natural_order(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return tensors sorted by name."""
    return {name: tensors[name] for name in sorted(tensors, key=natural_key)}


class Writer(ABC):
    """Writes the tensors of a checkpoint, in any order, each once; threads may share it.

    A context manager: leaving it without an exception completes the output. ValueError if there
    are no tensors, or a tensor has another dtype than the container can hold.
    """

    def __init__(self, where: Path, specs: Specs, dtypes: Collection[str]):
        if not specs:
            raise ValueError("no tensors to write: expected at least one")
        if unknown := sorted(name for name, (_, dtype) in specs.items() if dtype not in dtypes):
            names = listed(unknown, lambda name: f"{name!r} is {specs[name][1]}")
            raise ValueError(f"expected dtypes {', '.join(dtypes)}, but {names}")
        self._where = where
        self._specs = {name: (tuple(shape), dtype) for name, (shape, dtype) in specs.items()}
        self._missing, self._lock = dict.fromkeys(specs), threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self._release()

    def write(self, name: str, chunks: "Iterable[np.ndarray]") -> None:
        """Write one tensor, given in consecutive chunks along its first axis, or flat.

        Raises:
            ValueError: no such tensor or it was written before; chunks of another dtype or size.
            BadInput: the system refuses, such as a full disk.
        """
        if name not in self._specs:
            raise ValueError(f"{name!r} is not among the tensors to write")
        if name not in self._missing:
            raise ValueError(f"{name!r} was written before")
        try:
            self._write(name, *self._specs[name], chunks)
        except BadInput:  # raised by the system or by the producer of the chunks
            raise
        except ValueError as error:
            raise ValueError(f"{self._where}: {name!r} {error}") from None
        with self._lock:
            del self._missing[name]

    def close(self) -> None:
        """Complete the output; ValueError if tensors were not written, BadInput if the system
        refuses."""
        if self._missing:
            raise ValueError(
                f"{self._where}: {len(self._missing)} tensors were never written: "
                f"{listed(self._missing, repr)}"
            )
        self._finish()

    @abstractmethod
    def _write(
        self, name: str, shape: Shape, dtype: str, chunks: "Iterable[np.ndarray]"
    ) -> None: ...

    @abstractmethod
    def _finish(self) -> None:
        """Complete an output whose tensors are all written; it may be called twice."""

    def _release(self) -> None:  # noqa: B027
        """Release what is open, also after an exception."""


def _read_only(*_: object) -> NoReturn:
    raise NotImplementedError("this container is only read")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContainerKind:
    """One kind of container: how it is recognised, opened and, unless it is only read, written.

    Attributes:
        noun: Name with an article, for messages.
        looks_like: Returns whether a file or folder seems to be one, whole or damaged; raises
            OSError or CheckpointError if it may not be looked at.
        recognises: Returns whether a folder with files of these names seems to be one.
        weight_files: Returns the names of the files that hold the weights among those of a
            folder that it recognises; raises CheckpointError, with the name of the folder, if
            there are several candidates.
        open: Opens a file or folder, of several checkpoints in it the one of a name; raises
            CheckpointError if it is damaged, or ArgumentError if there is none of that name.
        output_files: Returns the file, or folder, of the output that each tensor goes into, for
            a largest size of a file.
        open_writer: Returns a writer of tensors into an empty folder, for the same size, and by
            name of a tensor the number of parts along each dimension into which it is cut so
            that each can be read alone; tensors without an entry are cut into rows.
        has_items: Whether it may hold several checkpoints, chosen by ``item=``.
        needs_config: Whether a config.json always lies beside it, so that neither the config nor
            the naming has to be inferred from its tensors.
        is_folder: Whether a checkpoint is a folder with everything below it, rather than some of
            the files of a folder.
        sharded: Whether its tensors may be spread over several files of a largest size.
        compressed: Whether its files are smaller than the tensors in them.
        chunked: Whether its tensors may be cut along every dimension.
        remote: Whether it may be in an object store.
        is_copy: Whether it is usually a copy of another checkpoint in the folder; looked for last.
    """

    noun: str
    looks_like: Callable[[Path], bool]
    recognises: Callable[[Collection[str]], bool]
    open: Callable[[Path, str | None], Container]
    weight_files: Callable[[list[str], str], list[str]] = lambda names, where: names
    output_files: Callable[[Specs, int], dict[str, str]] = _read_only
    open_writer: Callable[[Path, Specs, int, Mapping[str, Shape]], Writer] = _read_only
    has_items: bool = False
    needs_config: bool = False
    is_folder: bool = False
    sharded: bool = False
    compressed: bool = False
    chunked: bool = False
    remote: bool = False
    is_copy: bool = False
