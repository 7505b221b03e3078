"""Reads the parameters of an Orbax checkpoint, whatever trainer wrote it, in bounded memory.

tensorstore reads the arrays; jax and Orbax are not needed. Names of parameters mean nothing here:
only which part of a tree holds parameters is found out, and what else there is gets listed.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from griffin_eval.converters.arrays.dtypes import FLOATS, ITEM_BYTES
from griffin_eval.converters.arrays.grid import Region
from griffin_eval.converters.arrays.pieces import CHUNK_BYTES
from griffin_eval.converters.arrays.torch import torch_tensor
from griffin_eval.converters.containers.container import natural_key
from griffin_eval.converters.containers.orbax.find import (
    MANIFEST,
    MSGPACK,
    TREE_METADATA,
    Keys,
    Leaf,
    choose_root,
    is_optimizer,
    locate,
    not_a_parameter,
    read_tree,
    strip_leaves,
    subtree_problem,
)
from griffin_eval.converters.containers.orbax.library import advice, reason
from griffin_eval.converters.containers.orbax.msgpack import PLACEHOLDER, MappedArray, read_msgpack
from griffin_eval.converters.containers.orbax.remote import shown
from griffin_eval.converters.containers.orbax.store import Store, StoredArray
from griffin_eval.errors import ArgumentError, CheckpointError
from griffin_eval.json_files import files_within
from griffin_eval.messages import did_you_mean, listed

if TYPE_CHECKING:
    import numpy as np
    import torch

_ARRAYS = ("jax.Array", "np.ndarray")


class TensorInfo(NamedTuple):
    """One parameter.

    Attributes:
        name: its keys joined by "/", below the root of the parameters.
        shape: its shape.
        dtype: numpy's name of its dtype, such as ``bfloat16``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class OrbaxFolder:
    """The parameters of an item, a step or a root of steps; of a root, the latest finished step.

    Opening reads and checks all metadata, and no array. Keys of lists, and numbers, are strings;
    the last key ``value`` that NNX adds is left away.

    Attributes:
        folder: folder of the item.
        tensors: every parameter by name, in natural order.
        left_out: everything else, by its keys joined by "/", with the reason why it is no
            parameter.
        step: name of the step's folder, or None.
        item: name of the item's folder, or None.
        root: keys, joined by "/", above all the names.

    Args:
        folder: an item, a step or a root of steps; or a msgpack file of flax.
        item: an item, a subtree, or both, such as ``ema_params`` or ``state/params``.

    Raises:
        CheckpointError: no checkpoint, or something missing or damaged; naming folder, file or key.
        ArgumentError: several sets of parameters of equal standing, or no such item.
        MissingExtraError: tensorstore is not installed.
    """

    mapped = False

    def __init__(self, folder: str | Path, *, item: str | None = None):
        location = locate(folder, item)
        self.folder, self.step, self.item = location.folder, location.step, location.item
        self._skipped, self._closed = location.skipped, False
        self._arrays: dict[str, StoredArray | MappedArray] = {}
        self._sliced = ""  # the name of the last one
        self._places: list[str] = []  # folders that hold arrays
        arrays, others = self._open(location.subtree)
        self.left_out = {f"item {name}": "another item" for name in location.others}
        self.left_out |= {"/".join(keys): why for keys, why in others.items()}
        floats = {keys: array for keys, array in arrays.items() if array.dtype in FLOATS}
        for keys, array in arrays.items():
            if keys not in floats:
                self.left_out["/".join(keys)] = not_a_parameter(keys, array.dtype, array.shape)
        asked = (
            (location.item, *location.subtree)
            if location.item and location.others
            else location.subtree
        )
        below = [keys[len(location.subtree) :] for keys in floats]
        root = choose_root(str(self.folder), below, asked)
        root = (*location.subtree, *root)
        self.root = "/".join(root)
        chosen = {}
        for keys in floats:
            if keys[: len(root)] == root:
                chosen[keys] = keys[len(root) :]
            else:
                self.left_out["/".join(keys)] = f"not in {self.root}"
        if not chosen:
            raise CheckpointError(
                f"{self.folder} holds no floating-point arrays{' in ' * bool(root)}{self.root}: "
                f"found {listed(self.left_out) or 'nothing'}"
            )
        names = strip_leaves(list(chosen.values()))
        self.tensors: dict[str, TensorInfo] = {}
        for keys in sorted(chosen, key=lambda keys: natural_key("/".join(keys))):
            name, array = names[chosen[keys]], floats[keys]
            if name in self.tensors:
                raise CheckpointError(f"{self.folder} holds two arrays that are called {name!r}")
            self.tensors[name] = TensorInfo(name, array.shape, array.dtype)
            self._arrays[name] = array

    def __enter__(self) -> "OrbaxFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def files(self) -> Iterable[Path]:
        if self.folder.is_file():
            return [self.folder]
        # Nothing else: a conversion may write into a folder within this one.
        named = [self.folder / name for name in (TREE_METADATA, MANIFEST, MSGPACK)]
        stored = (path for place in self._places for path in files_within(self.folder / place))
        return [*filter(Path.is_file, named), *stored]

    def close(self) -> None:
        """Lets go of the files; arrays that were returned stay valid."""
        self._closed = True
        self._arrays.clear()

    def describe(self) -> str:
        """The layout, such as ``OCDBT, zarr, params root, step 12000, item default``."""
        parts = list(self._layout)
        if self.root:
            parts.append(f"{self.root} root")
        if self.step is not None:
            parts.append(f"step {self.step}")
        if self._skipped:
            parts.append(f"unfinished: {', '.join(self._skipped)}")
        if self.item is not None:
            parts.append(f"item {self.item}")
        return ", ".join(parts)

    def numpy(self, name: str) -> "np.ndarray":
        """A parameter, as a fresh array; bfloat16 is ml_dtypes' dtype.

        Raises:
            CheckpointError: no such parameter, or its data are damaged.
        """
        return self._read(name, lambda array: array.whole())

    def torch(self, name: str) -> "torch.Tensor":
        """A parameter, as a fresh tensor."""
        return torch_tensor(self.numpy(name))

    def slice(self, name: str, start: int, stop: int) -> "np.ndarray":
        """Rows ``start`` to ``stop`` of a parameter, clipped as slices are.

        In ascending order a large array is read once; in another, its chunks are read again.

        Raises:
            CheckpointError: no such parameter, or its data are damaged.
            ArgumentError: it has no rows, or they are not counted from its beginning.
        """
        shape = self._find(name).shape
        if not shape or start < 0 or stop < start:
            raise ArgumentError(f"{name!r} of shape {shape} has no rows {start} to {stop}")
        if self._sliced not in ("", name):
            self._arrays[self._sliced].release()
        self._sliced = name
        return self._rows(name, min(start, shape[0]), min(stop, shape[0]))

    def part(self, name: str, part: Region) -> "np.ndarray":
        """A part of a parameter, a slice of each dimension; no chunk is read that it does not need.

        Raises:
            CheckpointError: no such parameter, or its data are damaged.
        """
        return self._read(name, lambda array: array.part(part))

    def checksum(self, name: str) -> None:
        """None: the arrays, as Orbax writes them, have no checksum."""

    def pieces(self, name: str, nbytes: int = CHUNK_BYTES) -> "Iterator[np.ndarray]":
        """A parameter in consecutive pieces along its first axis, of about ``nbytes``.

        The fastest way through one: pieces are chunks as they are stored, where those are small,
        and the next one is read while this one is used. Several threads may read, each another
        parameter.

        Raises:
            CheckpointError: no such parameter, or its data are damaged.
        """
        shape = self._find(name).shape
        if not shape:
            yield self.numpy(name)
            return
        array = self._arrays[name]
        rows = array.rows(nbytes)
        try:
            for start in range(0, shape[0], rows):
                yield self._rows(name, start, min(start + rows, shape[0]))
        finally:
            array.release()

    def _find(self, name: str) -> TensorInfo:
        if self._closed:
            raise ValueError(f"{self.folder} was closed: read {name!r} before closing it")
        if name not in self.tensors:
            raise CheckpointError(
                f"{self.folder}: no parameter {name!r}{did_you_mean(name, self.tensors)}"
            )
        return self.tensors[name]

    def _rows(self, name: str, start: int, stop: int) -> "np.ndarray":
        return self._read(name, lambda array: array.read(start, stop))

    def _read(
        self, name: str, read: "Callable[[StoredArray | MappedArray], np.ndarray]"
    ) -> "np.ndarray":
        tensor = self._find(name)
        try:
            return read(self._arrays[name])
        except (ValueError, OSError) as error:
            self._arrays[name].release()
            raise CheckpointError(
                f"{shown(self.folder)}: {name!r} cannot be read: {reason(error)}{advice(error)}"
            ) from None
        except MemoryError:
            raise CheckpointError(
                f"{self.folder}: {name!r}, {tensor.dtype} of shape {tensor.shape}, does not fit "
                "into memory, if its shape is true"
            ) from None

    def _open(self, subtree: Keys) -> tuple[dict[Keys, StoredArray | MappedArray], dict[Keys, str]]:
        """The arrays of a subtree by their keys, and what can be left out unopened."""
        inside: dict[Keys, MappedArray] = {}
        stored: dict[Keys, str] = {}
        kinds: dict[Keys, Leaf] = {}
        zarr3 = sparse = False
        aggregate = self.folder if self.folder.is_file() else self.folder / MSGPACK
        if (self.folder / TREE_METADATA).is_file():
            leaves, zarr3, sparse = read_tree(self.folder)
            kinds = {leaf.keys: leaf for leaf in leaves}
            if len(kinds) < len(leaves):
                raise CheckpointError(f"{self.folder / TREE_METADATA} names a leaf twice")
        elif aggregate.is_file():
            for keys, value in read_msgpack(aggregate).items():
                kind = "scalar" if value is not None else "None"
                if isinstance(value, MappedArray):
                    inside[keys], kind = value, "np.ndarray"
                elif isinstance(value, str) and value.startswith(PLACEHOLDER):
                    stored[keys], kind = value.removeprefix(PLACEHOLDER), "np.ndarray"
                kinds[keys] = Leaf(keys, kind)
        else:
            raise CheckpointError(
                f"{self.folder}: {TREE_METADATA} is missing, and without it names of arrays are "
                "ambiguous: download or save the folder again"
            )
        if subtree and not any(keys[: len(subtree)] == subtree for keys in kinds):
            raise subtree_problem(str(self.folder), subtree, kinds)
        wanted, others = [], {}
        for keys, leaf in kinds.items():
            if keys[: len(subtree)] != subtree:
                others[keys] = f"not in {'/'.join(subtree)}"
            elif is_optimizer(keys[len(subtree) :]):
                others[keys] = "state of an optimizer"
            elif leaf.kind not in _ARRAYS:
                others[keys] = "empty" if leaf.kind in ("None", "Dict", "List") else leaf.kind
            else:
                wanted.append(keys)
        where = {k: stored.get(k, ".".join(k)) for k in wanted if k not in inside}
        self._layout: tuple[str, ...] = ("msgpack",)
        arrays: dict[Keys, StoredArray | MappedArray] = {
            keys: inside[keys] for keys in wanted if keys in inside
        }
        if where or not inside:
            store = Store(self.folder, zarr3, sparse)
            self._layout = ("OCDBT" if store.ocdbt else "a folder per array", store.driver)
            opened = store.open(list(where.values()))
            self._places = store.places(where.values())
            arrays |= {keys: opened[name] for keys, name in where.items()}
        lies = [
            f"{'/'.join(keys)!r} as {kinds[keys].write_shape}, stored {array.shape}"
            for keys, array in arrays.items()
            if not _agree(kinds[keys].write_shape, array.shape)
        ]
        if lies:
            raise CheckpointError(
                f"{self.folder / TREE_METADATA} disagrees with the arrays: {listed(lies)}; they "
                "belong to different checkpoints, or are damaged"
            )
        return arrays, others


def _agree(part: tuple[int, ...] | None, shape: tuple[int, ...]) -> bool:
    """Whether the shape that one device wrote can be that of a part of an array."""
    return part is None or (
        len(part) == len(shape) and all(p <= max(1, n) for p, n in zip(part, shape, strict=True))
    )
