"""Opens a checkpoint of any format: its config, and its tensors by canonical name and layout."""

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from griffin_eval.config import GriffinConfig
from griffin_eval.converters.formats import FORMATS, Format
from griffin_eval.converters.huggingface_config import to_griffin_config
from griffin_eval.converters.infer import complete_config, fields_from_shapes
from griffin_eval.converters.manifest import chunks
from griffin_eval.converters.naming import SAME, Binding, Row, bind, canonical_shapes
from griffin_eval.converters.resolve import listed, read_json
from griffin_eval.converters.safetensors_folder import SafetensorsFolder, name_and_shape_problems
from griffin_eval.errors import CheckpointError
from griffin_eval.layout import ParamSpec, param_specs

if TYPE_CHECKING:
    import numpy as np
    import torch

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
MODEL_TYPE = "griffin"  # of a config.json that holds the fields of GriffinConfig themselves
FLOATS = ("bfloat16", "float16", "float32", "float64")
_SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


class Tensor(Protocol):
    """What a container says of a tensor before it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class Container(Protocol):
    """A folder or file of named arrays, opened for reading."""

    @property
    def tensors(self) -> Mapping[str, Any]: ...  # of Tensor

    def numpy(self, name: str) -> "np.ndarray":
        """One tensor, mapped from its file where that is possible."""
        ...

    def close(self) -> None: ...


class Overrides(NamedTuple):
    """What a user may say of a checkpoint that its files do not.

    Attributes:
        preset: name of a preset that supplies what neither a config nor shapes say.
        item: which item of an Orbax checkpoint holds the parameters.
        visible_keys, embedding_scale, logits_soft_cap: fields of the config.
    """

    preset: str | None = None
    item: str | None = None
    visible_keys: int | None = None
    embedding_scale: bool | None = None
    logits_soft_cap: float | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the config that are set."""
        names = ("visible_keys", "embedding_scale", "logits_soft_cap")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


NO_OVERRIDES = Overrides()


class Checkpoint:
    """A checkpoint whose tensors are exactly those its config asks for.

    Attributes:
        path: as given.
        folder: the path, or the folder of a file: where config and tokenizer are.
        format: which of `griffin_eval.converters.formats.FORMATS` it is in.
        layout: how its container is laid out, for people.
        config: the architecture.
        bindings: which tensor of the container holds which parameters.
        dtypes: what each parameter is stored in, by canonical name, such as ``bfloat16``.
        left_out: tensors of the container that are no parameters, and why.

    Args:
        path: folder, or file of a ``.pt``.
        overrides: what the files do not say, or say wrongly.

    Raises:
        CheckpointError: naming the file, key or tensors that are not as they must be.
    """

    def __init__(self, path: str | Path, overrides: Overrides = NO_OVERRIDES):
        self.path = Path(path)
        self.folder = self.path if self.path.is_dir() else self.path.parent
        self.container, kind, self.layout = open_container(self.path, overrides.item)
        table = _table(self.container.tensors, kind, self.path)
        self.config, self.format = self._config(kind, table, overrides)
        self.left_out: dict[str, str] = dict(getattr(self.container, "left_out", {}))
        if isinstance(self.container, SafetensorsFolder):
            self.container.check_against(param_specs(self.config))
        self.bindings = bind(table, self.config)
        self._check()
        found = self.container.tensors
        self.dtypes = {
            spec.name: _dtype(found[binding.foreign])
            for binding in self.bindings
            for spec in binding.canonical
        }
        self._shared: tuple[Binding, np.ndarray] | None = None
        self._homes = {
            spec.name: (binding, part)
            for binding in self.bindings
            for part, spec in enumerate(binding.canonical)
        }

    @property
    def dtype(self) -> str:
        """What the embedding is stored in."""
        return self.dtypes["model.embed_tokens.weight"]

    def numpy(self, name: str) -> "np.ndarray":
        """A parameter by canonical name, in canonical layout: a view of what was read."""
        binding, part = self._homes[name]
        if len(binding.canonical) == 1:
            return binding.op.to_canonical(self.container.numpy(binding.foreign))[part]
        if self._shared is None or self._shared[0] is not binding:  # read once for all its parts
            self._shared = (binding, self.container.numpy(binding.foreign))
        return binding.op.to_canonical(self._shared[1])[part]

    def pieces(self, name: str) -> Iterator["np.ndarray"]:
        """The same in contiguous pieces of its leading axis, read piece by piece where possible."""
        binding, _ = self._homes[name]
        if binding.op is SAME and hasattr(self.container, "pieces"):
            yield from self.container.pieces(binding.foreign)  # type: ignore[attr-defined]
        else:
            yield from chunks(self.numpy(name))

    def torch(self, name: str) -> "torch.Tensor":
        """A parameter by canonical name, in canonical layout: the mapped file where it can be."""
        if isinstance(self.container, SafetensorsFolder):
            return self.container.torch(name)
        import numpy as np
        import torch

        array = np.ascontiguousarray(self.numpy(name))
        if not array.flags.writeable:
            array = array.copy()
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def close(self) -> None:
        self.container.close()

    def _config(
        self, kind: str, table: Sequence[Row] | None, overrides: Overrides
    ) -> tuple[GriffinConfig, Format]:
        names = [f for f in FORMATS.values() if f.container == kind and f.table is table]
        written = self.folder / CONFIG_FILE
        if written.is_file() or kind == "safetensors":
            raw = read_json(written)
            if raw.get("model_type") == MODEL_TYPE:
                config, chosen = _own_config(raw, str(written)), names[-1]
            else:
                config, chosen = to_griffin_config(raw, source=str(written)), names[0]
            if changes := overrides.fields:
                for name, value in changes.items():
                    logger.warning(
                        "%s is %s, not %s as in %s", name, value, getattr(config, name), written
                    )
                config = dataclasses.replace(config, **changes)
            return config, chosen
        found = {name: tensor.shape for name, tensor in self.container.tensors.items()}
        known = fields_from_shapes(canonical_shapes(table, found), str(self.path))
        return complete_config(known, overrides.fields, overrides.preset, str(self.path)), names[0]

    def _check(self) -> None:
        found = self.container.tensors
        specs = {b.foreign: _foreign_spec(b) for b in self.bindings}
        problems = name_and_shape_problems({n: t.shape for n, t in found.items()}, specs)
        if refused := [n for n in specs if n in found and _dtype(found[n]) not in FLOATS]:
            names = listed(refused, lambda n: f"{n!r} is {_dtype(found[n])}")
            problems.append(f"{len(refused)} of a dtype other than {', '.join(FLOATS)} ({names})")
        if problems and not isinstance(self.container, SafetensorsFolder):
            raise CheckpointError(
                f"{self.path} does not hold the parameters of its config: {'; '.join(problems)}"
            )


def open_container(path: Path, item: str | None = None) -> tuple[Container, str, str]:
    """Opens whatever lies at a path; gives the container, its kind and how it is laid out.

    Raises:
        CheckpointError: nothing there that can be read.
    """
    if item is None and any(path.glob("*.safetensors*")):
        return SafetensorsFolder(path), "safetensors", "safetensors"

    from griffin_eval.converters.torch_file import TorchFile, looks_like_torch

    if item is None and looks_like_torch(path):
        return TorchFile(path), "torch", "torch.save"

    from griffin_eval.converters.orbax_folder import OrbaxFolder, looks_like_orbax

    if looks_like_orbax(path):
        container = OrbaxFolder(path, item=item)
        return container, "orbax", container.describe()
    if item is not None:
        raise CheckpointError(f"{path} is no Orbax checkpoint, so that it has no item {item!r}")
    raise CheckpointError(
        f"{path} holds no checkpoint: expected safetensors, an Orbax folder or a .pt file"
    )


def _table(names: Mapping[str, Any], kind: str, path: Path) -> Sequence[Row] | None:
    """How a container names its tensors, told by the embedding; canonical if it is not found."""
    if kind == "safetensors":
        return None
    tables = (table for f in FORMATS.values() if f.container == kind and (table := f.table))
    embeddings = {}
    for table in tables:
        (row,) = (row for row in table if row.canonical == ("model.embed_tokens.weight",))
        embeddings[row.foreign] = table
    for name, table in embeddings.items():
        if name in names:
            return table
    raise CheckpointError(
        f"{path} holds no tensor named {' or '.join(embeddings)}, one of which every known naming "
        f"has; it holds {listed(names)}"
    )


def _own_config(raw: dict[str, Any], source: str) -> GriffinConfig:
    names = [field.name for field in dataclasses.fields(GriffinConfig)]
    given: dict[str, Any] = {key: value for key, value in raw.items() if key in names}
    if missing := [n for n in names if n not in given]:
        raise CheckpointError(f"{source} lacks {', '.join(missing)}, which a griffin config has")
    try:
        given["block_pattern"] = tuple(given["block_pattern"])
        return GriffinConfig(**given)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{source}: {error}") from None


def _foreign_spec(binding: Binding) -> ParamSpec:
    first = binding.canonical[0]
    return dataclasses.replace(first, name=binding.foreign, shape=binding.shape)


def _dtype(tensor: Tensor) -> str:
    return _SAFETENSORS_DTYPES.get(tensor.dtype, tensor.dtype)


def warn_not_finite(name: str, not_finite: int, size: int) -> None:
    """Says in the log that a tensor holds NaN or infinity."""
    if not_finite:
        logger.warning("%s: %d of %d weights are NaN or infinite", name, not_finite, size)
